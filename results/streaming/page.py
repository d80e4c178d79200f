"""Tables and figures of this page; run as a program it draws `accuracy.png`.

python results/streaming/page.py
"""

import json
import math
import runpy
import shlex
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
from scores import Row, draw, markdown, number, read, rows_of, summary

from parlay import methods
from parlay.report.tables import memory
from parlay.report.times import staleness

HERE = Path(__file__).parent

_TABLE = runpy.run_path(str(HERE / "run.py"))
COMMON, RUNS = _TABLE["COMMON"], _TABLE["RUNS"]
RANGE = 15.0
"""Points that the picture shows below the best run."""
RULES = {
    # of the pull: name in the records, and its label
    "constant": "constant",
    "divided": "divided",
    "squared": "squared",
    "limit": "limit",
    "now": "now",
}
CASES = {
    # column: run names of the earlier rules; of today's
    "K = 2": ("k2", "replay-k2"),
    "K = 3": ("k3", "replay-k3"),
    "K = 6": ("k6", "replay-k6"),
    "K = 6, batch 64": ("k6-b64", None),
    "K = 9, batch 64": ("k9-b64", "replay-k9-b64"),
    "ResNet-110, K = 3": ("resnet110-k3", "resnet110-replay-k3"),
}


@cache
def found() -> dict[str, Row]:
    return read(RUNS, records.runs("streaming"))


def label(name: str) -> str:
    asked = keys(RUNS[name][0])
    stages = [f"K = {asked['stages']}"] if "stages" in asked else []
    batch = [f"batch {asked['batch-size']}"] if asked["batch-size"] != keys("")["batch-size"] else []
    shrunk = ["shrunk adjoints"] if "shrink" in asked else []
    return ", ".join([asked["model"].replace("resnet", "ResNet-"), asked["method"], *stages, *batch, *shrunk])


def public(name: str) -> str:
    """Of figures: with the network."""
    return name if name.startswith("resnet110") else f"resnet20-{name}"


def serial(row: Row) -> Row:
    """Serial training of the same network, with the same batch."""

    def same(other: Row) -> bool:
        mine, its = keys(row.flags), keys(other.flags)
        return its["method"] == "serial" and all(its[key] == mine[key] for key in ("model", "batch-size"))

    return next(other for other in found().values() if same(other))


def keys(flags: str) -> dict[str, str]:
    """Of a row; those of all rows are in it."""
    words = [word.removeprefix("--") for word in shlex.split(f"{COMMON} {flags}")]
    return dict(zip(words[::2], words[1::2], strict=True))


def order(name: str) -> tuple[int, ...]:
    asked = keys(RUNS[name][0])
    depth, batch = int(asked["model"].removeprefix("resnet")), int(asked["batch-size"])
    place = [*methods.names(), "dni", "auxnet"].index(asked["method"])
    return depth, -batch, place, int(asked.get("stages", 0)), "shrink" in asked


def late(row: Row) -> int | None:
    return max((steps for run in row.there if (steps := staleness(run)) is not None), default=None)


def tables() -> dict[str, str]:
    return {"main": main_table(), "rules": rules_table(), "small": small_table()}


def main_table() -> str:
    lines = []
    for name in sorted(RUNS, key=order):
        row = found()[name]
        gap = None if row is serial(row) else row.minus(serial(row))
        kept = memory(row.memory)
        lines.append((label(name), row.cell, number(gap, "+.2f"), str(len(row.runs)), number(late(row), "d"), kept))
    return markdown(("", "test %", "to serial", "seeds", "staleness, steps", "extra memory"), lines)


def under_rule(rule: str, case: str) -> list[float]:
    """Accuracies of the seeds under a rule; none where it was not run. A run that diverged counts as nan."""
    name, today = CASES[case]
    if rule == "now":
        return list(found()[today].scores.values()) if today else []
    beta = "-beta-8" if rule == "divided" else ""
    before = records.runs("streaming") / "before"
    ends = [summary(at) for at in sorted(before.glob(f"{rule}-{name}{beta}-s?"))]
    return [end["test_accuracy"] if end["status"] == "finished" else math.nan for end in ends]


def rules_table() -> str:
    def cell(rule: str, case: str) -> str:
        values = under_rule(rule, case)
        mean = statistics.fmean(values) if values else None
        return "" if mean is None else "diverged" if math.isnan(mean) else f"{mean:.2f} ({len(values)})"

    return markdown(("rule", *CASES), [(text, *(cell(rule, case) for case in CASES)) for rule, text in RULES.items()])


def small() -> list[dict[str, Any]]:
    """The runs of small.py: by the number of stages, the weight, and how long."""
    kept = json.loads((records.runs("streaming") / "small.json").read_text())["runs"]
    return sorted(kept.values(), key=lambda run: (run["stages"], run["epochs"], run["beta"], -run["bound"]))


def small_table() -> str:
    lines = []
    for run in small():
        cut, ended = run["stages"] > 1, len(run["losses"]) == run["epochs"]
        most = max((max(own) for own in run["pulls"]), default=0.0) if ended else 0.0
        lines.append(
            (
                f"K = {run['stages']}" if cut else "serial",
                f"{run['beta']:g}" if cut else "",
                f"{run['bound']:g}" if cut else "",
                f"{run['epochs']}, {run['rate']}",
                f"{run['losses'][-1][-1]:.3f}" if ended else "diverged",
                f"{run['test_accuracy']:.1f}" if ended else "",
                f"{most:.2f}" if cut and ended else "",
            )
        )
    head = ("", "weight", "bound, of p", "epochs, rate", "last stage's loss", "test %", "largest pull, of p")
    return markdown(head, lines)


def figures() -> dict[str, float]:
    told: dict[str, float] = {}
    for name, row in found().items():
        told |= row.figures(public(name))
        steps, gap = late(row), row.minus(serial(row))
        told |= {} if steps is None else {f"{public(name)}-staleness": steps}
        told |= {f"{public(name)}-memory-mib": row.memory / 2**20} if row.memory else {}
        told |= {} if gap is None or row is serial(row) else {f"{public(name)}-to-serial": gap}
    for rule in RULES:
        for case, (name, _) in CASES.items():
            values = under_rule(rule, case)
            if values and not math.isnan(statistics.fmean(values)):
                told[f"rule-{rule}-{name}"] = statistics.fmean(values)
                told[f"rule-{rule}-{name}-least"] = min(values)
    before = records.runs("streaming") / "before"
    told |= {f"before-{at.name}": rows_of(at)[-1]["test_accuracy"] for at in sorted(before.iterdir())}
    pulled = rows_of(before / "bound-k2-cpu-s0")
    told["before-bound-k2-cpu-best"] = max(row["test_accuracy"] for row in pulled)
    return told


def colour(name: str) -> str:
    return {"serial": "#868e96", "replay": "#4c6ef5"}.get(keys(RUNS[name][0])["method"], "#e8590c")


def main() -> None:
    every = [score for row in found().values() for score in row.scores.values()]
    low, high = max(min(every), max(every) - RANGE), max(every)
    limits = (math.floor(low) - 0.5, high + 0.15 * (high - low) + 0.5)
    drawn = [(label(name), colour(name), found()[name]) for name in sorted(RUNS, key=order)]
    title = "grey: serial; blue: replay; orange: other methods; arrows: below the axis"
    draw(drawn, limits, title).savefig(HERE / "accuracy.png", dpi=100)


if __name__ == "__main__":
    main()
