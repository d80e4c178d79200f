"""What accuracy costs: charts of the measure against memory and against speed, as inline SVG.

A dot for every configuration, with its number in the table; the same looks as in the other charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from parlay.report.figures import STEPS, heading, limits, log_marked, looks, mean_by_epoch, short, test_of
from parlay.report.groups import Group, Task
from parlay.report.speed import epoch_seconds, speedup
from parlay.report.svg import INK, MUTED, STYLE, Look, new_figure, to_svg

NUMBERED = 16
"""More numbers than this would lie on top of each other."""

Dot = tuple[Group, float, float]
"""A configuration, what it costs (or gains), and what it reaches."""


def against_memory(task: Task, numbers: dict[str, int]) -> Markup | None:
    """The measure against the memory of states and multipliers; None where there are not two amounts to compare."""
    found = _dots(task, lambda group: group.mean(lambda run: run.auxiliary_bytes))
    largest = max((stored for _, stored, _ in found), default=0.0)
    if len({stored for _, stored, _ in found}) < 2:
        return None
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    found = [(group, stored / unit, mean) for group, stored, mean in found]
    with matplotlib.rc_context(STYLE):
        figure = new_figure(440, 270)
        axes = figure.subplots()
        _draw(axes, task, found)
        _memory_axis(axes, [stored for _, stored, _ in found])
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
        front = [dot for dot in found if len(task.groups) <= NUMBERED or _on_front(task, dot, found)]
        _number(figure, axes, front, numbers)
        axes.set_xlabel(log_marked(axes.xaxis, f"memory for states, {name}"))
        axes.set_title(heading(task, "test"), loc="left", fontsize=11.5, color=MUTED)
        return to_svg(
            figure, f"{heading(task, 'test')} against memory for states", f"memory {task.dataset} {task.model}"
        )


def against_speed(task: Task, numbers: dict[str, int]) -> Markup | None:
    """The measure against serial training's time over a run's; a line for serial training that is stopped early.

    None where there is no serial training to hold the others against, or nothing to hold against it.
    """
    found = _dots(task, lambda group: None if group.recipe.takes_turns else speedup(task, group))
    if len(found) < 2 or not any(group.serial for group, _, _ in found):
        return None
    style = looks(task)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(440, 280)
        axes = figure.subplots()
        left, right = min(x for _, x, _ in found) / 1.15, max(1.6, 1.25 * max(x for _, x, _ in found))
        seen = []
        for group in (group for group, _, _ in found if group.serial):
            epochs, values = mean_by_epoch(group.counted, test_of(task))
            speeds = [epochs[-1] / number for number in epochs]
            look = style[group.label]
            axes.plot(speeds, values, ".-", color=look.colour, dashes=look.dashes, markersize=4, linewidth=1.2)
            seen += [v for s, v in zip(speeds, values, strict=True) if s <= right and math.isfinite(v)]
        _draw(axes, task, found, across=_speed_spread(task))
        runs = [group.values(task.value) for group, _, _ in found]
        limits(axes, [seen, *runs], task.by_accuracy, not task.by_accuracy)
        axes.set_xscale("log")  # twice as fast and half as fast are equally far from 1
        axes.set_xlim(left, right)
        _ratio_axis(axes)
        _number(figure, axes, found, numbers)
        axes.set_xlabel("serial training's time over this run's, measured, log scale")
        axes.set_title(log_marked(axes.yaxis, heading(task, "test")), loc="left", fontsize=11.5, color=MUTED)
        description = f"{heading(task, 'test')} against training time"
        return to_svg(figure, description, f"speed {task.dataset} {task.model}")


def _dots(task: Task, cost: Callable[[Group], float | None]) -> list[Dot]:
    """The finished configurations of which both are known."""
    found = []
    for group in task.groups:
        mean, x = task.mean(group), cost(group)
        if group.finished and mean is not None and x is not None:
            found.append((group, x, mean))
    return found


def _draw(axes: Axes, task: Task, dots: Sequence[Dot], across: dict[str, float] | None = None) -> None:
    """Serial ones hollow; bars are the sample standard deviation over the runs."""
    style = looks(task)
    for group, x, mean in dots:
        look = style[group.label]
        axes.errorbar(
            x,
            mean,
            yerr=group.spread(task.value),
            xerr=(across or {}).get(group.label),
            fmt="o",
            color=look.colour,
            mfc="none" if group.serial else look.colour,
            markersize=7,
            capsize=0,
            elinewidth=1.4,
        )


def _number(figure: Figure, axes: Axes, dots: Sequence[Dot], numbers: dict[str, int]) -> None:
    """The numbers of the table, each on a side of its dot where no other dot or number is near."""
    figure.draw_without_rendering()  # places are known once the axes are laid out
    at = [axes.transData.transform((x, mean)) for _, x, mean in dots]
    taken = [tuple(point) for point in at]
    for (group, x, mean), (px, py) in zip(dots, at, strict=True):
        sides = [(8, 4), (8, -12), (-15, 4), (-15, -12), (8, 14), (8, -22)]

        def room(side: tuple[int, int], px: float = px, py: float = py) -> float:
            """To the nearest dot or number, from the middle of the text."""
            middle = px + side[0] + 4, py + side[1] + 4
            return min(math.dist(middle, other) for other in taken)

        side = next((side for side in sides if room(side) > 9), max(sides, key=room))
        taken.append((px + side[0] + 4, py + side[1] + 4))
        text = str(numbers[group.label])
        axes.annotate(text, (x, mean), side, textcoords="offset points", fontsize=11, color=MUTED)


def _speed_spread(task: Task) -> dict[str, float]:
    """The sample standard deviation of each configuration's speed-up over its runs."""
    found = {}
    for group in task.groups:
        own, spread = speedup(task, group), group.spread(lambda run: epoch_seconds([run]))
        whole = epoch_seconds(group.counted)
        if own is not None and spread is not None and whole:
            found[group.label] = own * spread / whole
    return found


