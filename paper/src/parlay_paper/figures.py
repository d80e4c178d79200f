"""The paper's figures, of the runs that are there: Matplotlib, as SVG and PNG files beside the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from parlay_paper import images
from parlay_paper.runs import Run
from parlay_paper.tables import RANDOM, WITHOUT, Line

STYLE: dict[Any, Any] = {"svg.hashsalt": "parlay", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {"serial": "#444444", "penalty": "#1c7ed6", "al": "#e8590c", "replay": "#2f9e44"}
MARKS = {(1, False): "o", (2, False): "s", (1, True): "^", (2, True): "D"}
"""By downsampling, and whether it is a hybrid."""
SPEEDS = (
    ("speedup_measured", "value", "measured here"),
    ("speedup_projected", "value", "projected for K devices"),
    ("paper_speedup", "paper_value", "as the paper prints them"),
)
ALWAYS = "∞"

Value = Callable[[Mapping[str, Any]], float | None]
"""Of a line of a run's records."""


@final
@dataclass(frozen=True)
class Shown:
    """A line of an experiment, its row of the table, and its runs."""

    line: Line
    row: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def colour(self) -> str:
        return COLOURS[self.line.method]


@final
@dataclass(frozen=True)
class Scene:
    """All that there is to draw from."""

    name: str
    shown: Sequence[Shown]
    epochs: int
    loss: bool
    data_dir: str

    @property
    def done(self) -> list[Shown]:
        return [one for one in self.shown if one.finished]

    @property
    def measure(self) -> str:
        return "test loss" if self.loss else "test accuracy, %"


@final
@dataclass(frozen=True)
class Drawn:
    figure: Figure
    name: str
    caption: str


def draw(kind: str, scene: Scene) -> list[Drawn]:
    """The pictures of one kind; none where there is nothing to draw yet."""
    with matplotlib.rc_context(STYLE):
        return KINDS[kind](scene)


def save(drawn: Drawn, folder: Path) -> list[Path]:
    paths = [folder / f"{drawn.name}.{end}" for end in ("svg", "png")]
    with matplotlib.rc_context(STYLE):
        drawn.figure.savefig(paths[0], metadata={"Date": None})
        drawn.figure.savefig(paths[1], dpi=150)
    return paths


def tradeoff(scene: Scene) -> list[Drawn]:
    """Figure 5, once for each kind of speed-up: a picture never holds two of them."""
    found = []
    for speed, value, words in SPEEDS:
        known = [one for one in scene.shown if one.row[speed] is not None and one.row[value] is not None]
        if not known:
            continue
        figure, axes = _one()
        _families(axes, [(one.line, one.row[speed], one.row[value]) for one in known])
        dashes = ""
        if speed != "paper_speedup":
            _early_stopped(axes, scene, max(one.row[speed] for one in known))
            dashes = "; dashed: serial training with augmentation, stopped early"
        axes.set(xlabel=f"speed-up per epoch, {words}", ylabel=scene.measure)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        caption = f"{scene.measure} against speed-up per epoch, {words}{dashes}"
        found.append(Drawn(figure, f"{scene.name}-{speed.replace('_', '-')}", caption))
    return found


def _families(axes: Axes, points: Sequence[tuple[Line, float, float]]) -> None:
    """A mark and a thin line for each method with its DS and SPH; its points have their K, or their ratio."""
    by_ratio = len({line.ratio for line, _, _ in points if line.ratio}) > 1
    for family in dict.fromkeys((line.method, line.downsample, bool(line.ratio)) for line, _, _ in points):
        own = [p for p in points if (p[0].method, p[0].downsample, bool(p[0].ratio)) == family]
        xs, ys = zip(*sorted((x, y) for _, x, y in own), strict=True)
        mark, label = MARKS[family[1:]] + "-", own[0][0].label.partition(" (")[0]
        axes.plot(xs, ys, mark, color=COLOURS[family[0]], markersize=5, linewidth=0.5, label=label)
    for line, x, y in points:
        text = line.ratio if by_ratio and line.ratio else f"K={line.stages} {line.schedule}".strip()
        at = (4, 3) if line.downsample == 1 else (4, -8)  # rows with and without DS often lie close
        axes.annotate(text, (x, y), at, textcoords="offset points", fontsize=6)


def _early_stopped(axes: Axes, scene: Scene, until: float) -> None:
    """What serial training had reached after the share of its epochs that a speed-up stands for."""
    score = "test_loss" if scene.loss else "test_accuracy"
    serial = [one.finished for one in scene.done if one.line.name == "serial-da"]
    curve = _mean(serial[0], lambda epoch: epoch.get(score)) if serial else {}
    points = [(scene.epochs / epoch, value) for epoch, value in curve.items() if scene.epochs / epoch <= 1.1 * until]
    if points:
        axes.plot(*zip(*points, strict=True), "--", color=COLOURS["serial"], linewidth=1, label="serial, stopped early")


