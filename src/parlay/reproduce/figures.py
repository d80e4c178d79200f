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
from safetensors.numpy import load_file

from parlay.reproduce.old_load import Epoch, Run
from parlay.reproduce.paper import RANDOM, WITHOUT, Line

STYLE: dict[Any, Any] = {"svg.hashsalt": "parlay", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {"serial": "#444444", "penalty": "#1c7ed6", "al": "#e8590c", "replay": "#2f9e44"}
MARKS = {(1, False): "o", (2, False): "s", (1, True): "^", (2, True): "D"}
"""By downsampling, and whether it is a hybrid."""
LABEL = 6.0  # points

Rows = Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True)
class Shown:
    """What there is to draw: the lines of an experiment, their rows of the table and their runs, in the same order."""

    lines: Sequence[Line]
    rows: Rows
    runs: Sequence[Sequence[Run]]
    folders: Sequence[Sequence[Path]]
    """Of the same runs."""
    epochs: int
    loss: bool

    def finished(self) -> list[tuple[Line, Mapping[str, Any], list[Run]]]:
        groups = [[run for run in runs if run.finished] for runs in self.runs]
        return [(line, row, group) for line, row, group in zip(self.lines, self.rows, groups, strict=True) if group]

    @property
    def measure(self) -> str:
        return "test loss" if self.loss else "test accuracy, %"


@final
@dataclass(frozen=True)
class Drawn:
    figure: Figure
    name: str
    caption: str


def draw(kind: str, shown: Shown, name: str) -> list[Drawn]:
    """The pictures of one kind; none where there is nothing to draw yet."""
    with matplotlib.rc_context(STYLE):
        return KINDS[kind](shown, name)


def save(drawn: Drawn, folder: Path) -> list[Path]:
    paths = [folder / f"{drawn.name}.{end}" for end in ("svg", "png")]
    with matplotlib.rc_context(STYLE):
        drawn.figure.savefig(paths[0], metadata={"Date": None})
        drawn.figure.savefig(paths[1], dpi=150)
    return paths


def tradeoff(shown: Shown, name: str) -> list[Drawn]:
    """Figure 5, once for each kind of speed-up: a picture never holds two of them."""
    found = []
    kinds = (
        ("speedup_measured", "value", "measured here"),
        ("speedup_projected", "value", "projected for K devices"),
        ("paper_speedup", "paper_value", "as the paper prints them"),
    )
    for speed, value, words in kinds:
        points = [
            (line, row[speed], row[value])
            for line, row in zip(shown.lines, shown.rows, strict=True)
            if row[speed] is not None and row[value] is not None
        ]
        if not points:
            continue
        figure, axes = _one()
        _families(axes, points)
        if speed != "paper_speedup":
            _early_stopped(axes, shown, max(x for _, x, _ in points))
        axes.set(xlabel=f"speed-up per epoch, {words}", ylabel=shown.measure)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        dashes = "" if speed == "paper_speedup" else "; dashed: serial training with augmentation, stopped early"
        caption = f"{shown.measure} against speed-up per epoch, {words}{dashes}"
        found.append(Drawn(figure, f"{name}-{speed.replace('_', '-')}", caption))
    return found


def _families(axes: Axes, points: Sequence[tuple[Line, float, float]]) -> None:
    """A mark and a thin line for each method with its DS and SPH; its points have their K, or their ratio."""
    by_ratio = len({line.ratio for line, _, _ in points if line.ratio}) > 1
    for family in dict.fromkeys((line.method, line.downsample, bool(line.ratio)) for line, _, _ in points):
        own = [p for p in points if (p[0].method, p[0].downsample, bool(p[0].ratio)) == family]
        xs, ys = zip(*sorted((x, y) for _, x, y in own), strict=True)
        mark, label = MARKS[family[1:]] + "-", own[0][0].label.partition(" (")[0]
        axes.plot(xs, ys, mark, color=COLOURS[family[0]], markersize=5, linewidth=0.5, label=label)
    texts = [
        line.ratio if by_ratio and line.ratio else f"K={line.stages} {line.schedule}".strip() for line, _, _ in points
    ]
    _written(axes, [(text, x, y) for text, (_, x, y) in zip(texts, points, strict=True)])


def _written(axes: Axes, labels: Sequence[tuple[str, float, float]]) -> None:
    """Each beside its point, where no other is yet: above or below it, to the right or to the left."""
    axes.autoscale_view()
    points = 72 / axes.figure.dpi
    taken: list[tuple[float, float, float]] = []
    for text, x, y in labels:
        right, up = points * axes.transData.transform((x, y))
        width = 0.65 * LABEL * len(text)
        places = [(side, above) for side in (4.0, -4.0 - width) for above in (3.0, -3.0 - LABEL)]
        boxes = [(right + side, up + above, width) for side, above in places]
        free = [not any(_overlap(box, other) for other in taken) for box in boxes]
        n = free.index(True) if any(free) else 0
        taken.append(boxes[n])
        axes.annotate(text, (x, y), places[n], textcoords="offset points", fontsize=LABEL)


