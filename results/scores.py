"""Scores of run folders, as cells, figures and pictures: what the `page.py` of several experiments share.

A run that diverged, was stopped or is not there is told as such, and a row that has one has no mean.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from runner import Rows

from parlay.report.load import Run, load


@dataclass(frozen=True)
class Row:
    """The runs of one row, by seed; None: there is none."""

    flags: str
    runs: dict[int, Run | None]
    folders: tuple[Path, ...]
    """Of the runs that there are."""

    @property
    def there(self) -> list[Run]:
        return [run for run in self.runs.values() if run]

    @property
    def scores(self) -> dict[int, float]:
        """Of the runs that have finished."""
        ended = {seed: run.summary["test_accuracy"] for seed, run in self.runs.items() if run and run.finished}
        return {seed: score for seed, score in ended.items() if score is not None}

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores.values()) if len(self.scores) == len(self.runs) else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds."""
        return statistics.stdev(self.scores.values()) if self.mean is not None and len(self.scores) > 1 else None

    @property
    def memory(self) -> int:
        """Bytes that the method keeps beside the network, its gradients and its optimiser."""
        return max((run.summary["auxiliary_bytes"] or 0 for run in self.there), default=0)

    @property
    def each(self) -> str:
        """Of every seed the accuracy, or a word for what became of it."""
        lost = {seed: run.status if run else "not run" for seed, run in self.runs.items()}
        return ", ".join(f"{self.scores[seed]:.2f}" if seed in self.scores else lost[seed] for seed in self.runs)

    @property
    def cell(self) -> str:
        """Mean and spread; without a mean, the runs one by one."""
        if self.mean is None:
            return self.each
        return number(self.mean) + (f" ± {self.spread:.2f}" if self.spread is not None else "")

    def figures(self, name: str) -> dict[str, float]:
        """By name: the mean, its spread, how many seeds, and each of them."""
        found = {name: self.mean, f"{name}-spread": self.spread, f"{name}-seeds": len(self.runs)}
        found |= {f"{name}-s{seed}": score for seed, score in self.scores.items()}
        return {key: value for key, value in found.items() if value is not None}

    def minus(self, other: "Row") -> float | None:
        """Points above the other row, on the seeds of this one."""
        if self.mean is None or not other.scores.keys() >= self.runs.keys():
            return None
        return statistics.fmean(score - other.scores[seed] for seed, score in self.scores.items())


def read(rows: Rows, runs: Path) -> dict[str, Row]:
    found = {}
    for name, (flags, seeds) in rows.items():
        folders = {seed: runs / f"{name}-s{seed}" for seed in seeds}
        folders = {seed: folder for seed, folder in folders.items() if (folder / "recipe.toml").exists()}
        loaded = {seed: load([folder])[0] for seed, folder in folders.items()}
        found[name] = Row(flags, {seed: loaded.get(seed) for seed in seeds}, tuple(folders.values()))
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a run, as `records.jsonl` has them."""
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    """Empty of a run that was cut off."""
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def violations(folder: Path) -> list[float]:
    """The largest of each interface in any parallel epoch."""
    return [max(each) for each in zip(*filter(None, (row["violation"] for row in rows_of(folder))), strict=True)]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; numbers stand to the right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form).replace("-", "−")


def draw(rows: list[tuple[str, str, Row]], limits: tuple[float, float], title: str) -> Figure:
    """Rows as (label, colour, runs). Every seed a dot, every mean a mark; accuracy does not start at zero: no bars."""
    figure = Figure(figsize=(8, 0.3 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for y, (_, colour, row) in enumerate(reversed(rows)):
        shown = [score for score in row.scores.values() if score > limits[0]]
        axes.plot(shown, [y] * len(shown), "o", color=colour, markersize=6, alpha=0.75)
        if row.mean is not None:
            axes.plot([row.mean], [y], "|", color="black", markersize=13)
        hidden = len(shown) < len(row.scores)
        text = "← " * hidden + (row.each if hidden or row.mean is None else f"{row.mean:.1f}")
        axes.text(max(shown, default=limits[0]) + 0.018 * (limits[1] - limits[0]), y, text, va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)], fontsize=9)
    axes.set(xlim=limits, xlabel="test accuracy, % (dots: seeds, marks: means)")
    figure.suptitle(title, fontsize=9)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
