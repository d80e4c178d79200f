"""What is compared: runs grouped by configuration, with the mean, spread and number of their seeds.

A configuration is everything of a recipe but its seed and the places of its files. Runs come in; rows come out, as
plain values that the console, the page and the CSV files show each in their way.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parlay.config.keys import flag
from parlay.config.recipe import ASIDE
from parlay.config.schedule import HYBRID
from parlay.report import noise
from parlay.report.load import Run

NOT_COMPARED = ("seed", *map(flag, ASIDE))
"""Keys of a recipe that do not make another configuration."""

METHODS = {
    "serial": "Serial",
    "penalty": "Penalty",
    "al": "AL",
    "replay": "Replay",
    "delayed": "DDG",
    "local": "DGL",
    "dni": "DNI",
    "auxnet": "AuxNet",
    "NoneType": "Serial",  # the class names stand in the summaries of runs started from Python
    "Penalty": "Penalty",
    "AugmentedLagrangian": "AL",
    "Delayed": "DDG",
    "Local": "DGL",
}

STREAMING = ("Replay", "DDG", "DGL", "DNI", "AuxNet")
"""They keep nothing per sample, so they see augmented images in every epoch."""

AUGMENTED_BY_DEFAULT = ("cifar10", "cifar100")


@dataclass(frozen=True)
class Group:
    """The runs of one configuration: they differ by their seeds."""

    runs: tuple[Run, ...]
    label: str
    """What the configuration is called, told apart from the others of its task."""

    @property
    def recipe(self) -> Run:
        return self.runs[0]

    @property
    def serial(self) -> bool:
        return _method(self.recipe) == "Serial"

    @property
    def task(self) -> tuple[str, str]:
        """Data set, or as much of it as is trained on, and model: only runs of the same task are compared."""
        first = self.recipe.number("train-samples", 0)
        dataset = self.recipe.text("dataset", "own data") + (f" (first {first})" if first else "")
        return dataset, self.recipe.text("model", "own model")

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs that the numbers are made of: finished ones; where there is none, all there are."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @property
    def finished(self) -> bool:
        return self.counted[0].finished

    @property
    def status(self) -> str:
        counts = Counter(run.status for run in self.runs)
        if len(self.runs) == 1:
            return self.runs[0].status
        return (
            ", ".join(f"{count} {status}" for status, count in counts.items())
            if len(counts) > 1
            else next(iter(counts))
        )

    @property
    def epochs(self) -> int:
        return self.recipe.number("epochs", 0)

    @property
    def epochs_done(self) -> int:
        return max((len(run.epochs) for run in self.counted), default=0)

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        values = self.values(value)
        return statistics.fmean(values) if values else None

    def spread(self, value: Callable[[Run], float | None]) -> float | None:
        """Sample standard deviation; one run has none."""
        values = self.values(value)
        return statistics.stdev(values) if len(values) > 1 else None

    def values(self, value: Callable[[Run], float | None]) -> list[float]:
        return [v for run in self.counted if (v := value(run)) is not None]


@dataclass(frozen=True)
class Task:
    """The configurations of one data set and model, in a fixed order, and the measure they are compared by."""

    dataset: str
    model: str
    groups: tuple[Group, ...]
    timed: bool = False
    """Were the runs made one after the other on the same devices, so that their times can be compared?"""
    beside: bool = False
    """Were they made side by side, so that their times tell nothing at all?"""

    @cached_property
    def by_accuracy(self) -> bool:
        """Runs without an accuracy (the VAE's) are compared by their test loss."""
        return any(run.test_accuracy is not None for group in self.groups for run in group.runs)

    def value(self, run: Run) -> float | None:
        return run.test_accuracy if self.by_accuracy else run.test_loss

    def mean(self, group: Group) -> float | None:
        return group.mean(self.value)

    def ranked(self) -> list[Group]:
        """Best first; those without a finished run, or without a value, last."""

        def rank(group: Group) -> tuple[bool, bool, float]:
            mean = self.mean(group)
            return not group.finished, mean is None, (-1 if self.by_accuracy else 1) * (mean or 0.0)

        return sorted(self.groups, key=rank)

    def reference(self, group: Group) -> Group | None:
        """The serial configuration that `group` is measured against: the one most like it, finished.

        Like it means the same epochs first, then the same augmentation of the images seen: a purely parallel schedule
        sees them plain, a hybrid one sees them augmented in its serial epochs; of copies, as many.
        """
        if group.serial:
            return None
        candidates = [g for g in self.groups if g.serial and g.finished and self.mean(g) is not None]

        def likeness(other: Group) -> tuple[bool, bool, bool, int]:
            ours, theirs = group.recipe.recipe, other.recipe.recipe
            return (
                group.epochs == other.epochs,
                _sees_augmented(group.recipe) == _sees_augmented(other.recipe),
                _copies(group.recipe) == _copies(other.recipe),
                sum(ours.get(key) == value for key, value in theirs.items()),
            )

        return max(candidates, key=likeness, default=None)

    def gap(self, group: Group) -> float | None:
        """Group minus reference: negative is worse for accuracies, positive is worse for losses."""
        reference = self.reference(group)
        if reference is None or not group.finished:
            return None
        ours, theirs = self.mean(group), self.mean(reference)
        return None if ours is None or theirs is None else ours - theirs

    def counts_from(self, group: Group) -> float | None:
        """The smallest gap of this group that counts as a difference."""
        reference = self.reference(group)
        if reference is None:
            return None
        samples = group.recipe.test_samples if self.by_accuracy else None
        return noise.counts_from(group.values(self.value), reference.values(self.value), samples)

    def differs(self, group: Group) -> bool | None:
        """Is the gap more than chance? None where that cannot be told."""
        gap, least = self.gap(group), self.counts_from(group)
        return None if gap is None or least is None else abs(gap) > least


def tasks(runs: Sequence[Run], timed: bool = False, beside: bool = False) -> list[Task]:
    """The runs, grouped. The order does not depend on the order of the runs: names and colours stay where they are."""
    by_configuration: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_configuration[_configuration(run)].append(run)
    by_task: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for members in by_configuration.values():
        group = Group(tuple(sorted(members, key=lambda run: (run.number("seed", 0), run.name))), label(members[0]))
        by_task[group.task].append(group)
    return [
        Task(dataset, model, tuple(_told_apart(sorted(groups, key=_order))), timed, beside)
        for (dataset, model), groups in sorted(by_task.items())
    ]


def rows(task: Task) -> list[dict[str, Any]]:
    """The comparison table of a task, plain values: what is not known is None."""
    return [_row(task, group) for group in task.groups]


def label(run: Run) -> str:
    """The paper's name of a configuration, as in DS-SPH-AL K=3; it has none for the adaptive schedule."""
    method = _method(run)
    if method == "Serial":
        return f"Serial {_augmentation(run)}"
    downsampled = "DS-" if run.number("downsample", 1) > 1 else ""
    kind = run.text("schedule").split(":")[0]
    hybrid, adaptive = "SPH-" * (kind in HYBRID and kind != "adaptive"), ", adaptive" * (kind == "adaptive")
    return f"{downsampled}{hybrid}{method} K={run.number('stages', 1)}{adaptive}"


def run_rows(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """A row for every run."""
    return [
        {
            "run": run.name,
            "configuration": group.label,
            "seed": run.recipe.get("seed"),
            "status": run.status,
            "epochs": len(run.epochs),
            "test_accuracy": run.test_accuracy,
            "test_loss": run.test_loss,
            "auxiliary_bytes": run.auxiliary_bytes,
            "seconds": run.total_seconds,
            "message": run.message,
        }
        for group in groups
        for run in group.runs
    ]


def epoch_rows(run: Run) -> list[dict[str, Any]]:
    """A row for every epoch of a run, the lists spread over numbered columns."""
    stages = max((len(e.losses) for e in run.epochs), default=0)
    interfaces = max((len(e.violation) for e in run.epochs), default=0)
    return [
        {
            "epoch": e.number,
            "phase": "parallel" if e.parallel else "serial",
            "train_loss": e.train_loss,
            "test_loss": e.test_loss,
            "test_accuracy": e.test_accuracy,
            "seconds": e.seconds,
            "learning_rate": e.learning_rate,
            "beta": e.beta,
            **{f"loss_{k}": _item(e.losses, k) for k in range(stages)},
            **{f"violation_{k + 1}": _item(e.violation, k) for k in range(interfaces)},
            **{f"violation_at_entry_{k + 1}": _item(e.violation_at_entry, k) for k in range(interfaces)},
        }
        for e in run.epochs
    ]


def to_csv(content: Sequence[dict[str, Any]]) -> str:
    if not content:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(content[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in content)
    return text.getvalue()


def _row(task: Task, group: Group) -> dict[str, Any]:
    reference = task.reference(group)
    return {
        "label": group.label,
        "dataset": task.dataset,
        "model": task.model,
        "stages": group.recipe.number("stages", 1),
        "downsample": group.recipe.number("downsample", 1),
        "schedule": group.recipe.text("schedule"),
        "epochs": group.epochs,
        "epochs_done": group.epochs_done,
        "runs": len(group.counted),
        "test_accuracy": group.mean(lambda run: run.test_accuracy),
        "test_accuracy_spread": group.spread(lambda run: run.test_accuracy),
        "test_loss": group.mean(lambda run: run.test_loss),
        "test_loss_spread": group.spread(lambda run: run.test_loss),
        "gap": task.gap(group),
        "gap_counts_from": task.counts_from(group),
        "gap_differs": task.differs(group),
        "reference": reference.label if reference else None,
        "auxiliary_bytes": group.mean(lambda run: run.auxiliary_bytes),
        "serial_epoch": None if task.beside else group.mean(lambda run: run.serial_epoch),
        "parallel_epoch": None if task.beside else group.mean(lambda run: run.parallel_epoch),
        "status": group.status,
    }


def _configuration(run: Run) -> str:
    return repr(sorted((key, value) for key, value in run.recipe.items() if key not in NOT_COMPARED))


def _order(group: Group) -> tuple[Any, ...]:
    """Serial first, then method by method; the hybrid and downsampled kinds of a method behind its plain one."""
    run, method = group.recipe, _method(group.recipe)
    methods = list(dict.fromkeys(METHODS.values()))
    return (
        methods.index(method) if method in methods else len(methods),
        method,
        run.text("schedule").split(":")[0] in HYBRID,
        run.number("downsample", 1),
        run.number("stages", 1),
        label(run),
        _configuration(run),
    )


def _told_apart(groups: list[Group]) -> list[Group]:
    """Configurations of the same name get the keys in which they differ: AL K=3, beta 1."""
    same: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        same[group.label].append(group)
    return [Group(group.runs, group.label + _difference(group, same[group.label])) for group in groups]


def _difference(group: Group, others: list[Group]) -> str:
    keys = sorted({key for other in others for key in other.recipe.recipe} - set(NOT_COMPARED))
    differing = [key for key in keys if len({repr(other.recipe.recipe.get(key)) for other in others}) > 1]
    return "".join(f", {_key(key, group.recipe.recipe.get(key))}" for key in differing)


def _key(key: str, value: Any) -> str:
    if key == "schedule":  # its values say what they are
        return str(value)
    return f"no {key}" if value is None else f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"


def _method(run: Run) -> str:
    name = run.text("method", "serial")
    return METHODS.get(name, name[:1].upper() + name[1:])


def _augmentation(run: Run) -> str:
    augment = run.text("augment", "auto")
    if augment.isdecimal():
        return f"with DA ({augment} copies)"
    return "with DA" if _augments(run) else "w/o DA"


def _augments(run: Run) -> bool:
    augment = run.text("augment", "auto")
    return run.text("dataset") in AUGMENTED_BY_DEFAULT if augment == "auto" else augment != "none"


def _copies(run: Run) -> int:
    """Fixed ones of every image."""
    augment = run.text("augment", "auto")
    return int(augment) if augment.isdecimal() else 0


def _sees_augmented(run: Run) -> bool:
    copies = run.text("augment").isdecimal()  # fixed copies are samples of their own: every phase sees them
    return _augments(run) and (copies or run.text("schedule") != "parallel" or _method(run) in STREAMING)


def _item(values: tuple[float | None, ...], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _cell(value: Any) -> Any:
    """A spreadsheet takes text that begins with these for a formula; a run's name must not become one."""
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
