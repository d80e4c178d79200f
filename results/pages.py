"""Tables and figures of all pages, made from the records in this folder.

    python results/pages.py            write them: tables of the results' pages, figures of README.md and docs/*.md
    python results/pages.py --check    say what differs, and end with 1 if something does
    python results/pages.py --list     print every figure by its name

Every experiment has a `page.py` with two functions: `tables()` gives Markdown by name, `figures()` numbers by name. An
experiment is a folder of results/; that of the reproduction, `paper`, is paper/results/.
A table stands on a page between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is `experiment/table`, or `table`
alone on the experiment's own page. A figure is followed by the name of its source, as in
`90.36<!-- streaming/replay-k3 -->`, and is rounded as it is written.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.append(str(HERE))
from records import PAPER, folder_of  # noqa: E402

TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"([−+-]?\d[\d,]*(?:\.\d+)?)(<!-- (\S+/\S+) -->)")


def pages() -> list[Path]:
    docs, results = sorted((ROOT / "docs").glob("*.md")), sorted(HERE.rglob("README.md"))
    return [ROOT / "README.md", *docs, *results, *PAPER.glob("README.md")]


def owner(page: Path) -> str | None:
    """The experiment whose page it is."""
    return "paper" if page.parent == PAPER else page.parent.name if page.parent.parent == HERE else None


@cache
def experiment(name: str) -> ModuleType:
    """The `page.py` of an experiment; it may import its neighbours and what all of them share."""
    path = folder_of(name) / "page.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"results_{name.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def experiments() -> list[str]:
    return sorted(["paper", *(path.parent.name for path in HERE.glob("*/page.py"))])


@cache
def tables(name: str) -> dict[str, str]:
    return {f"{name}/{key}": text.strip() for key, text in experiment(name).tables().items()}


@cache
def figures(name: str) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in experiment(name).figures().items()}


def recorded(kind: Callable[[str], Mapping[str, Any]], name: str) -> Any:
    """The table or the figure of this name."""
    own = name.partition("/")[0]
    found = kind(own) if own in experiments() else {}
    if name not in found:
        near = get_close_matches(name, found or experiments(), 1)
        raise SystemExit(f"no record has '{name}'" + (f": did you mean {near[0]}?" if near else ""))
    return found[name]


def rounded(value: float, like: str) -> str:
    """With as many decimals as `like`, its sign where that has one, and its commas."""
    decimals = len(like.partition(".")[2])
    sign = "+" if like.startswith("+") else ""
    text = format(value, f"{sign}{',' if ',' in like else ''}.{decimals}f")
    return text.replace("-", "−")


def made(text: str, of: str | None) -> str:
    """The text of a page as the records have it; `of`: the experiment whose page it is."""

    def table(found: re.Match[str]) -> str:
        name = found[2] if "/" in found[2] else f"{of}/{found[2]}"
        return f"{found[1]}{recorded(tables, name)}\n{found[3]}"

    def figure(found: re.Match[str]) -> str:
        return rounded(recorded(figures, found[3]), found[1]) + found[2]

    return FIGURE.sub(figure, TABLE.sub(table, text))


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--check", action="store_true")
    ask.add_argument("--list", action="store_true")
    given = ask.parse_args()
    if given.list:
        every = [line for name in experiments() for line in figures(name).items()]
        print("\n".join(f"{name:<60} {value:.6g}" for name, value in every))
        return 0
    stale = 0
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = made(old, owner(page))
        if new != old and given.check:
            stale += 1
            changes = [f"  {a}\n→ {b}" for a, b in zip(old.splitlines(), new.splitlines(), strict=False) if a != b]
            print(f"{page.relative_to(ROOT)} is not what the records say:\n" + "\n".join(changes[:5]))
        elif new != old:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
