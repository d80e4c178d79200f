"""Tables, figures and the picture of this page, from the records in runs.tar.xz.

python results/laptop/page.py      draw accuracy.png; `python results/pages.py` writes the tables into README.md
"""

import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]

import records  # noqa: E402
from home_compare import ERRORS, IMAGES  # noqa: E402
from home_records import Cell, Table, read  # noqa: E402
from home_rows import KINDS, PROBLEMS, ROWS  # noqa: E402

from parlay.config.schedule import PARALLEL, Schedule  # noqa: E402
from parlay.report.tables import memory  # noqa: E402

OPEN = "open"
SYSTEMS = {
    "serial": "serial, one core",
    "serial-2-threads": "serial, two threads",
    "pipeline": "pipeline",
    "data-parallel": "data parallel",
}
TIMED = [*SYSTEMS, *(f"{name}-k2" for name in KINDS)]
COLOURS = {"serial": "#495057", "penalty": "#e8590c", "al": "#4c6ef5"}
STREAMED = "#2b8a3e"


def found() -> Table:
    return read(records.runs("laptop"))


def tables() -> dict[str, str]:
    told = found()
    return {
        "digits": accuracies(told, [name for name in PROBLEMS if name.startswith("digits")]),
        "mnist": accuracies(told, [name for name in PROBLEMS if name.startswith("mnist")]),
        "gaps": gaps(told),
        "time": timings(told),
        "answer": answer(told),
        "made": made(told),
        "cost": cost(told),
    }


def accuracies(told: Table, problems: list[str]) -> str:
    head = ["", "samples trained"]
    for name in problems:
        head += [f"{network(name)}, test %", "to serial, points", "kept"]
    lines = []
    for row in ROWS:
        cells = [ROWS[row].title, f"{100 * trained(row, problems[0]):.0f} %"]
        for problem in problems:
            cell = told.cells[problem, row]
            cells += [score(cell), gap(told, problem, row), memory(cell.kept)]
        lines.append(cells)
    return markdown(head, lines)


def gaps(told: Table) -> str:
    """What each method costs, in short, for a page that explains the choice."""
    shown = {"digits-resnet20": "digits, ResNet-20", "mnist-resnet8": "MNIST, ResNet-8"}
    head = ["", *(f"{title}, K = {k}" for title in shown.values() for k in (2, 3))]
    lines = [
        [f"{capital(kind.title)}", *(gap(told, problem, f"{name}-k{k}") for problem in shown for k in (2, 3))]
        for name, kind in KINDS.items()
    ]
    return markdown(head, lines)


def trained(row: str, problem: str) -> float:
    """The share of the samples of all epochs that a stage trains on: half in a parallel epoch of `penalty`."""
    phases = Schedule.parse("serial" if row == "serial" else ROWS[row].schedule).phases(PROBLEMS[problem].epochs)
    share = 0.5 if ROWS[row].method == "penalty" else 1.0
    return sum(share if phase == PARALLEL else 1.0 for phase in phases) / len(phases)


def gap(told: Table, problem: str, row: str) -> str:
    """To serial training; bold where it is not level with that."""
    found = told.cells[problem, row].minus(told.cells[problem, "serial"])
    if row == "serial" or found is None:
        return "–"
    text = plain(f"{found[0]:+.2f} ± {found[1]:.2f}")
    return f"**{text}**" if differs(told, problem, row) else text


def score(cell: Cell) -> str:
    if cell.mean is None:
        return f"{len(cell.lost)} of {len(cell.lost) + len(cell.scores)} diverged"
    return f"{cell.mean:.2f}" if cell.error is None else f"{cell.mean:.2f} ± {cell.error:.2f}"


def timings(told: Table) -> str:
    head = [""]
    for problem in PROBLEMS:
        head += [f"{short(problem)}, µs a sample", "speed-up"]
    lines = []
    for name in TIMED:
        cells = [SYSTEMS.get(name) or ROWS[name].title]
        for problem in PROBLEMS:
            row = told.timed(problem, name)
            if row is None:
                cells += [OPEN, OPEN]
            else:
                speedup = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
                cells += [f"{microseconds(row):.0f}", speedup]
        lines.append(cells)
    return markdown(head, lines)


