"""Who imports whom in `src/parlay`: the rules of the house, and its drawing for docs/architecture.md.

    python docs/house.py            say what breaks a rule
    python docs/house.py --draw     write docs/house.svg too

Imports inside functions and under TYPE_CHECKING count as all others do, and so do names of modules in strings that are
given to `import_module`. A module imports from the layers below its own, or from its own room without a cycle.
"""

from __future__ import annotations

import argparse
import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "signs", "process", "files", "timeline", "faults", "lanes"),
    ("config",),
    ("methods",),
    ("data", "models"),
    ("costs", "batch"),
    ("partitioning",),
    ("stores",),
    ("link",),
    ("stage",),
    ("methods.*",),
    ("engine",),
    ("run",),
    ("report",),
    ("bench",),
    ("plan", "forecast"),
    ("compare", "launch"),
    ("demo",),
    ("cli",),
)
"""From the ground up. `methods` is the table of names, `methods.*` the methods themselves."""
SAYS = (
    "errors, signs of life, this process, files, faults, the seam to a GPU",
    "what to run: keys, recipes, schedules",
    "the table of methods, by name",
    "data sets and networks",
    "what blocks cost; a batch",
    "cuts of a network",
    "where states lie: device, host, file",
    "a cut at run time: states, slots, filters",
    "a stage at work: blocks, optimiser, precision",
    "one file per method",
    "a step of the stages that a process owns",
    "a run: loop, checkpoints, records",
    "run folders to a page",
    "systems timed side by side",
    "cuts, memory and speed before anything runs",
    "several runs; several processes",
    "the main job on the embedded data",
    "the command line",
)
MOST_LINES, MOST_IN_A_MODULE, MOST_IMPORTS = 17_200, 400, 15


def modules() -> dict[str, Path]:
    """By their names behind `parlay.`; a package by its own name."""
    found = {}
    for path in sorted((SOURCE / "parlay").rglob("*.py")):
        parts = path.relative_to(SOURCE / "parlay").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(known: dict[str, Path]) -> dict[str, set[str]]:
    """Of each module, the modules of Parlay that it imports anywhere."""
    return {name: _imported(path, known) - {name} for name, path in known.items() if name}


def _imported(path: Path, known: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {_module(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {_module(f"{node.module}.{alias.name}", known) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            found |= {_module(a.value, known) for a in node.args if isinstance(a, ast.Constant)}
    return found - {""}


def _module(name: str, known: dict[str, Path]) -> str:
    """The module that a dotted name is, or is in; "" for others' and for the package itself."""
    if name.split(".")[0] != "parlay":
        return ""
    own = name.removeprefix("parlay").removeprefix(".")
    while own and own not in known:
        own = own.rpartition(".")[0]
    return own


def layer(module: str) -> int:
    """The number of a module's layer."""
    room = module.partition(".")[0]
    name = f"{room}.*" if room != module and any(f"{room}.*" in rooms for rooms in LAYERS) else room
    for number, rooms in enumerate(LAYERS):
        if name in rooms:
            return number
    raise KeyError(f"{module} stands in no layer: name its room in docs/house.py")


def broken() -> list[str]:
    """Every rule that is broken, in a line."""
    known = modules()
    edges = imports(known)
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    found = [f"{name} has {n} lines, more than {MOST_IN_A_MODULE}" for name, n in lines.items() if n > MOST_IN_A_MODULE]
    if sum(lines.values()) > MOST_LINES:
        found.append(f"src/parlay has {sum(lines.values())} lines, more than {MOST_LINES}")
    for name, others in sorted(edges.items()):
        if len(others) > MOST_IMPORTS:
            found.append(f"{name} imports {len(others)} others, more than {MOST_IMPORTS}: {', '.join(sorted(others))}")
        found += [
            f"{name} imports {other}, which stands above it" for other in sorted(others) if _is_above(name, other)
        ]
    return found + [f"a cycle: {' -> '.join(cycle)}" for cycle in cycles(edges)]


def _is_above(name: str, other: str) -> bool:
    same_room = name.partition(".")[0] == other.partition(".")[0] and layer(name) == layer(other)
    return not same_room and layer(other) >= layer(name) and not (layer(name) == layer(other) == 0)


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """One for each group of modules that reach each other."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return found


# The drawing

WIDTH, HEIGHT, GAP = 760, 30, 6
PLAIN = {"methods": "methods/__init__"}


def drawing() -> str:
    """The layers, the ground below, with the lines of each."""
    known = modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    rows = []
    for number, (rooms, says) in enumerate(zip(LAYERS, SAYS, strict=True)):
        inside = [name for name in known if name and layer(name) == number]
        if not inside:
            continue
        there = [room for room in rooms if any(name.partition(".")[0] == room.removesuffix(".*") for name in inside)]
        rows.append(
            (
                ", ".join(f"{r.removesuffix('.*')}/" if _is_room(r, known) else PLAIN.get(r, r) for r in there),
                says,
                sum(lines[n] for n in inside),
            )
        )
    rows.reverse()
    tall = len(rows) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}"',
        ' font-family="sans-serif" font-size="12">',
        "<style>rect{fill:#eef2f7;stroke:#9fb0c3}.n{font-weight:600}.l{fill:#5b6b7c}text{fill:#1c2733}"
        "@media(prefers-color-scheme:dark){rect{fill:#1d2733;stroke:#43566b}text{fill:#dbe4ee}.l{fill:#93a4b5}}</style>",
    ]
    for n, (rooms, says, count) in enumerate(rows):
        y = GAP + n * (HEIGHT + GAP)
        parts += [
            f'<rect x="{GAP}" y="{y}" width="{WIDTH - 2 * GAP}" height="{HEIGHT}" rx="5"/>',
            f'<text class="n" x="{GAP + 10}" y="{y + 19}">{escape(rooms)}</text>',
            f'<text x="330" y="{y + 19}">{escape(says)}</text>',
            f'<text class="l" x="{WIDTH - GAP - 10}" y="{y + 19}" text-anchor="end">{count:,}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _is_room(room: str, known: dict[str, Path]) -> bool:
    path = known.get(room.removesuffix(".*"))
    return room.endswith(".*") or (path is not None and path.name == "__init__.py" and room != "methods")


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--draw", action="store_true")
    if ask.parse_args().draw:
        (ROOT / "docs" / "house.svg").write_text(drawing())
    found = broken()
    print("\n".join(found) or "the house is in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
