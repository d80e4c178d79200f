"""Make the page of these results from the records alone: README.md, accuracy.png and report.html beside this file.

    python results/streaming/page.py

Every row of `run.py` stands in it, in the order of its flags; rows called try-* in a table of their own. The records
lie in `runs/`: of each run folder recipe.toml, records.jsonl and summary.json.
"""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from run import COMMON, RUNS

from parlay import report
from parlay.recipe import METHODS
from parlay.report.speed import staleness
from parlay.report.words import memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from scores import Row, draw, number, read

HERE = Path(__file__).parent
TRY = "try-"
WANTED = {"replay-k2": 0.3, "replay-k3": 0.3, "replay-k6": 1.0, "resnet110-replay-k3": 0.5}
"""Points below serial training, at most."""
MEASURED = ("test %", "seeds", "mean", "to serial")
RANGE = 15.0
"""Points that the picture shows below the best run."""


def main() -> None:
    rows = read(RUNS, HERE / "runs")
    shown = sorted((name for name in rows if not name.startswith(TRY)), key=order)
    tried = [name for name in rows if name.startswith(TRY)]
    parts = {
        "environment": environment(rows),
        "table": table(rows, shown),
        "wanted": "\n".join(verdict(rows, name) for name in WANTED),
        "tried": trials(rows, tried) if tried else "Nothing is recorded yet.",
        "common": f"parlay train {COMMON}",
        "small": bounds(json.loads((HERE / "small.json").read_text())["runs"]),
    }
    (HERE / "README.md").write_text((HERE / "text.md").read_text().format(**parts))
    picture(rows, [*shown, *tried]).savefig(HERE / "accuracy.png", dpi=150)
    every = [folder for row in rows.values() for folder in row.folders]
    report.write(every, HERE / "report.html", "Streaming methods on CIFAR-10 with augmentation", beside=True)


def environment(rows: dict[str, Row]) -> str:
    """All there are: records of several versions say so."""
    found = [run for row in rows.values() for run in row.there]
    told = [
        f"{run.devices[0]}, torch {run.environment['torch']}, Parlay {run.environment['parlay']}, "
        f"`compile = {run.text('compile')}`"
        for run in found
        if run.devices
    ]
    return "; ".join(dict.fromkeys(told))


def table(rows: dict[str, Row], names: list[str]) -> str:
    lines = []
    for name in names:
        row = rows[name]
        late = max((steps for run in row.there if (steps := staleness(run)) is not None), default=None)
        kept = max((size for run in row.there if (size := run.auxiliary_bytes) is not None), default=None)
        lines.append([label(name), *measured(rows, row), number(late, "d"), memory(kept), f"`{row.flags}`"])
    return markdown(("", *MEASURED, "staleness, steps", "extra memory", "flags"), lines)


def trials(rows: dict[str, Row], names: list[str]) -> str:
    """Each beside the row that its flags are added to; those rows stand first."""
    bases = {name: base(rows, name) for name in names}
    lines = []
    for name in [*dict.fromkeys(found for found in bases.values() if found), *names]:
        row, other = rows[name], bases.get(name)
        gap = row.minus(rows[other]) if other else None
        lines.append([label(name), *measured(rows, row), number(gap, "+.2f"), f"`{row.flags}`"])
    return markdown(("", *MEASURED, "to the row it changes", "flags"), lines)


def bounds(runs: dict[str, dict[str, Any]]) -> str:
    """The runs of small.py: by the number of stages, the weight, and how long."""
    lines = []
    for run in sorted(runs.values(), key=lambda run: (run["stages"], run["epochs"], run["beta"], -run["bound"])):
        cut, done = run["stages"] > 1, len(run["losses"])
        ended = done == run["epochs"]
        pulls = [f"{max(own):.2f} … {min(own):.2f}" for own in run["pulls"] if ended]
        lines.append(
            [
                f"K = {run['stages']}" if cut else "serial",
                f"{run['beta']:g}" if cut else "–",
                f"{run['bound']:g} p" if cut else "–",
                f"{run['epochs']}, {run['rate']}",
                f"{run['losses'][-1][-1]:.3f}" if ended else f"diverged in epoch {done + 1}",
                f"{run['test_accuracy']:.1f}" if ended else "–",
                "; ".join(pulls) or "–",
            ]
        )
    head = (
        "",
        "beta",
        "pull at most",
        "epochs",
        "last stage's loss",
        "test %",
        "pull / p of each stage, most … least of an epoch",
    )
    return markdown(head, lines)