def answer(told: Table) -> str:
    """In words: how many rows lose accuracy beyond doubt, and what is fastest."""
    lines = []
    for problem in told.seeds:
        gaps = [gap for row in ROWS if (gap := differs(told, problem, row))]
        every = len(ROWS) - 1
        text = (
            f"- {capital(PROBLEMS[problem].title)}: {every - len(gaps)} of {every} rows are level with serial training"
        )
        for word, found in (("below", [-g for g in gaps if g < 0]), ("above", [g for g in gaps if g > 0])):
            most = f"{min(found):.1f} to {max(found):.1f}" if len(found) > 1 else f"{max(found, default=0):.1f}"
            text += f", {len(found)} {word} it by {most} points" if found else ""
        lines.append(f"{text}.")
    for problem in PROBLEMS:
        rows = {name: row for name in TIMED if (row := told.timed(problem, name))}
        if not rows:
            lines.append(f"- Time, {short(problem)}: {OPEN}.")
            continue
        by_speed = sorted(rows, key=lambda name: -rows[name]["speedup"])
        named = [f"{SYSTEMS.get(name) or ROWS[name].title} {rows[name]['speedup']:.2f}" for name in by_speed]
        lines.append(f"- Time, {short(problem)}: fastest are {'; '.join(named[:3])}. Slowest is {named[-1]}.")
    return "\n".join(lines)


def spread(told: Table, problem: str) -> dict[int, list[float]]:
    """Differences to serial training, by the number of stages."""
    found: dict[int, list[float]] = {}
    for name, row in ROWS.items():
        gap = told.cells[problem, name].minus(told.cells[problem, "serial"])
        if row.stages > 1 and gap is not None:
            found.setdefault(row.stages, []).append(gap[0])
    return found


def differs(told: Table, problem: str, row: str) -> float | None:
    """The difference to serial training, where it is larger than what seeds and test images can show."""
    ours, serial = told.cells[problem, row], told.cells[problem, "serial"]
    found = ours.minus(serial) if row != "serial" else None
    if found is None or abs(found[0]) <= max(ERRORS * found[1], visible(problem, ours, serial)):
        return None
    return found[0]


def visible(problem: str, *cells: Cell) -> float:
    """Two standard errors, in points, of the difference of two accuracies on so many test images.

    Two networks that fail on e and f of n images, none of them the same, differ by (e - f) / n with this error.
    """
    images = IMAGES[PROBLEMS[problem].dataset]
    failed = sum((100 - (cell.mean or 0)) / 100 * images for cell in cells)
    return 200 * math.sqrt(failed) / images


def made(told: Table) -> str:
    lines = [f"- {text}" for text in told.environments()]
    seeds = "; ".join(f"{short(name)}: {', '.join(map(str, seeds))}" for name, seeds in told.seeds.items())
    lines.append(f"- Seeds: {seeds}")
    for problem, timed in told.times.items():
        about = timed["environment"]
        lines.append(
            f"- Times, {short(problem)}: {timed['rounds']} rounds, {about['processor']}, torch {about['torch']}, "
            f"commit {about['commit']}, load {about['load_before']:.2f} before"
        )
    return "\n".join(lines)


def cost(told: Table) -> str:
    """Processor seconds, which other work on the machine does not change; on two cores half as many pass."""
    lines, total = [], [0.0, 0.0, 0.0]
    for problem, costs in told.costs.items():
        cpu, timed = sum(each["cpu_seconds"] for each in costs), told.times.get(problem)
        minutes = timed["wall_seconds"] / 60 if timed else math.nan
        lines.append(spent(PROBLEMS[problem].title, len(costs), cpu, minutes))
        total = [a + b for a, b in zip(total, (len(costs), cpu, minutes), strict=True)]
    lines.append(spent("all", int(total[0]), *total[1:]))
    head = ["", "runs", "processor seconds a run", "minutes on two cores", "minutes of timing"]
    return markdown(head, lines)


def spent(title: str, runs: int, cpu: float, minutes: float) -> list[str]:
    timing = OPEN if math.isnan(minutes) else f"{minutes:.1f}"
    return [title, str(runs), f"{cpu / runs:.1f}", f"{cpu / 120:.1f}", timing]