def _overlap(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Of two lines of text, each given by its lower left corner and its width."""
    return abs(one[1] - other[1]) < LABEL and -one[2] < one[0] - other[0] < other[2]


def _early_stopped(axes: Axes, shown: Shown, until: float) -> None:
    """What serial training had reached after the share of its epochs that a speed-up stands for."""
    curve = next((_mean(runs, _value(shown)) for line, _, runs in shown.finished() if line.name == "serial-da"), {})
    points = [(shown.epochs / epoch, value) for epoch, value in curve.items() if shown.epochs / epoch <= 1.1 * until]
    if points:
        axes.plot(*zip(*points, strict=True), "--", color=COLOURS["serial"], linewidth=1, label="serial, stopped early")


def copies(shown: Shown, name: str) -> list[Drawn]:
    """Figure 4: accuracy by the ratio ρ_DA of synthetic to real images, 0 without and ∞ with random augmentation."""
    done = shown.finished()
    if not done:
        return []
    ratios = ["0", *sorted({line.augment for line, _, _ in done if line.augment.isdecimal()}, key=int), "∞"]
    figure, axes = _one()
    for method in dict.fromkeys(line.method for line, _, _ in done):
        points = []
        for line, row, _ in done:
            if line.method == method:
                always = line.augment == RANDOM or line.ours
                at = "∞" if always else "0" if line.augment in ("", WITHOUT) else line.augment
                points.append((ratios.index(at), row["value"]))
        label = next(
            line.label.partition(",")[0].removesuffix(" w/o DA") for line, _, _ in done if line.method == method
        )
        fixed = sorted(point for point in points if ratios[point[0]] != "∞")
        random = [point for point in points if ratios[point[0]] == "∞"]  # in an epoch of fewer steps: not on the line
        for n, (part, form) in enumerate((part, form) for part, form in ((fixed, "o-"), (random, "D")) if part):
            axes.plot(*zip(*part, strict=True), form, color=COLOURS[method], label=label if n == 0 else "_")
    axes.set_xticks(range(len(ratios)), ratios)
    axes.set(xlabel="synthetic images per real one, $\\rho_{DA}$", ylabel=shown.measure)
    axes.legend(frameon=False)
    caption = "Test accuracy by the number ρ of fixed copies of every image, with 1 + ρ times the steps in an epoch"
    return [Drawn(figure, name, f"{caption}; ∞: random changes, with as many steps as without copies")]


def curves(shown: Shown, name: str) -> list[Drawn]:
    """Figures 7 and 8: training loss of the whole network, test loss, and the violation of the constraints."""
    done = shown.finished()
    if not done:
        return []
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels: tuple[tuple[str, Callable[[Epoch], float | None]], ...] = (
        ("training loss, whole network", lambda epoch: epoch.train_loss),
        ("test loss", lambda epoch: epoch.test_loss),
        ("violation, mean of interfaces", lambda epoch: _average(epoch.violation)),
    )
    for axes, (title, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for line, _, runs in done:
            points = _mean(runs, value)
            if points:
                dashes = ".--" if line.downsample > 1 else ".-"
                axes.plot(
                    list(points), list(points.values()), dashes, color=_colour(line), linewidth=1, label=line.label
                )
        if any(axes.lines):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].legend(frameon=False, fontsize=6.5)
    _jumps(figure.axes[2], done)
    caption = (
        "Learning curves, means over the seeds. Violation: ‖λ − x‖ / ‖x‖ in parallel epochs; crosses: how far the "
        "network had moved from its old states in the serial epochs before"
    )
    return [Drawn(figure, name, caption)]


def _jumps(axes: Axes, done: Sequence[tuple[Line, Any, Sequence[Run]]]) -> None:
    for line, _, runs in done:
        points = _mean(runs, lambda epoch: _average(epoch.violation_at_entry))
        axes.plot(list(points), list(points.values()), "x", color=_colour(line), markersize=4)


def reconstructions(shown: Shown, name: str) -> list[Drawn]:
    """Figure 6: originals in the first line, then the same images by each method."""
    kept = []
    for line, runs, folders in zip(shown.lines, shown.runs, shown.folders, strict=True):
        paths = [f / "reconstructions.safetensors" for run, f in zip(runs, folders, strict=True) if run.finished]
        kept += [(line.label, load_file(path)) for path in paths[:1] if path.is_file()]
    if not kept:
        return []
    strips = [("original", kept[0][1]["images"]), *((label, found["reconstructions"]) for label, found in kept)]
    count = len(strips[0][1])
    figure = Figure(figsize=(0.75 * count + 1.2, 0.8 * len(strips)), layout="constrained")
    grid = figure.subplots(len(strips), count, squeeze=False)
    for across, (label, images) in zip(grid, strips, strict=True):
        across[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        for axes, image in zip(across, images, strict=True):
            axes.imshow(image[0] if len(image) == 1 else image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    return [Drawn(figure, name, "Test images and their reconstructions, by method (first seed)")]


KINDS: dict[str, Callable[[Shown, str], list[Drawn]]] = {
    "tradeoff": tradeoff,
    "copies": copies,
    "curves": curves,
    "reconstructions": reconstructions,
}


def _one() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(linewidth=0.3)
    return figure, axes


def _colour(line: Line) -> str:
    return COLOURS[line.method]


def _value(shown: Shown) -> Callable[[Epoch], float | None]:
    return lambda epoch: epoch.test_loss if shown.loss else epoch.test_accuracy


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean(runs: Sequence[Run], value: Callable[[Epoch], float | None]) -> dict[int, float]:
    """By epoch, over the runs that have a value there."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for epoch in run.epochs:
            if (one := value(epoch)) is not None:
                found.setdefault(epoch.number, []).append(one)
    return {number: statistics.fmean(values) for number, values in sorted(found.items())}