def measured(rows: dict[str, Row], row: Row) -> list[str]:
    reference = serial(rows, row)
    gap = row.minus(reference) if row is not reference else None
    return [row.each, row.seeds, number(row.mean), number(gap, "+.2f")]


def markdown(head: tuple[str, ...], lines: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines]])


def verdict(rows: dict[str, Row], name: str) -> str:
    row, reference, most = rows[name], serial(rows, rows[name]), WANTED[name]
    gap, missed = row.minus(reference), "**not reached**"
    if gap is None:
        word = missed if "diverged" in row.each else "not known"
        return f"- {label(name)}: {word}. Its runs: {row.each}; serial ones: {reference.each}."
    word = "reached" if gap >= -most else missed
    return f"- {label(name)}: {number(gap, '+.2f')} points; −{most} or better was wanted: {word}."


def picture(rows: dict[str, Row], names: list[str]) -> Figure:
    every = [score for row in rows.values() for score in row.scores.values()]
    low, high = max(min(every), max(every) - RANGE), max(every)
    title = "grey: serial; blue: replay; orange: other methods; green: trials"
    limits = (math.floor(low) - 0.5, high + 0.15 * (high - low) + 0.5)
    return draw([(label(name), colour(name), rows[name]) for name in names], limits, title)


def colour(name: str) -> str:
    kind = "try" if name.startswith(TRY) else keys(RUNS[name][0])["method"]
    return {"try": "#2b8a3e", "serial": "#868e96", "replay": "#4c6ef5"}.get(kind, "#e8590c")


def label(name: str) -> str:
    if name.startswith(TRY):
        return name.removeprefix(TRY)
    found = keys(RUNS[name][0])
    stages = [f"K = {found['stages']}"] if "stages" in found else []
    batch = [f"batch {found['batch-size']}"] if found["batch-size"] != keys("")["batch-size"] else []
    schedule = [found["schedule"]] if found["schedule"] != "parallel" else []
    return ", ".join([found["model"].replace("resnet", "ResNet-"), found["method"], *stages, *batch, *schedule])


def serial(rows: dict[str, Row], row: Row) -> Row:
    """Serial training of the same network, with the same batch."""

    def same(other: Row) -> bool:
        mine, its = keys(row.flags), keys(other.flags)
        return its["method"] == "serial" and all(its[key] == mine[key] for key in ("model", "batch-size"))

    return next(other for other in rows.values() if same(other))


def base(rows: dict[str, Row], name: str) -> str | None:
    """The row that a trial adds flags to: the one with the most of them in common."""
    rest = {other: row.flags for other, row in rows.items() if not other.startswith(TRY)}
    fits = [other for other, flags in rest.items() if rows[name].flags.startswith(f"{flags} ")]
    return max(fits, key=lambda other: len(rows[other].flags), default=None)


def keys(flags: str) -> dict[str, str]:
    """Of a row; those of all rows are in it."""
    words = [word.removeprefix("--") for word in shlex.split(f"{COMMON} {flags}")]
    return dict(zip(words[::2], words[1::2], strict=True))


def order(name: str) -> tuple[int, ...]:
    found = keys(RUNS[name][0])
    depth, batch = int(found["model"].removeprefix("resnet")), int(found["batch-size"])
    hybrid = found["schedule"] != "parallel"
    return depth, -batch, hybrid, METHODS.index(found["method"]), int(found.get("stages", 0))


if __name__ == "__main__":
    main()