def copies(scene: Scene) -> list[Drawn]:
    """Figure 4: accuracy by the ratio ρ_DA of synthetic to real images, 0 without and ∞ with random augmentation."""
    if not scene.done:
        return []
    counts = {one.line.augment for one in scene.done if one.line.augment.isdecimal()}
    ratios = ["0", *sorted(counts, key=int), ALWAYS]
    figure, axes = _one()
    for method in dict.fromkeys(one.line.method for one in scene.done):
        own = [one for one in scene.done if one.line.method == method]
        label = own[0].line.label.partition(",")[0].removesuffix(" w/o DA")
        points = [(ratios.index(_copies(one.line)), one.row["value"]) for one in own]
        last = len(ratios) - 1  # an epoch of fewer steps: not on the line
        parts = [(sorted(p for p in points if p[0] < last), "o-"), ([p for p in points if p[0] == last], "D")]
        for n, (part, form) in enumerate((part, form) for part, form in parts if part):
            axes.plot(*zip(*part, strict=True), form, color=COLOURS[method], label=label if n == 0 else "_")
    axes.set_xticks(range(len(ratios)), ratios)
    axes.set(xlabel="synthetic images per real one, $\\rho_{DA}$", ylabel=scene.measure)
    axes.legend(frameon=False)
    caption = "Test accuracy by the number ρ of fixed copies of every image, with 1 + ρ times the steps in an epoch"
    return [Drawn(figure, scene.name, f"{caption}; ∞: random changes, with as many steps as without copies")]


def _copies(line: Line) -> str:
    if line.augment == RANDOM or line.ours:
        return ALWAYS
    return "0" if line.augment in ("", WITHOUT) else line.augment


def curves(scene: Scene) -> list[Drawn]:
    """Figures 7 and 8: training loss of the whole network, test loss, and the violation of the constraints."""
    if not scene.done:
        return []
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels: tuple[tuple[str, Value], ...] = (
        ("training loss, whole network", lambda epoch: epoch.get("train_loss")),
        ("test loss", lambda epoch: epoch.get("test_loss")),
        ("violation, mean of interfaces", lambda epoch: _average(epoch.get("violation"))),
    )
    for axes, (title, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for one in scene.done:
            points = _mean(one.finished, value)
            form = ".--" if one.line.downsample > 1 else ".-"
            if points:
                axes.plot(*zip(*points.items(), strict=True), form, color=one.colour, linewidth=1, label=one.line.label)
        if any(axes.lines):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].legend(frameon=False, fontsize=6.5)
    for one in scene.done:
        jumps = _mean(one.finished, lambda epoch: _average(epoch.get("violation_at_entry")))
        figure.axes[2].plot(list(jumps), list(jumps.values()), "x", color=one.colour, markersize=4)
    caption = (
        "Learning curves, means over the seeds. Violation: ‖λ − x‖ / ‖x‖ in parallel epochs; crosses: how far the "
        "network had moved from its old states in the serial epochs before"
    )
    return [Drawn(figure, scene.name, caption)]


def reconstructions(scene: Scene) -> list[Drawn]:
    """Figure 6: originals in the first line, then the same images by each method."""
    kept = []
    for one in scene.done:
        made = images.of_run(one.finished[0].folder, scene.data_dir)
        kept += [(one.line.label, made)] if made is not None else []
    if not kept:
        return []
    strips = [("original", kept[0][1]["images"]), *((label, found["reconstructions"]) for label, found in kept)]
    count = len(strips[0][1])
    figure = Figure(figsize=(0.75 * count + 1.2, 0.8 * len(strips)), layout="constrained")
    for across, (label, row) in zip(figure.subplots(len(strips), count, squeeze=False), strips, strict=True):
        across[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        for axes, image in zip(across, row, strict=True):
            axes.imshow(image[0] if len(image) == 1 else image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    return [Drawn(figure, scene.name, "Test images and their reconstructions, by method (first seed)")]


KINDS = {"tradeoff": tradeoff, "copies": copies, "curves": curves, "reconstructions": reconstructions}


def _one() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(linewidth=0.3)
    return figure, axes


def _average(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in values or () if value is not None]
    return statistics.fmean(known) if known else None


def _mean(runs: Sequence[Run], value: Value) -> dict[int, float]:
    """By epoch, over the runs that have a value there."""
    found: dict[int, list[float]] = {}
    for epoch in (epoch for run in runs for epoch in run.epochs):
        if (one := value(epoch)) is not None:
            found.setdefault(epoch["epoch"] + 1, []).append(one)
    return {number: statistics.fmean(values) for number, values in sorted(found.items())}