def figures() -> dict[str, float]:
    told, values = found(), dict[str, float]()
    for (problem, row), cell in told.cells.items():
        name = f"{problem}-{row}"
        values[f"{name}-bytes"], values[f"{name}-diverged"] = cell.kept, len(cell.lost)
        if cell.mean is not None and cell.error is not None:
            values[name], values[f"{name}-se"] = cell.mean, cell.error
        gap = cell.minus(told.cells[problem, "serial"])
        if gap is not None and row != "serial":
            values[f"{name}-to-serial"], values[f"{name}-to-serial-se"] = gap
        values[f"{name}-trained"] = trained(row, problem)
    for problem in told.seeds:
        rows = [row for row in ROWS if row != "serial"]
        for k, gaps in spread(told, problem).items():
            values[f"{problem}-k{k}-least"], values[f"{problem}-k{k}-most"] = min(gaps), max(gaps)
        values[f"{problem}-visible"] = visible(problem, *2 * [told.cells[problem, "serial"]])
        values[f"{problem}-level"] = sum(differs(told, problem, row) is None for row in rows)
        values[f"{problem}-below"] = sum((differs(told, problem, row) or 0) < 0 for row in rows)
    for problem in told.times:
        for name in TIMED:
            row = told.timed(problem, name)
            if row is not None:
                values[f"time-{problem}-{name}-us"] = microseconds(row)
                values[f"time-{problem}-{name}-speedup"] = row["speedup"]
                values[f"time-{problem}-{name}-speedup-low"] = row["speedup_low"]
                values[f"time-{problem}-{name}-speedup-high"] = row["speedup_high"]
    for scope in ("digits", "all"):
        kinds = [name for name in told.costs if scope in ("all", PROBLEMS[name].dataset)]
        cpu = sum(each["cpu_seconds"] for name in kinds for each in told.costs[name])
        values[f"cost-{scope}-minutes"] = cpu / 120  # on two cores, without the timing
        values[f"cost-{scope}-runs"] = sum(len(told.costs[name]) for name in kinds)
        if set(kinds) <= told.times.keys():
            values[f"cost-{scope}-timing-minutes"] = sum(told.times[name]["wall_seconds"] for name in kinds) / 60
    values["seeds"] = min(map(len, told.seeds.values()))
    return values


def microseconds(row: dict[str, Any]) -> float:
    return float(1000 * row["step_ms"] / row["batch_size"])


def network(problem: str) -> str:
    return PROBLEMS[problem].title.rpartition(", ")[2]


def short(problem: str) -> str:
    return f"{problem.partition('-')[0].replace('mnist', 'MNIST')} {network(problem)}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def plain(text: str) -> str:
    return text.replace("-0.00", "+0.00").replace("-", "−")


def markdown(head: list[str], lines: list[list[str]]) -> str:
    ruler = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ruler, *lines])


def picture() -> Figure:
    """Every seed a dot, every mean a mark with its standard error. Accuracies do not start at zero: no bars."""
    told = found()
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    every = figure.subplots(1, len(PROBLEMS), sharey=True)
    places = {name: -n - 0.7 * (ROWS[name].stages - 1) for n, name in enumerate(ROWS)}
    for axes, problem in zip(every, PROBLEMS, strict=True):
        for name, y in places.items():
            cell, colour = told.cells[problem, name], COLOURS.get(ROWS[name].method, STREAMED)
            axes.plot(list(cell.scores.values()), [y] * len(cell.scores), "o", color=colour, markersize=5, alpha=0.45)
            if cell.mean is not None:
                bar = {"elinewidth": 1, "capsize": 2, "markersize": 11}
                axes.errorbar([cell.mean], [y], xerr=[cell.error or 0], fmt="|", color="black", **bar)
        serial = told.cells[problem, "serial"]
        if serial.mean is not None:
            shown = visible(problem, serial, serial)
            axes.axvline(serial.mean, color=COLOURS["serial"], linewidth=0.8, linestyle="--")
            axes.axvspan(serial.mean - shown, serial.mean + shown, color="#868e96", alpha=0.12, linewidth=0)
        scores = [value for row in ROWS for value in told.cells[problem, row].scores.values()]
        axes.set_xlim(math.floor(min(scores)) - 0.3, min(100.0, math.ceil(max(scores)) + 0.3))
        axes.set_title(PROBLEMS[problem].title, fontsize=9)
        axes.set_xlabel("test accuracy, %", fontsize=9)
        axes.grid(axis="x", linewidth=0.4)
        axes.set_axisbelow(True)
        axes.tick_params(axis="both", labelsize=8, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    every[0].set_yticks(list(places.values()), [ROWS[name].title for name in places])
    marks = "Dots: seeds. Marks: means with their standard errors. Dashed: serial training."
    colours = (
        "Orange: penalty. Blue: AL. Green: streaming. Grey: what the test images cannot tell from serial training."
    )
    figure.suptitle(f"{marks}\n{colours}", fontsize=9)
    return figure


if __name__ == "__main__":
    picture().savefig(HERE / "accuracy.png", dpi=130)
