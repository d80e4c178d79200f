"""The charts of learning: tasks and groups in, inline SVG out.

Legends and titles are left to the page, which wraps them on a narrow screen; the pictures hold only axes and data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator, NullFormatter

from parlay.report.groups import Group, Task
from parlay.report.load import Epoch, Run
from parlay.report.svg import COLOURS, DASHES, INK, MUTED, STYLE, Look, new_figure, to_svg

LINES = 8
"""More lines than this in one chart cannot be told apart."""

STEPS = (1, 2, 2.5, 5, 10)

Value = Callable[[Epoch], float | None]


def looks(task: Task) -> dict[str, Look]:
    """A look for every configuration, by label. Serial runs are neutral: they are what the others are held against."""
    serial = [group.label for group in task.groups if group.serial]
    others = [group.label for group in task.groups if not group.serial]
    found = {name: Look(0, (1 + n) % len(DASHES)) for n, name in enumerate(serial)}
    return found | {name: Look(1 + n % COLOURS, n // COLOURS % len(DASHES)) for n, name in enumerate(others)}


def curves(task: Task, groups: Sequence[Group], value: Value, label: str, log: bool) -> Markup:
    """Means over the seeds, epoch by epoch, with their range; below them a ribbon per group for its parallel epochs."""
    style = looks(task)
    ribbons = [group for group in groups if any(e.parallel for run in group.counted for e in run.epochs)]
    with matplotlib.rc_context(STYLE):
        figure = new_figure(440, 250 + 8 * len(ribbons))
        ratios = [210, max(8 * len(ribbons), 1)]
        upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": ratios, "hspace": 0.03})
        for group in groups:
            _line(upper, group, value, style[group.label])
        limits(upper, [series(g.counted, value) for g in groups if g.finished], task.by_accuracy and not log, log)
        upper.set_title(log_marked(upper.yaxis, label), loc="left", fontsize=11.5, color=MUTED)
        upper.tick_params(bottom=False)
        upper.spines["bottom"].set_visible(False)
        for row, group in enumerate(ribbons):
            spans = [(first - 0.5, last - first + 1.0) for first, last in _spans(_longest(group).epochs)]
            lower.broken_barh(spans, (-row - 0.75, 0.5), facecolors=style[group.label].colour, linewidth=0)
        lower.set_ylim(-max(len(ribbons), 1), 0)
        lower.set_yticks([])
        lower.spines["left"].set_visible(False)
        _epochs(lower, groups)
        if ribbons:
            lower.set_xlabel("epoch; a bar marks parallel epochs")
        return to_svg(figure, f"{label} by epoch", f"curves {task.dataset} {task.model} {label}")


def panel(task: Task, group: Group, kinds: Sequence[str]) -> Markup:
    """One configuration alone, parallel phases shaded: `test`, `train` and `violation`, one under the other."""
    look = looks(task)[group.label]
    reference = task.reference(group)
    with matplotlib.rc_context({**STYLE, "font.size": 11, "axes.labelsize": 11}):
        height = 50 + 105 * len(kinds)
        figure = new_figure(300, height, None)  # the same frame for every panel, and much faster than a fitted one
        figure.subplots_adjust(left=0.14, right=0.99, bottom=38 / height, top=1 - 20 / height, hspace=0.32)
        for axes, kind in zip(figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0], kinds, strict=True):
            for first, last in _spans(_longest(group).epochs):
                axes.axvspan(first - 0.5, last + 0.5, color=Look(0, 0).colour, alpha=0.13, linewidth=0)
            if kind == "violation":
                _violation(axes, task, group)
            else:
                value, log = (test_of(task), not task.by_accuracy) if kind == "test" else (train_of, True)
                if reference is not None:
                    _line(axes, reference, value, Look(0, 1), 1.0)
                for run in group.runs:
                    _draw(axes, *_judged(*mean_by_epoch([run], value)), look.colour)
                limits(
                    axes,
                    [series(g.counted, value) for g in task.groups if g.finished],
                    kind == "test" and not log,
                    log,
                )
            title = log_marked(axes.yaxis, heading(task, kind))
            axes.set_title(title, loc="left", fontsize=11, color=MUTED, pad=3)
        _epochs(axes, task.groups)
        names = ", ".join(heading(task, kind) for kind in kinds)
        return to_svg(figure, f"{group.label}: {names}", f"panel {task.dataset} {task.model} {group.label} {names}")


def ranking(task: Task) -> Markup:
    """A dot per configuration, best on top, with the spread of its seeds; a line for each serial reference."""
    style, ranked = looks(task), task.ranked()
    with matplotlib.rc_context(STYLE):
        figure = new_figure(440, 62 + 20 * len(ranked))
        axes = figure.subplots()
        for row, group in enumerate(ranked):
            look, mean, spread = style[group.label], task.mean(group), group.spread(task.value)
            if group.serial and group.finished and mean is not None:
                axes.axvline(mean, color=look.colour, dashes=look.dashes or (None, None), linewidth=1)
            if not group.finished or mean is None:
                axes.text(
                    0.01,
                    row,
                    group.status,
                    transform=axes.get_yaxis_transform(),
                    va="center",
                    color=MUTED,
                    fontsize=11.5,
                )
                continue
            axes.plot(
                group.values(task.value), [row] * len(group.counted), "|", color=look.colour, alpha=0.6, markersize=8
            )
            axes.errorbar(mean, row, xerr=spread, fmt="o", color=look.colour, markersize=6, capsize=0, elinewidth=1.6)
        axes.set_yticks(range(len(ranked)), [short(group.label) for group in ranked])
        axes.set_ylim(len(ranked) - 0.4, -0.6)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
        axes.set_xlabel(heading(task, "test"))
        return to_svg(figure, f"{heading(task, 'test')} of every configuration", f"ranking {task.dataset} {task.model}")


def swatch(look: Look) -> Markup:
    """The line of a configuration for legends and tables."""
    dashes = ",".join(f"{2 * d:g}" for d in look.dashes)
    return Markup(
        '<svg class="swatch" width="26" height="10" viewBox="0 0 26 10" aria-hidden="true">'
        '<line x1="1" x2="25" y1="5" y2="5" style="stroke:var(--c{});stroke-dasharray:{}"/></svg>'
    ).format(look.hue, dashes or "none")


def _violation(axes: Axes, task: Task, group: Group) -> None:
    """A line per interface, the mean over the seeds; rings are the violation found at the entry of a parallel phase."""
    for k in range(interfaces(group)):
        colour = interface_look(k).colour
        numbers, values = mean_by_epoch(group.counted, _at(k, lambda e: e.violation))
        _draw(axes, numbers, values, colour)
        numbers, values = mean_by_epoch(group.counted, _at(k, lambda e: e.violation_at_entry))
        axes.plot(numbers, values, "o", mfc="none", color=colour, markersize=3.5, markeredgewidth=0.9)
    found = [
        v
        for g in task.groups
        for run in g.counted
        for e in run.epochs
        for v in (*e.violation, *e.violation_at_entry)
        if v is not None and v > 0
    ]
    if found and max(found) > 30 * min(found):  # the same scale in every panel, so that they can be compared
        axes.set_yscale("log")
        axes.set_ylim(min(found) / 1.3, max(found) * 1.3)
        _plain_log(axes)
    else:
        axes.set_ylim(0, 1.1 * max(found, default=1.0))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=STEPS))


def _at(k: int, values: Callable[[Epoch], tuple[float | None, ...]]) -> Value:
    return lambda epoch: values(epoch)[k] if k < len(values(epoch)) else None


def interfaces(group: Group) -> int:
    return max((len(e.violation) for run in group.counted for e in run.epochs), default=0)


def interface_look(k: int) -> Look:
    return Look(1 + k % COLOURS, 0)


def test_of(task: Task) -> Value:
    return lambda epoch: epoch.test_accuracy if task.by_accuracy else epoch.test_loss


def train_of(epoch: Epoch) -> float | None:
    return epoch.train_loss


def heading(task: Task, kind: str) -> str:
    test = "test accuracy, %" if task.by_accuracy else "test loss"
    return {"test": test, "train": "training loss, whole network", "violation": "violation per interface"}[kind]


def log_marked(axis: Axis, label: str) -> str:
    return label if axis.get_scale() == "linear" else f"{label}, log scale"


def _line(axes: Axes, group: Group, value: Value, look: Look, width: float = 1.7) -> None:
    numbers, values = _judged(*mean_by_epoch(group.counted, value))
    axes.plot(numbers, values, color=look.colour, dashes=look.dashes or (None, None), linewidth=width)
    if len(numbers) == 1:
        axes.plot(numbers, values, ".", color=look.colour)
    if len(group.counted) > 1 and width > 1:
        judged = [(number, v) for number, v in _by_epoch(group.counted, value) if number in numbers]
        low, high = ([pick(v) for _, v in judged] for pick in (_least, _most))
        axes.fill_between(numbers, low, high, color=look.colour, alpha=0.13, linewidth=0)


def _judged(numbers: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The epochs after which the whole network was judged: a line goes on over those between."""
    found = [(number, value) for number, value in zip(numbers, values, strict=True) if not math.isnan(value)]
    return [number for number, _ in found], [value for _, value in found]


