"""Numbers and findings as people read them: the cells of the tables, the sentence at the head of the page.

The console and the page show the same cells; each has its own way of laying them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parlay.report import speed
from parlay.report.groups import Group, Task
from parlay.report.speed import rows

DASH = "–"
MINUS = "−"

SEVERAL = 8
"""More configurations than this are counted in a sentence, not named."""

TIMED = ("step, ms", "speed-up over serial", "staleness, steps")
"""The columns of runs whose times can be compared."""

NAMES = {
    "Penalty": "quadratic penalty",
    "AL": "augmented Lagrangian",
    "SPH": "serial-parallel hybrid, a schedule with parallel and serial epochs",
    "DS": "states are stored downsampled",
    "Replay": "delayed adjoints by a second forward pass",
    "DDG": "decoupled delayed gradients, method delayed",
    "DGL": "decoupled greedy learning, method local",
    "DNI": "decoupled neural interfaces",
    "AuxNet": "auxiliary networks predict the gradients",
    "DA": "data augmentation",
    "K": "number of stages",
}
"""What stands in the names of configurations."""

Show = Callable[[float | None], str]


@dataclass(frozen=True)
class Cell:
    text: str
    key: float | str | None = None
    """What the column is sorted by; None comes last."""
    note: str = ""
    look: str = ""
    """status-bad: it tells of something that went wrong; level: a gap that may be chance."""


@dataclass(frozen=True)
class Column:
    title: str
    cells: tuple[Cell, ...]
    note: str = ""
    """What the title means, where it is short for something."""
    minor: bool = False
    """Can a narrow screen do without it?"""

    @property
    def numeric(self) -> bool:
        return all(not isinstance(cell.key, str) for cell in self.cells)


def columns(task: Task) -> list[Column]:
    """The comparison table of a task, column by column, a cell for each of its groups."""
    table = rows(task)
    measure = "test_accuracy" if task.by_accuracy else "test_loss"
    show = points if task.by_accuracy else loss
    found = [
        Column("configuration", tuple(Cell(row["label"], row["label"].lower()) for row in table)),
        Column("K", tuple(Cell(str(row["stages"]), row["stages"]) for row in table), "stages", minor=True),
        Column(
            "downsampled by",
            tuple(Cell(str(row["downsample"]), row["downsample"]) for row in table),
            "r: states are kept at 1/r of their height and width",
            minor=True,
        ),
        Column("schedule", tuple(Cell(row["schedule"] or DASH, row["schedule"]) for row in table), minor=True),
        Column("epochs", tuple(Cell(_epochs(row["epochs_done"], row["epochs"]), row["epochs_done"]) for row in table)),
        Column(
            "runs", tuple(Cell(str(row["runs"]), row["runs"]) for row in table), "seeds that the numbers are made of"
        ),
        Column(
            "test accuracy, %" if task.by_accuracy else "test loss",
            tuple(Cell(spread(row[measure], row[f"{measure}_spread"], show), row[measure]) for row in table),
            "after the last epoch: mean ± sample standard deviation over the runs",
        ),
        Column(
            "gap to serial",
            tuple(_gap(row, show) for row in table),
            "difference of the means, to the serial configuration most like it",
        ),
        Column(
            "memory for states",
            tuple(Cell(memory(row["auxiliary_bytes"]), row["auxiliary_bytes"]) for row in table),
            "states and multipliers, or queues",
        ),
        *(_step_times(table) if task.timed else _epoch_times(table)),
        Column("status", tuple(_status(row["status"]) for row in table)),
    ]
    empty = {"gap to serial", "serial epoch, s", "parallel epoch, s", *TIMED}
    found = [c for c in found if c.title not in empty or any(cell.key is not None for cell in c.cells)]
    if all(row["downsample"] == 1 for row in table):
        found = [c for c in found if c.title != "downsampled by"]
    same = task.timed and len({row["epochs_done"] for row in table}) == 1  # as they are in a comparison; room is short
    return [c for c in found if c.title != "epochs"] if same else found


def _step_times(table: Sequence[dict[str, Any]]) -> list[Column]:
    step, gain, age = TIMED
    compared = any(row["reference"] and speed.shown(row) is not None for row in table)
    return [
        Column(
            step,
            tuple(Cell(_step(row), row["step_ms"]) for row in table),
            "measured: of a training step, on average over the schedule; median epochs, without evaluation",
        ),
        Column(
            gain,
            tuple(_gain(row) if compared else Cell(DASH) for row in table),
            "serial training's time per sample trained over this one, both measured in these runs",
        ),
        Column(
            age,
            tuple(
                Cell(DASH if row["staleness"] is None else f"{row['staleness']:.0f}", row["staleness"]) for row in table
            ),
            "steps from a batch's forward pass to the use of what came back for it, in the stage that waits longest",
        ),
    ]


def _time(mean: float | None, deviation: float | None) -> str:
    """Both to the same digit."""
    digits = 2 if mean is None or mean < 10 else 1 if mean < 100 else 0
    return spread(mean, deviation, lambda value: DASH if value is None else f"{value:.{digits}f}")


def _step(row: dict[str, Any]) -> str:
    return _time(row["step_ms"], row["step_ms_spread"]) + " ?" * ((row["scatter"] or 1.0) > speed.STEADY)


def _gain(row: dict[str, Any]) -> Cell:
    ratio = speed.shown(row)
    doubt = " ?" * bool(ratio is not None and row["unsteady"] and row["reference"])
    return Cell(points(ratio) + doubt, ratio, _against(row["reference"]))


def _gap(row: dict[str, Any], show: Show) -> Cell:
    note = _against(row["reference"])
    if row["gap_counts_from"] is not None:
        note += f"; a difference from {show(row['gap_counts_from'])} on"
    return Cell(signed(row["gap"], show), row["gap"], note, "level" if row["gap_differs"] is False else "")


def _status(text: str) -> Cell:
    return Cell(text, text, look="" if text == "finished" else "status-bad")


def _epoch_times(table: Sequence[dict[str, Any]]) -> list[Column]:
    return [
        Column("serial epoch, s", tuple(Cell(seconds(row["serial_epoch"]), row["serial_epoch"]) for row in table)),
        Column(
            "parallel epoch, s", tuple(Cell(seconds(row["parallel_epoch"]), row["parallel_epoch"]) for row in table)
        ),
    ]


def headline(task: Task) -> str:
    """What the runs of a task found, in a sentence."""
    where = f"on {task.dataset} with {task.model}"
    ranked = [group for group in task.ranked() if group.finished and task.mean(group) is not None]
    if not ranked:
        return f"No run {where} has finished yet."
    best = next((group for group in ranked if not group.serial), ranked[0])
    reaches = "reaches" if task.by_accuracy else "reaches a test loss of"
    text = f"{best.label} {reaches} {measure(task, best)} {where}"
    reference, gap = task.reference(best), task.gap(best)
    if reference is None or gap is None:
        return f"{text}, in {_count(best)}."
    theirs, apart = measure(task, reference), f"{_count(best)} against {_count(reference)}"
    if len(best.counted) == len(reference.counted):
        apart = f"{_count(best)} each"
    differs = task.differs(best)
    if differs is None:
        return f"{text}, serial training {theirs}: {apart} cannot tell them apart."
    if not differs:
        return f"{best.label} is level with serial training {where}: {measure(task, best)} and {theirs}, {apart}."
    amount = f"{points(abs(gap))} points" if task.by_accuracy else loss(abs(gap))
    return f"{text}, {amount} {'below' if gap < 0 else 'above'} serial training, {apart}."


def names(task: Task) -> str:
    """What the names of the configurations stand for, those that are there."""
    there = {part for group in task.groups for part in re.findall(r"[A-Za-z]+", group.label.partition(",")[0])}
    return ". ".join(f"{name}: {text}" for name, text in NAMES.items() if name in there) + "."


def notes(task: Task) -> list[str]:
    """What a reader of the comparison table must know, a sentence or two on each matter."""
    table = rows(task)
    measure = "test_accuracy" if task.by_accuracy else "test_loss"
    found = ["Measured on the test set after the last epoch, not at the best one."]
    if any(row[f"{measure}_spread"] is not None for row in table):
        found.append("± is the sample standard deviation over the runs.")
    found.append(references(task))
    found.append(rule(task) + " Smaller gaps are grey." * any(row["gap_differs"] is False for row in table))
    if any(row["downsample"] > 1 for row in table):
        found.append("Downsampled by r: states are kept at 1/r of their height and width.")
    found.append("Memory for states: what a method keeps beside the weights, states and multipliers or queues.")
    found.append(speed.note(task))
    if any(not run.finished for group in task.groups for run in group.runs):
        found.append("Runs that did not finish are left out of the means.")
    if any(not group.finished for group in task.groups):
        found.append("A configuration without a finished run shows where its runs stopped.")
    return [text for text in found if text]


def rule(task: Task) -> str:
    """By which a gap is a difference, in a line; see `noise`."""
    least = [row["gap_counts_from"] for row in rows(task) if row["gap"] is not None]
    known = sorted(value for value in least if value is not None)
    if not known:
        return "One run each cannot tell whether a gap is more than chance." if least else ""
    show = points if task.by_accuracy else loss
    amount = " to ".join(dict.fromkeys((show(known[0]), show(known[-1])))) + " points" * task.by_accuracy
    samples = task.groups[0].recipe.test_samples if task.by_accuracy else None
    several = any(len(group.counted) > 1 for group in task.groups)
    of = ([f"of {samples:,} test samples"] if samples else []) + ["of the spread over the runs"] * several
    errors = f"two standard errors ({' and '.join(of)})"
    return f"A gap counts as a difference above {errors}: here {amount}."


def references(task: Task) -> str:
    """Which serial configuration each gap is measured against, where that is not plain."""
    used: dict[str, list[str]] = {}
    for group in task.groups:
        reference = task.reference(group)
        if reference is not None and task.gap(group) is not None:
            used.setdefault(reference.label, []).append(group.label)
    if len(used) < 2:
        return "".join(f"Gaps are measured against {reference}." for reference in used)
    if len(task.groups) > SEVERAL:
        parts = [f"{len(labels)} against {reference}" for reference, labels in used.items()]
        return f"Gaps are measured against the serial configuration most like each: {', '.join(parts)}; see the CSV."
    return "Gaps: " + "; ".join(f"{', '.join(labels)} against {reference}" for reference, labels in used.items()) + "."


def facts(task: Task) -> list[tuple[str, str, str]]:
    """The numbers at the head of the page: value, what it is, whose it is. One run needs none: its row has them."""
    runs = [run for group in task.groups for run in group.runs]
    if len(runs) == 1:
        return []
    found = []
    ranked = [group for group in task.ranked() if group.finished and task.mean(group) is not None]
    if ranked:
        best = "" if len(task.groups) == 1 else "highest " if task.by_accuracy else "lowest "
        name = best + ("test accuracy" if task.by_accuracy else "test loss")
        found.append((measure(task, ranked[0]), name, ranked[0].label))
        serial = [group for group in ranked if group.serial]
        if serial and not ranked[0].serial:
            found.append((measure(task, serial[0]), "serial training", serial[0].label))
        parallel = [group for group in ranked if not group.serial]
        if ranked[0].serial and parallel:
            found.append((measure(task, parallel[0]), f"{best}in parallel", parallel[0].label))
        if parallel:
            found += _price(task, parallel[0])
    count = len(task.groups)
    finished = sum(run.finished for run in runs)
    some = "" if finished == len(runs) else f", {finished} finished"
    found.append((str(len(runs)), "runs", f"{count} configuration{'s' * (count > 1)}{some}"))
    epochs = sorted({group.epochs for group in task.groups})
    found.append((_range(epochs), "epochs", f"{task.dataset} · {task.model}"))
    return found


def _count(group: Group) -> str:
    return "one run" if len(group.counted) == 1 else f"{len(group.counted)} runs"


def _price(task: Task, group: Group) -> list[tuple[str, str, str]]:
    """What the best parallel configuration costs, and how fast it was where that can be told."""
    found = []
    row = next(row for row in rows(task) if row["label"] == group.label)
    if task.timed and (ratio := speed.shown(row)) is not None:
        doubt = ", uncertain" if row["unsteady"] else ""
        found.append((f"{points(ratio)} ×", f"speed per sample, measured{doubt}", f"{row['reference']} = 1"))
    if row["auxiliary_bytes"] is not None:
        found.append((memory(row["auxiliary_bytes"]), "memory for states", group.label))
    return found


def measure(task: Task, group: Group) -> str:
    mean = task.mean(group)
    return f"{points(mean)} %" if task.by_accuracy else loss(mean)


def points(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def loss(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def spread(mean: float | None, deviation: float | None, show: Show) -> str:
    text = show(mean)
    return text if deviation is None else f"{text} ± {show(deviation)}"


def signed(value: float | None, show: Show) -> str:
    if value is None:
        return DASH
    text = show(abs(value))
    if float(text) == 0:
        return text
    return (MINUS if value < 0 else "+") + text


def memory(value: float | None) -> str:
    """In GiB as the paper's tables, in smaller units where that would read 0.0."""
    if value is None:
        return DASH
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value < 100 * unit else f"{value / unit:.0f} {name}"
    return f"{value:.0f} B" if value else "0"


def seconds(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def duration(value: float | None) -> str:
    if value is None:
        return DASH
    if value < 60:
        return f"{seconds(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _against(reference: str | None) -> str:
    return f"against {reference}" if reference else ""


def _epochs(done: int, asked: int) -> str:
    return str(done) if done == asked or not asked else f"{done} of {asked}"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}{DASH}{values[-1]}"
