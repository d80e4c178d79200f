"""How fast runs were: times as the records have them, each held against the serial training beside it.

Times may only be compared where runs were made one after the other on the same devices, which a run cannot know of
itself: `Comparison.timed` says so. Nothing here is projected.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from parlay.report.load import Content, Run

STEADY = 1.25
"""Quartiles of epochs further apart than this are not of a quiet machine."""


def row(runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Any]:
    """What the runs of a configuration tell of its speed; `reference` are those of serial training, or none."""
    ours, theirs = epoch_seconds(runs), epoch_seconds(reference)
    ratio, share = theirs / ours if ours and theirs else None, trained_share(runs[0])
    steps = runs[0].summary["steps_per_epoch"] or math.nan
    each = [1000 * seconds / steps for run in runs if (seconds := epoch_seconds([run])) is not None]
    found = {"step_ms": ours, "serial_step_ms": _median(runs, False), "parallel_step_ms": _median(runs, True)}
    return {
        **{name: _finite(1000 * seconds / steps) if seconds else None for name, seconds in found.items()},
        "step_ms_spread": _finite(statistics.stdev(each)) if len(each) > 1 else None,
        "speedup": ratio,
        "trained_share": share,
        "speedup_per_sample": ratio * share if ratio and share else None,
        "takes_turns": takes_turns(runs[0]),
        "unsteady": max(scatter(runs), scatter(reference)) > STEADY,
        "staleness": staleness(runs[0]),
        "processes": int(runs[0].summary["processes"] or 1),
    }


def method(run: Run) -> str:
    """By its name in a recipe; class names stand in the summaries of runs started from Python."""
    name = run.text("method", "serial").lower()
    return {"nonetype": "serial", "augmentedlagrangian": "al"}.get(name, name)


def epoch_seconds(runs: Sequence[Run]) -> float | None:
    """Training time of an epoch, on average over the schedule: the median of each phase, and passes that set states.

    Medians over all runs, because the first epoch of a phase also compiles, and because other work on the machine only
    ever adds time. Evaluation and checkpoints are not in it.
    """
    timed = [e for run in runs for e in run.epochs if e["seconds"] is not None]
    if not timed:
        return None
    phases = [times for parallel in (False, True) if (times := [t for run in runs for t in _seconds(run, parallel)])]
    passes = sum(e["refresh_seconds"] or 0.0 for e in timed)
    return (sum(len(times) * statistics.median(times) for times in phases) + passes) / len(timed)


def mean_epoch(runs: Sequence[Run], phase: str) -> float | None:
    """As the summaries have it, in seconds."""
    found = [seconds for run in runs if (seconds := run.summary["seconds"].get(f"{phase}_epoch")) is not None]
    return statistics.fmean(found) if found else None


def trained_share(run: Run) -> float | None:
    """Of an epoch's samples, the share that each stage trains on, on average over the run.

    Half in a parallel epoch of the penalty in its red-black order, where neighbours take turns; else all.
    """
    if not run.epochs:
        return None
    halved = method(run) == "penalty" and run.stages > 1 and run.text("order") != "joint"
    return 1 - halved * [e["phase"] for e in run.epochs].count("parallel") / (2 * len(run.epochs))


def takes_turns(run: Run) -> bool:
    """Stages share the cores of one process, so that its seconds tell nothing of a speed-up."""
    return "cpu" in run.devices and (run.summary["processes"] or 1) == 1 and run.stages > 1


def scatter(runs: Sequence[Run]) -> float:
    """How far apart times of the same work are: upper over lower quartile of the epochs of a phase, the worse phase."""
    found = [1.0]
    for parallel in (False, True):
        times = [t for run in runs for t in _seconds(run, parallel)[1:]]  # the first one also compiles
        if len(times) > 1:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            found.append(high / low if low > 0 else math.inf)
    return max(found)


def staleness(run: Run) -> float | None:
    """Steps between the forward pass of a batch and the use of its signal, in the stage that waits longest.

    States kept per sample are used an epoch later. Methods whose states live a few steps tell it themselves.
    """
    told: float | None = run.summary["staleness"]
    if told is None and (method(run) == "serial" or run.stages == 1):
        return 0
    if told is None and method(run) in ("al", "penalty"):
        told = run.summary["steps_per_epoch"]
    return told


def seconds_until(runs: Sequence[Run], reached: Callable[[Content], bool]) -> float | None:
    """Mean training time until an epoch of a run first did; None where one of them never did."""
    found = []
    for run in runs:
        first = next((n for n, epoch in enumerate(run.epochs, 1) if reached(epoch)), None)
        if first is None:
            return None
        found.append(sum(e["seconds"] or 0.0 for e in run.epochs[:first]))
    return statistics.fmean(found)


def _median(runs: Sequence[Run], parallel: bool) -> float | None:
    times = [t for run in runs for t in _seconds(run, parallel)]
    return statistics.median(times) if times else None


def _seconds(run: Run, parallel: bool) -> list[float]:
    """Of the epochs of a phase, without the passes that set states."""
    timed = [e for e in run.epochs if e["seconds"] is not None and (e["phase"] == "parallel") is parallel]
    return [e["seconds"] - (e["refresh_seconds"] or 0.0) for e in timed]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
