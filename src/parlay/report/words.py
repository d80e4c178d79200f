"""Numbers and findings as people read them: the cells of the tables, the sentence at the head of the page.

The console and the page show the same cells; each has its own way of laying them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parlay.report.groups import Group, Task
from parlay.report.speed import rows

DASH = "–"
MINUS = "−"

TIMED = ("step, ms", "speed-up, measured", "staleness, steps")
"""The columns of runs whose times can be compared."""

Show = Callable[[float | None], str]


@dataclass(frozen=True)
class Cell:
    text: str
    key: float | str | None = None
    """What the column is sorted by; None comes last."""
    note: str = ""
    bad: bool = False
    """Does it tell of something that went wrong?"""


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
            "r",
            tuple(Cell(str(row["downsample"]), row["downsample"]) for row in table),
            "downsampling of the states",
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
            tuple(Cell(signed(row["gap"], show), row["gap"], _against(row["reference"])) for row in table),
            "difference of the means, to the serial configuration most like it",
        ),
        Column(
            "aux. memory",
            tuple(Cell(memory(row["auxiliary_bytes"]), row["auxiliary_bytes"]) for row in table),
            "states and multipliers kept",
        ),
        *(_step_times(table) if task.timed else _epoch_times(table)),
        Column("status", tuple(Cell(row["status"], row["status"], bad=row["status"] != "finished") for row in table)),
    ]
    empty = {"gap to serial", "serial epoch, s", "parallel epoch, s", *TIMED}
    found = [c for c in found if c.title not in empty or any(cell.key is not None for cell in c.cells)]
    same = task.timed and len({row["epochs_done"] for row in table}) == 1  # as they are in a comparison; room is short
    return [c for c in found if c.title != "epochs"] if same else found


def _step_times(table: Sequence[dict[str, Any]]) -> list[Column]:
    step, gain, age = TIMED
    return [
        Column(
            step,
            tuple(Cell(_time(row["step_ms"], row["step_ms_spread"]), row["step_ms"]) for row in table),
            "measured: of a training step, on average over the schedule; median epochs, without evaluation",
        ),
        Column(
            gain,
            tuple(Cell(_gain(row), row["speedup"], _against(row["reference"])) for row in table),
            "serial training's time for an epoch over this one, both measured in these runs",
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


def _gain(row: dict[str, Any]) -> str:
    doubt = " ?" if row["unsteady"] and row["speedup"] is not None and row["reference"] else ""
    return points(row["speedup"]) + doubt


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
    parallel = [group for group in ranked if not group.serial]
    best = (parallel or ranked)[0]
    text = f"{best.label} reaches {'' if task.by_accuracy else 'a test loss of '}{measure(task, best)} {where}"
    if len(best.counted) == 1:
        text += ", in one run"
    gap = task.gap(best)
    if gap is None:
        return text + "."
    amount = (points if task.by_accuracy else loss)(abs(gap))
    if float(amount) == 0:
        return f"{text}, the same as serial training."
    return f"{text}, {amount} {'points ' if task.by_accuracy else ''}{'below' if gap < 0 else 'above'} serial training."


def facts(task: Task) -> list[tuple[str, str, str]]:
    """The numbers at the head of the page: value, what it is, whose it is."""
    found = []
    ranked = [group for group in task.ranked() if group.finished and task.mean(group) is not None]
    if ranked:
        best = "" if len(task.groups) == 1 else "best " if task.by_accuracy else "lowest "
        name = best + ("test accuracy" if task.by_accuracy else "test loss")
        found.append((measure(task, ranked[0]), name, ranked[0].label))
        serial = [group for group in ranked if group.serial]
        if serial and not ranked[0].serial:
            found.append((measure(task, serial[0]), "serial training", serial[0].label))
        parallel = [group for group in ranked if not group.serial]
        if ranked[0].serial and parallel:
            found.append((measure(task, parallel[0]), "best in parallel", parallel[0].label))
        if parallel:
            found += _price(task, parallel[0])
    runs = [run for group in task.groups for run in group.runs]
    count = len(task.groups)
    finished = sum(run.finished for run in runs)
    some = "" if finished == len(runs) else f", {finished} finished"
    found.append(
        (str(len(runs)), "run" if len(runs) == 1 else "runs", f"{count} configuration{'s' * (count > 1)}{some}")
    )
    epochs = sorted({group.epochs for group in task.groups})
    found.append((_range(epochs), "epochs", f"{task.dataset} · {task.model}"))
    return found


def _price(task: Task, group: Group) -> list[tuple[str, str, str]]:
    """What the best parallel configuration costs, and how fast it was where that can be told."""
    found = []
    row = next(row for row in rows(task) if row["label"] == group.label)
    if row.get("speedup") is not None:
        doubt = ", uncertain" if row["unsteady"] else ""
        found.append((f"{_gain(row)} ×", f"its speed, measured{doubt}", f"{row['reference']} = 1"))
    if row["auxiliary_bytes"] is not None:
        found.append((memory(row["auxiliary_bytes"]), "its auxiliary memory", group.label))
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
