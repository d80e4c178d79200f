"""Which runs compare: those of one task, grouped by configuration, with means, spreads and gaps over their seeds.

A configuration is everything of a recipe but its seed and what has no effect on training. Runs come in; rows of plain
values come out, for the tables and for `comparison.json`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from parlay import methods
from parlay.config.keys import flag
from parlay.config.recipe import ASIDE
from parlay.config.schedule import HYBRID
from parlay.report import times
from parlay.report.load import Content, Run

NOT_COMPARED = ("seed", *map(flag, ASIDE))
"""Keys of a recipe that do not make another configuration."""
AUGMENTED_BY_DEFAULT = ("cifar10", "cifar100")
ERRORS = 2  # standard errors from which on a gap counts: one of pure chance is as large about once in twenty

Row = dict[str, Any]


@dataclass(frozen=True)
class Configuration:
    """Runs that differ by their seeds alone."""

    runs: tuple[Run, ...]
    label: str
    """Its name, told apart from the others of its task."""

    @property
    def serial(self) -> bool:
        return times.method(self.runs[0]) == "serial"

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs that the numbers are made of: finished ones; where there is none, all there are."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @property
    def finished(self) -> bool:
        return self.counted[0].finished

    def values(self, name: str) -> list[float]:
        """From the summaries."""
        return [value for run in self.counted if (value := run.summary[name]) is not None]


@dataclass(frozen=True)
class Comparison:
    """The configurations of one data set and model, in a fixed order, and a row for each."""

    dataset: str
    model: str
    configurations: tuple[Configuration, ...]
    timed: bool
    """The runs were made one after the other on the same devices, so that their times can be compared."""

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.model}"

    @property
    def runs(self) -> list[Run]:
        return [run for one in self.configurations for run in one.runs]

    @cached_property
    def by_accuracy(self) -> bool:
        """Runs without an accuracy (a VAE's) are compared by their test loss."""
        return any(run.summary["test_accuracy"] is not None for run in self.runs)

    @property
    def score(self) -> str:
        return "test_accuracy" if self.by_accuracy else "test_loss"

    @cached_property
    def rows(self) -> list[Row]:
        """Plain values for each configuration: what is not known is None."""
        return [self._row(one) for one in self.configurations]

    def ranked(self) -> list[tuple[Configuration, Row]]:
        """Best first; those without a finished run, or without a score, last."""

        def rank(pair: tuple[Configuration, Row]) -> tuple[bool, bool, float]:
            one, row = pair
            mean = row[self.score]
            return not one.finished, mean is None, (-1 if self.by_accuracy else 1) * (mean or 0.0)

        return sorted(zip(self.configurations, self.rows, strict=True), key=rank)

    @cached_property
    def target(self) -> float | None:
        """The score that times are taken to: serial training's end, less the smallest gap that counts."""
        ends = [row[self.score] for one, row in self.ranked() if one.serial and one.finished]
        least = [row["gap_counts_from"] for row in self.rows if row["gap_counts_from"] is not None]
        if not ends or not least:
            return None
        return math.floor(10 * (ends[0] - min(least))) / 10 if self.by_accuracy else float(ends[0] + min(least))

    def seconds_to_target(self, one: Configuration) -> float | None:
        target = self.target

        def reached(epoch: Content) -> bool:
            score = epoch[self.score]
            return score is not None and target is not None and (score >= target) is self.by_accuracy

        return None if times.takes_turns(one.runs[0]) else times.seconds_until(one.counted, reached)

    def _row(self, one: Configuration) -> Row:
        first, reference = one.runs[0], self._reference(one)
        ours, theirs = one.values(self.score), reference.values(self.score) if reference else []
        gap = statistics.fmean(ours) - statistics.fmean(theirs) if ours and theirs and one.finished else None
        least = counts_from(ours, theirs, first.summary["test_samples"] if self.by_accuracy else None)
        against = reference or (one if one.serial else None)
        statuses = Counter(run.status for run in one.runs)
        return {
            "label": one.label,
            "dataset": self.dataset,
            "model": self.model,
            "stages": first.stages,
            "downsample": first.number("downsample", 1),
            "schedule": first.text("schedule"),
            "epochs": first.number("epochs", 0),
            "epochs_done": max(len(run.epochs) for run in one.counted),
            "runs": len(one.counted),
            **_mean_and_spread("test_accuracy", one.values("test_accuracy")),
            **_mean_and_spread("test_loss", one.values("test_loss")),
            "gap": gap,
            "gap_counts_from": least,
            "gap_differs": None if gap is None or least is None else abs(gap) > least,
            "reference": reference.label if reference else None,
            "auxiliary_bytes": _mean(one.values("auxiliary_bytes")),
            **{f"{phase}_epoch": times.mean_epoch(one.counted, phase) for phase in ("serial", "parallel")},
            "status": ", ".join(f"{n} {status}" if len(statuses) > 1 else status for status, n in statuses.items()),
            **(times.row(one.counted, against.counted if against else ()) if self.timed else {}),
        }

    def _reference(self, one: Configuration) -> Configuration | None:
        """The finished serial configuration that is most like `one`; None for a serial one.

        Like it means the same epochs first, then the same augmentation of the images seen; of copies, as many.
        """
        ours = one.runs[0]

        def likeness(other: Configuration) -> tuple[bool, bool, bool, int]:
            theirs = other.runs[0]
            same = sum(ours.recipe.get(key) == value for key, value in theirs.recipe.items())
            augmented, copies = (of(ours) == of(theirs) for of in (_sees_augmented, _copies))
            return ours.text("epochs") == theirs.text("epochs"), augmented, copies, same

        found = [c for c in self.configurations if c.serial and c.finished and c.values(self.score) and not one.serial]
        return max(found, key=likeness, default=None)


def compare(runs: Sequence[Run], timed: bool = False) -> list[Comparison]:
    """The runs, grouped. The order does not depend on the order of the runs: names and colours stay where they are."""
    same: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.number("seed", 0), run.name)):
        same[_key(run)].append(run)
    tasks: dict[tuple[str, str], list[Configuration]] = defaultdict(list)
    for members in same.values():
        tasks[_task(members[0])].append(Configuration(tuple(members), _label(members[0])))
    return [
        Comparison(*task, tuple(_told_apart(sorted(found, key=_order))), timed) for task, found in sorted(tasks.items())
    ]


