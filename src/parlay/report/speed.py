"""How fast the runs of a comparison were: times as measured, each held against the serial training beside it.

Nothing here is projected. Times may only be compared where runs were made one after the other on the same devices,
which a run cannot know of itself: `Task.timed` says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from parlay.report import groups
from parlay.report.groups import Group, Task
from parlay.report.load import Epoch, Run

STEADY = 1.25
"""Quartiles of epochs further apart than this are not of a quiet machine."""


def rows(task: Task) -> list[dict[str, Any]]:
    """The comparison table, with its times where they can be compared."""
    found = groups.rows(task)
    if not task.timed:
        return found
    return [{**row, **_times(task, group)} for row, group in zip(found, task.groups, strict=True)]


def _times(task: Task, group: Group) -> dict[str, Any]:
    return {
        "step_ms": _per_step(group, epoch_seconds(group.counted)),
        "step_ms_spread": group.spread(lambda run: _per_step(group, epoch_seconds([run]))),
        "serial_step_ms": _per_step(group, _phase_seconds(group.counted, parallel=False)),
        "parallel_step_ms": _per_step(group, _phase_seconds(group.counted, parallel=True)),
        "speedup": speedup(task, group),
        "trained_share": group.mean(trained_share),
        "speedup_per_sample": per_sample(task, group),
        "takes_turns": group.recipe.takes_turns,
        "scatter": scatter(group),
        "unsteady": unsteady(task, group),
        "staleness": group.mean(staleness),
        "processes": group.recipe.processes,
    }


def epoch_seconds(runs: Sequence[Run]) -> float | None:
    """Training time of an epoch, on average over the schedule: the median of each phase, and passes that set states.

    Medians over all runs of a configuration, because the first epoch of a phase also compiles and records, and because
    other work on the machine only ever adds time. Evaluation and checkpoints are not in it.
    """
    timed = [e for run in runs for e in run.epochs if e.seconds is not None]
    if not timed:
        return None
    phases = [[_seconds(e) for e in timed if e.parallel is parallel] for parallel in (False, True)]
    steps = sum(len(phase) * statistics.median(phase) for phase in phases if phase)
    return (steps + sum(e.refresh_seconds or 0.0 for e in timed)) / len(timed)


def speedup(task: Task, group: Group) -> float | None:
    """Serial training's time for an epoch over that of `group`, both measured."""
    reference = group if group.serial else task.reference(group)
    if not task.timed or reference is None:
        return None
    ours, theirs = epoch_seconds(group.counted), epoch_seconds(reference.counted)
    return theirs / ours if ours and theirs else None


def per_sample(task: Task, group: Group) -> float | None:
    """The speed-up per sample trained: that per epoch counts work which a stage has left out."""
    ratio, share = speedup(task, group), group.mean(trained_share)
    return ratio * share if ratio is not None and share is not None else None


def trained_share(run: Run) -> float | None:
    return run.trained_share


def shown(row: dict[str, Any]) -> float | None:
    """The speed-up of a row that people may read: none where stages take turns in one process on a CPU."""
    return None if row["takes_turns"] else row["speedup_per_sample"]


def scatter(group: Group) -> float | None:
    """How far apart times of the same work are: upper over lower quartile of the epochs of a phase, the worse phase."""
    found = []
    for parallel in (False, True):
        # the first epoch of a phase in a run is left out: it also compiles and records
        same = [[_seconds(e) for e in run.epochs if e.parallel is parallel and e.seconds] for run in group.counted]
        times = [seconds for run in same for seconds in run[1:]]
        if len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            found.append(high / low if low > 0 else math.inf)
    return max(found, default=None)


def unsteady(task: Task, group: Group) -> bool:
    """Are these times, or those that they are held against, too far apart to tell anything from?"""
    reference = task.reference(group)
    return any((scatter(one) or 1.0) > STEADY for one in (group, reference) if one is not None)


def staleness(run: Run) -> int | None:
    """Steps between the forward pass of a batch and the use of what came back for it, in the stage that waits longest.

    States that are kept per sample are used an epoch later. Methods whose states live a few steps tell it themselves.
    """
    if run.staleness is not None:
        return run.staleness
    if run.text("method") == "serial" or run.number("stages", 1) == 1:
        return 0
    return run.steps if run.text("method") in ("al", "penalty") else None


HALVES = "In a parallel epoch a stage of Penalty trains on half of the samples, which takes less time"


def note(task: Task) -> str:
    """What the times of a task are, in short sentences; nothing where there are none to explain."""
    runs = [run for group in task.groups for run in group.counted]
    turns = "Stages take turns in one process on the CPU: these seconds are no speed-up" if _take_turns(task) else ""
    halves = HALVES if any((run.trained_share or 1) < 1 for run in runs) else ""
    if not task.timed:
        return _sentences([] if task.beside else [turns, halves])
    where = "; ".join(dict.fromkeys(_place(run) for run in runs if run.devices))
    if not where:
        return _sentences([halves])
    found = [f"Times are measured, on {where}: medians over the epochs, without evaluation"]
    if turns:
        found.append(f"{turns}; parlay bench times a process per stage")
    elif any(run.processes == 1 and run.number("stages", 1) > 1 for run in runs):
        found.append("All stages of a process share its GPU; parlay plan projects a device for each")
    if any(not group.serial and not group.recipe.takes_turns for group in task.groups):
        against = dict.fromkeys(one.label for group in task.groups if (one := task.reference(group)))
        found += [f"Baseline of the speed-ups, which are per sample trained: {', '.join(against)}"] if against else []
    found.append(halves)
    if any(unsteady(task, group) for group in task.groups):
        worst = max(scatter(group) or 1.0 for group in task.groups)
        found.append(
            f"Times of the same work differ by a factor of up to {worst:.1f} (quartiles), as on a busy machine: "
            "do not rely on those with a question mark"
        )
    return _sentences(found)


def _sentences(found: Sequence[str]) -> str:
    return " ".join(f"{text}." for text in found if text)


def _take_turns(task: Task) -> bool:
    return any(run.takes_turns for group in task.groups for run in group.counted)


def _place(run: Run) -> str:
    devices = ", ".join(dict.fromkeys(run.devices))
    if run.processes > 1:
        return f"{devices} in {run.processes} processes"
    threads = run.environment.get("threads") if devices == "cpu" else None
    return f"{devices} in one process" + (f" of {threads} thread{'s' * (threads != 1)}" if threads else "")


def _per_step(group: Group, seconds: float | None) -> float | None:
    """In milliseconds."""
    steps = group.recipe.steps
    return 1000 * seconds / steps if seconds is not None and steps else None


def _phase_seconds(runs: Sequence[Run], parallel: bool) -> float | None:
    """Of an epoch of one kind alone."""
    times = [_seconds(e) for run in runs for e in run.epochs if e.seconds is not None and e.parallel is parallel]
    return statistics.median(times) if times else None


def _seconds(epoch: Epoch) -> float:
    return (epoch.seconds or 0.0) - (epoch.refresh_seconds or 0.0)