def _draw(axes: Axes, numbers: Sequence[int], values: Sequence[float], colour: str) -> None:
    """A line with gaps; a value between two gaps, which no line would show, is a dot."""
    axes.plot(numbers, values, color=colour, linewidth=1.2)
    padded = [math.nan, *values, math.nan]
    alone = [n for n in range(len(numbers)) if math.isnan(padded[n]) and math.isnan(padded[n + 2])]
    axes.plot([numbers[n] for n in alone], [values[n] for n in alone], ".", color=colour, markersize=4)


def limits(axes: Axes, series: Sequence[Sequence[float]], accuracy: bool, log: bool) -> None:
    """Room for what finished runs did. Their first epochs, and runs that went astray, may leave the frame."""
    values = sorted(v for line in series for v in line if not log or v > 0)
    log = log and bool(values)  # nothing has no logarithm
    if log:
        axes.set_yscale("log")
    if values:
        low, high = values[len(values) // 20 if accuracy else 0], values[-1 if accuracy else -1 - len(values) // 100]
        if log:
            axes.set_ylim(low / 1.25, high * 1.25)
        else:
            room = 0.06 * (high - low) or 1.0
            axes.set_ylim(low - room, high + room)
    if log:
        _plain_log(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))


def _plain_log(axes: Axes) -> None:
    """Decades as plain numbers; ticks between them only where there are too few."""
    low, high = axes.get_ylim()
    decades = math.floor(math.log10(high)) - math.ceil(math.log10(low)) + 1
    if decades < 2:
        ticks = [
            m * 10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)
        ]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    elif low > 1e-5 and high < 1e6:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.yaxis.set_major_formatter(LogFormatterSciNotation())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _epochs(axes: Axes, groups: Iterable[Group]) -> None:
    last = max((run.epochs[-1].number for g in groups for run in g.runs if run.epochs), default=1)
    axes.set_xlim(0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(False, axis="x")
    axes.set_xlabel("epoch")


def _longest(group: Group) -> Run:
    return max(group.counted, key=lambda run: len(run.epochs))


def _spans(epochs: Iterable[Epoch]) -> list[tuple[int, int]]:
    """The parallel phases, as first and last epoch."""
    spans: list[tuple[int, int]] = []
    for e in epochs:
        if e.parallel and spans and spans[-1][1] == e.number - 1:
            spans[-1] = (spans[-1][0], e.number)
        elif e.parallel:
            spans.append((e.number, e.number))
    return spans


def _by_epoch(runs: Iterable[Run], value: Value) -> list[tuple[int, list[float]]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        for e in run.epochs:
            v = value(e)
            found.setdefault(e.number, []).extend([] if v is None else [v])
    return sorted(found.items())


def mean_by_epoch(runs: Iterable[Run], value: Value) -> tuple[list[int], list[float]]:
    """Epochs without a value are kept as gaps in the line."""
    pairs = _by_epoch(runs, value)
    return [n for n, _ in pairs], [sum(v) / len(v) if v else math.nan for _, v in pairs]


def series(runs: Iterable[Run], value: Value) -> list[float]:
    return [v for v in mean_by_epoch(runs, value)[1] if math.isfinite(v)]


def _least(values: list[float]) -> float:
    return min(values, default=math.nan)


def _most(values: list[float]) -> float:
    return max(values, default=math.nan)


def short(text: str, limit: int = 30) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
