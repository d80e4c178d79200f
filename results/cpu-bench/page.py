"""Tables, figures and the picture of this page, from the JSON files beside this one.

python results/cpu-bench/page.py      draw speed.png; `python results/pages.py` writes the tables into README.md
"""

import hashlib
import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
PROBLEMS = [f"{model}-b{batch}" for model in ("resnet20", "resnet56") for batch in (64, 128)]
SYSTEMS = {
    "serial": "serial, one core",
    "serial-all-threads": "serial, two threads",
    "layer-parallel": "layer-parallel (`al`)",
    "layer-parallel-ds": "layer-parallel (`al`), r = 2",
    "replay": "`replay`",
    "delayed": "`delayed`",
    "stages-alone": "stages alone",
    "pipeline-1f1b": "pipeline, 1F1B",
    "pipeline-gpipe": "pipeline, GPipe",
    "data-parallel": "data-parallel (DDP)",
}
TIMED = ("serial", "layer-parallel", "replay", "pipeline-1f1b", "data-parallel")
COLOURS = {"layer": "#4c6ef5", "pipeline": "#e8590c", "data-parallel": "#2b8a3e", "re": "#862e9c", "de": "#862e9c"}
Row = dict[str, Any]


@cache
def benches() -> dict[str, dict[str, Any]]:
    return {name: json.loads((HERE / f"{name}.json").read_text()) for name in PROBLEMS}


@cache
def rows(problem: str) -> dict[str, Row]:
    return {row["system"]: row for row in benches()[problem]["rows"]}


def tables() -> dict[str, str]:
    return {
        "speed": table(lambda row: f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"),
        "time": table(lambda row: f"{sample_us(row):,.0f} ({row['step_ms']:.0f})", TIMED),
        "exchange": exchange(),
        "command": f"```\n{benches()[PROBLEMS[0]]['command']}\n```",
        "made": made(),
        "two-commits": two_commits(),
    }


def figures() -> dict[str, float]:
    """`PROBLEM-SYSTEM` is a speed-up over serial training on one core; `pipeline` is the best of the schedules."""
    found: dict[str, float] = {}
    for problem in PROBLEMS:
        systems = {**rows(problem), "pipeline": best_pipeline(problem)}
        for system, row in systems.items():
            found[f"{problem}-{system}"] = row["speedup"]
            found[f"{problem}-{system}-low"], found[f"{problem}-{system}-high"] = (
                row["speedup_low"],
                row["speedup_high"],
            )
            found[f"{problem}-{system}-ms"], found[f"{problem}-{system}-us"] = row["step_ms"], sample_us(row)
        ours = rows(problem)["layer-parallel"]
        for other in ("stages-alone", "pipeline", "data-parallel"):
            found[f"{problem}-over-{other}"] = over(systems[other], ours)
        found[f"{problem}-forecast"] = forecast(problem)
        found[f"{problem}-forecast-error"] = 100 * (forecast(problem) / ours["speedup"] - 1)
    for system in (*SYSTEMS, "pipeline"):
        every = [found[f"{problem}-{system}"] for problem in PROBLEMS]
        found[f"{system}-least"], found[f"{system}-most"] = min(every), max(every)
    for row, ratios in later().items():
        found[f"two-commits-{row.replace(', ', '-').replace(' ', '-')}"] = statistics.median(ratios)
    found["forecast-error-most"] = max(abs(found[f"{problem}-forecast-error"]) for problem in PROBLEMS)
    return found


def table(cell: Any, systems: Sequence[str] = tuple(SYSTEMS)) -> str:
    lines = ["| | " + " | ".join(map(title, PROBLEMS)) + " |", "|---" + "|--:" * len(PROBLEMS) + "|"]
    for system in systems:
        lines.append(f"| {SYSTEMS[system]} | " + " | ".join(cell(rows(problem)[system]) for problem in PROBLEMS) + " |")
    return "\n".join(lines)


def exchange() -> str:
    """Layer-parallel training against its bound, the best pipeline and DDP, and what is forecast of it."""
    columns = ("", "stages alone", "best pipeline", "data-parallel", "stages wait", "speed-up, forecast")
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    for problem in PROBLEMS:
        ours = rows(problem)["layer-parallel"]
        others = (rows(problem)["stages-alone"], best_pipeline(problem), rows(problem)["data-parallel"])
        ratios = [f"{over(other, ours):.2f}" for other in others]
        waits = ", ".join(f"{100 * share:.1f} %" for share in ours["wait_share"])
        lines.append("| " + " | ".join([title(problem), *ratios, waits, f"{forecast(problem):.2f}"]) + " |")
    return "\n".join(lines)


@cache
def in_turn() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "two-commits.json").read_text())
    return found