def counts_from(ours: Sequence[float], theirs: Sequence[float], samples: float | None) -> float | None:
    """The smallest gap between the means of two configurations that counts as a difference; None: it is not known.

    It is two standard errors of the gap. The squared standard error of a mean over n runs is (p (1 - p) / N + s²) / n,
    with the binomial error of accuracy p on N test samples and the standard deviation s over the runs. One run has no
    s. A loss has no binomial error: `samples` is None, and each configuration needs several runs.
    """
    squared = 0.0
    for values in (ours, theirs):
        if not values or (samples is None and len(values) == 1):
            return None
        mean = statistics.fmean(values)
        binomial = max(mean * (100 - mean), 0.0) / samples if samples else 0.0
        squared += (binomial + (statistics.variance(values) if len(values) > 1 else 0.0)) / len(values)
    return ERRORS * math.sqrt(squared)


def differing(found: Sequence[Configuration]) -> list[str]:
    """The keys in which the recipes of these configurations differ."""
    keys = sorted({key for one in found for key in one.runs[0].recipe} - set(NOT_COMPARED))
    return [key for key in keys if len({repr(one.runs[0].recipe.get(key)) for one in found}) > 1]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean_and_spread(name: str, values: Sequence[float]) -> Row:
    """One run has no spread."""
    return {name: _mean(values), f"{name}_spread": statistics.stdev(values) if len(values) > 1 else None}


def _key(run: Run) -> str:
    return repr(sorted((key, value) for key, value in run.recipe.items() if key not in NOT_COMPARED))


def _task(run: Run) -> tuple[str, str]:
    """Data set, or as much of it as is trained on, and model: only runs of the same task are compared."""
    first = run.number("train-samples", 0)
    return run.text("dataset", "own data") + (f" (first {first})" if first else ""), run.text("model", "own model")


def _order(one: Configuration) -> tuple[Any, ...]:
    """Serial first, then method by method; the hybrid and downsampled kinds of a method behind its plain one."""
    run, known = one.runs[0], methods.names()
    method, hybrid = times.method(run), run.text("schedule").split(":")[0] in HYBRID
    place = known.index(method) if method in known else len(known)
    return place, method, hybrid, run.number("downsample", 1), run.stages, one.label, _key(run)


def _label(run: Run) -> str:
    """The paper's name of a configuration, as in DS-SPH-AL K=3."""
    method, kind = times.method(run), run.text("schedule").split(":")[0]
    name = methods.label(method) if method in methods.names() else run.text("method")
    if method == "serial":
        return f"{name} {'with' if _augments(run) else 'w/o'} DA"
    downsampled = "DS-" * (run.number("downsample", 1) > 1)
    hybrid, adaptive = "SPH-" * (kind in ("alternate", "tail")), ", adaptive" * (kind == "adaptive")
    return f"{downsampled}{hybrid}{name} K={run.stages}{adaptive}"


def _told_apart(found: list[Configuration]) -> list[Configuration]:
    """Configurations of the same name get the keys in which they differ: AL K=3, beta 1."""
    same: dict[str, list[Configuration]] = defaultdict(list)
    for one in found:
        same[one.label].append(one)
    keys = {label: differing(members) for label, members in same.items()}
    return [replace(one, label=", ".join([one.label, *_named(one.runs[0], keys[one.label])])) for one in found]


def _named(run: Run, keys: Sequence[str]) -> list[str]:
    values = {key: run.recipe.get(key) for key in keys}
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in values.items()}
    return [
        f"no {key}" if values[key] is None else text if key == "schedule" else f"{key} {text}"
        for key, text in texts.items()
    ]


def _augments(run: Run) -> bool:
    augment = run.text("augment", "auto")
    return run.text("dataset") in AUGMENTED_BY_DEFAULT if augment == "auto" else augment != "none"


def _copies(run: Run) -> str:
    """The number of fixed ones of every image."""
    augment = run.text("augment")
    return augment if augment.isdecimal() else ""


def _sees_augmented(run: Run) -> bool:
    """Stored states of a purely parallel schedule belong to plain images, or to fixed copies."""
    stored = run.text("schedule") == "parallel" and not _streams(times.method(run))
    return _augments(run) and not (stored and not _copies(run))


def _streams(method: str) -> bool:
    return method in methods.names() and methods.streams(method)