def _on_front(task: Task, dot: Dot, found: Iterable[Dot]) -> bool:
    """Whether nothing else does better with as little memory."""
    sign, (_, stored, mean) = 1 if task.by_accuracy else -1, dot
    return not any(sign * other > sign * mean and memory <= stored for _, memory, other in found)


def _ratio_axis(axes: Axes) -> None:
    low, high = axes.get_xlim()
    ticks = [t for t in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10) if low <= t <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(1, color=Look(0, 0).colour, linewidth=0.8, alpha=0.6)


def _memory_axis(axes: Axes, amounts: Sequence[float]) -> None:
    """Linear, or logarithmic where the amounts differ greatly, with a place for the zero of serial training."""
    least, most = min(a for a in amounts if a > 0), max(amounts)
    if most <= 8 * least:
        axes.set_xlim(-0.04 * most, 1.08 * most)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
        return
    axes.set_xscale("symlog", linthresh=least, linscale=0.5)
    ticks = [0.0] + [
        least * 2.0**n for n in range(0, 40, 1 + int(math.log2(most / least) > 7)) if least * 2**n <= 1.1 * most
    ]
    axes.set_xticks(ticks, [f"{tick:.2g}" if tick < 10 else f"{tick:.0f}" for tick in ticks])
    axes.set_xlim(-0.1 * least, 1.3 * most)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([], minor=True)


def speeds(rows: Sequence[tuple[str, tuple[float, float, float]]], salt: str) -> Markup | None:
    """The speed-ups of a benchmark: medians with their quartiles, a row for each system."""
    if not rows:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure(440, 56 + 22 * len(rows))
        axes = figure.subplots()
        for row, (name, (low, middle, high)) in enumerate(rows):
            look = Look(1 if name.startswith("layer-parallel") else 0, 0)
            axes.plot([low, high], [row, row], color=look.colour, linewidth=2)
            axes.plot(middle, row, "o", color=look.colour, markersize=7)
        axes.axvline(1, color=Look(0, 0).colour, linewidth=0.8, alpha=0.6)
        axes.set_yticks(range(len(rows)), [short(name) for name, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
        axes.set_xlabel("speed-up over serial training, measured")
        return to_svg(figure, "speed-up of every system over serial training", f"bench {salt}")