def later() -> dict[str, list[float]]:
    """Seconds of an epoch at the newer commit over those at the older one, round by round."""
    rows = in_turn()["rows"].items()
    return {name: [b / a for a, b in zip(row["old"], row["new"], strict=True)] for name, row in rows}


def two_commits() -> str:
    old, new = in_turn()["commits"]
    lines = [f"| | {old}, s | {new}, s | newer over older | least to most |", "|---|--:|--:|--:|--:|"]
    for name, row in in_turn()["rows"].items():
        ratios = later()[name]
        times = " | ".join(f"{statistics.median(row[which]):.2f}" for which in ("old", "new"))
        lines.append(f"| {name} | {times} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |")
    return "\n".join(lines)


def made() -> str:
    about = benches()[PROBLEMS[0]]["environment"]
    counts = sorted({(bench["rounds"], bench["steps"]) for bench in benches().values()})
    rounds = " or ".join(f"{number} rounds of {steps} steps" for number, steps in counts)
    return (
        f"{about['processor']}, {about['cores']} cores ({about['platform']}); torch {about['torch']}, "
        f"Python {about['python']}. {rounds[0].upper()}{rounds[1:]}."
    )


def sample_us(row: Row) -> float:
    """Microseconds per sample trained: every system here trains on the whole batch in a step."""
    return float(1000 * row["step_ms"] / row.get("samples_per_step", row["batch_size"]))


def best_pipeline(problem: str) -> Row:
    found = [row for system, row in rows(problem).items() if system.startswith("pipeline")]
    return min(found, key=lambda row: row["step_ms"])


def over(other: Row, ours: Row) -> float:
    """How many times as fast layer-parallel training is, round by round."""
    return statistics.median(a / b for a, b in zip(other["round_ms"], ours["round_ms"], strict=True))


def forecast(problem: str) -> float:
    """The median of three forecasts of `parlay plan --engine distributed`."""
    told = json.loads((HERE / f"{problem}-plan.json").read_text())
    return statistics.median(one["speedup_parallel_epoch"] for one in told)


def title(problem: str) -> str:
    model, _, batch = problem.partition("-b")
    return f"ResNet-{model.removeprefix('resnet')}, batch {batch}"


def digest() -> str:
    """Of what the picture shows; it stands in the file, so that one of older records is found."""
    return hashlib.sha256(tables()["speed"].encode()).hexdigest()


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, batch in zip(panels, ("64", "128"), strict=True):
        for n, system in enumerate(SYSTEMS):
            colour = next((code for start, code in COLOURS.items() if system.startswith(start)), "#495057")
            for model, marker, shift in (("resnet20", "o", -0.14), ("resnet56", "s", 0.14)):
                row = rows(f"{model}-b{batch}")[system]
                axes.plot([row["speedup_low"], row["speedup_high"]], [n + shift] * 2, color=colour, linewidth=1.5)
                label = f"ResNet-{model.removeprefix('resnet')}" if n == 0 and batch == "64" else None
                axes.plot(row["speedup"], n + shift, marker, color=colour, markersize=5, label=label)
        axes.set_yticks(range(len(SYSTEMS)), [name.replace("`", "") for name in SYSTEMS.values()])
        axes.set_ylim(len(SYSTEMS) - 0.5, -0.5)
        axes.set(title=f"batch {batch}", xlim=(0.9, 2.1), xlabel="times serial training on one core")
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.grid(axis="x", linewidth=0.4)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


if __name__ == "__main__":
    draw().savefig(HERE / "speed.png", dpi=110, metadata={"Description": digest()})
