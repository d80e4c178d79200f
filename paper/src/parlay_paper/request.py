"""What is asked for: a table or figure, its rows, and how much shorter than the paper's it is to be.

No torch: wrong input is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from parlay import methods
from parlay.compare import Row
from parlay.config.keys import flag, nearest
from parlay.config.recipe import ASIDE, KEYS, Recipe, by_field, make_recipe, read_recipe
from parlay.errors import InputError
from parlay_paper.tables import EXPERIMENTS, KINDS, WORKLOADS, Experiment, Line, Workload

FIXED = ("method", "stages", "downsample", "schedule", "augment", "seed", "out", "epochs", "train_samples", "data_dir")
"""What rows are made of, and what has a flag of its own: no recipe may replace it."""


@final
@dataclass(frozen=True)
class Request:
    name: str
    out: Path
    seeds: tuple[int, ...] = (0,)
    epochs: int | None = None
    """The paper's where none is given."""
    scale: float = 1.0
    """Share of the training samples. Epochs are as many, and each of them so much shorter."""
    data_dir: str = "data"
    rows: tuple[str, ...] = ()
    """Those to run; all where none is given."""
    at_once: int = 1
    instead: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe, in the place of the paper's."""
    of_kind: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same for rows of one kind alone."""

    def __post_init__(self) -> None:
        if self.name not in EXPERIMENTS:
            known = f"{', '.join(EXPERIMENTS)} (nearest: {nearest(self.name, EXPERIMENTS)})"
            raise InputError(f"unknown name '{self.name}': write one of {known}")
        if not 0 < self.scale <= 1:
            raise InputError(f"scale is {self.scale}: write a share of the training samples above 0 and up to 1")
        if self.at_once < 1:
            raise InputError(f"at-once is {self.at_once}: write a number of at least 1")
        names = [line.name for line in self.lines]
        for row in self.rows:
            if row not in names:
                raise InputError(f"{self.name} has no row '{row}': write {nearest(row, names)}")
        for key in (key for keys in (self.instead, *self.of_kind.values()) for key in keys):
            if key in FIXED:
                raise InputError(f"{flag(key)} is what the rows are made of: leave it out of the recipe")
        for keys in ({}, *self.of_kind.values()):
            make_recipe(self.keys(), keys)  # refused now where a value is wrong

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name]

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.experiment.workload]

    @property
    def loss(self) -> bool:
        """Is the test loss what counts?"""
        return self.workload.loss

    @property
    def lines(self) -> tuple[Line, ...]:
        return self.experiment.lines

    @property
    def selected(self) -> list[Line]:
        """Those to run."""
        return [line for line in self.lines if not self.rows or line.name in self.rows]

    @property
    def folder(self) -> Path:
        """Of the table: what is written about the runs."""
        return self.out / self.name

    @property
    def runs(self) -> Path:
        """Of the run folders, which tables and figures of the same network share."""
        return self.out / "runs" / self.experiment.workload

    def folders(self, line: Line) -> list[Path]:
        return [self.runs / f"{line.name}-s{seed}" for seed in self.seeds]

    def keys(self) -> dict[str, Any]:
        """What all rows have in common."""
        keys = {
            **self.workload.keys,
            "epochs": self.workload.epochs if self.epochs is None else self.epochs,
            "data_dir": self.data_dir,
            "checkpoint_every": 0,  # a checkpoint holds the states, up to 92 GiB: one where a run is interrupted
            **self.instead,
        }
        if self.scale < 1:
            keys["train_samples"] = max(round(self.scale * _samples(make_recipe(keys, {}))), 1)
        return keys

    def row(self, line: Line) -> Row:
        """For the runner of comparisons."""
        own = {key: value for key, value in line.keys(self.workload).items() if key not in self.instead}
        return Row(line.name, {**own, **self.of_kind.get(line.kind, {})})

    def labels(self) -> list[str]:
        """In what this is not the paper's experiment; it stands above everything that is written."""
        keys, labels = self.keys(), []
        if keys["epochs"] != self.workload.epochs:
            labels.append(f"{keys['epochs']} epochs in the place of {self.workload.epochs}")
        if self.scale < 1:
            labels.append(f"scale {self.scale:g}: {keys['train_samples']} training samples; memory is what these take")
        labels += self._others(self.instead)
        for kind in dict.fromkeys(line.kind for line in self.lines):
            rates = {key: rate for key, rate in self.workload.rates.get(kind, {}).items() if key not in self.instead}
            labels += [f"{text} ({KINDS[kind]})" for text in self._others({**rates, **self.of_kind.get(kind, {})})]
        return labels

    def _others(self, keys: Mapping[str, Any]) -> list[str]:
        """Those of these keys that are not the paper's."""
        paper = {**{key.name: key.default for key in KEYS}, **self.workload.keys}
        others = {key: value for key, value in keys.items() if value != paper.get(key) and key not in ASIDE}
        return [f"{flag(key)} {value} in the place of {paper.get(key)}" for key, value in others.items()]


def _samples(recipe: Recipe) -> int:
    if recipe.dataset == "synthetic":
        return recipe.synthetic_samples
    from parlay import data  # torch: only where a share of them is asked for

    return data.facts(recipe.dataset).train_size


def read_instead(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The keys of `--recipe FILE`, and those for a kind of rows, which stand in a table of its name, as in [hybrid]."""
    options = methods.every_option()
    content = read_recipe(path, (*KINDS, *options))
    tables = {kind: content.pop(kind) for kind in KINDS if kind in content}
    for kind, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"{kind} is {table!r} in {path}: write a table of keys, as in [{kind}]")
    return content, {kind: by_field(table, f"[{kind}] of {path}", options) for kind, table in tables.items()}


def read_names(text: str | None) -> tuple[str, ...]:
    """`--rows a,b`."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()
