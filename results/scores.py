"""Test accuracies of a table of rows, read from their run folders and drawn: what pages of accuracy share.

A run that diverged, was stopped or is not there is told as such, and a row that has one has no mean.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

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
        ended = {seed: run.test_accuracy for seed, run in self.runs.items() if run and run.finished}
        return {seed: score for seed, score in ended.items() if score is not None}

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores.values()) if len(self.scores) == len(self.runs) else None

    @property
    def each(self) -> str:
        """Of every seed the accuracy, or a word for what became of it."""
        lost = {seed: run.status if run else "not run" for seed, run in self.runs.items()}
        return ", ".join(f"{self.scores[seed]:.2f}" if seed in self.scores else lost[seed] for seed in self.runs)

    @property
    def seeds(self) -> str:
        return ", ".join(map(str, self.runs))

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
