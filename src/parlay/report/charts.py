"""The charts: comparisons, configurations and timelines in, inline SVG out.

Legends and titles are left to the page, which wraps them on a narrow screen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from parlay.report import times
from parlay.report.groups import Comparison, Configuration
from parlay.report.load import LARGEST
from parlay.report.svg import COLOURS, DASHES, MUTED, STYLE, Look, new_figure, to_svg
from parlay.timeline import NAMES, Span, shares, window

LINES = 8  # more cannot be told apart in one chart
STEPS = 4  # of a timeline: more of them become too thin to read
BARS = 5000  # of a timeline, whatever its file holds
RANKS = 32  # rows of a timeline, and interfaces
HUES = {"forward": 1, "backward": 4, "update": 3, "send": 7, "receive": 6, "wait": 2, "replay": 8}
"""Colours of what a stage does."""
_HALF = ("send", "receive", "wait")  # as tall as work

Legend = list[tuple[Markup, str]]


def looks(found: Comparison) -> dict[str, Look]:
    """By label. Serial runs are neutral: they are what the others are held against."""
    serial = [one.label for one in found.configurations if one.serial]
    others = [one.label for one in found.configurations if not one.serial]
    drawn = {name: Look(0, (1 + n) % len(DASHES)) for n, name in enumerate(serial)}
    return drawn | {name: Look(1 + n % COLOURS, n // COLOURS % len(DASHES)) for n, name in enumerate(others)}


def drawn(found: Comparison) -> list[Configuration]:
    """Those with a line in the charts: all, or the best ones and a serial one to hold them against."""
    ranked = [one for one, _ in found.ranked() if any(run.epochs for run in one.counted)]
    chosen = ranked[:LINES]
    serial = [one for one in ranked if one.serial]
    if serial and not any(one.serial for one in chosen):
        chosen[-1] = serial[0]
    return [one for one in found.configurations if one in chosen]


def curves(found: Comparison, name: str, label: str, over_time: bool = False) -> Markup:
    """Means over the seeds, with their range, by epoch or by training time. Epochs without a value leave no gap."""
    style, ends = looks(found), list[float]()
    with matplotlib.rc_context(STYLE):
        figure = new_figure(440, 250)
        axes = figure.subplots()
        for one in drawn(found):
            if over_time and times.takes_turns(one.runs[0]):
                continue
            look, points = style[one.label], _by_epoch(one, name)
            at = _clock(one) if over_time else {number: float(number) for number in points}
            x, means = [at.get(number, 0.0) for number in points], [statistics.fmean(v) for v in points.values()]
            axes.plot(x, means, color=look.colour, dashes=look.dashes or (None, None), marker="." * (len(x) == 1))
            low, high = [min(v) for v in points.values()], [max(v) for v in points.values()]
            axes.fill_between(x, low, high, color=look.colour, alpha=0.13, linewidth=0)
            ends += means if one.finished else []
        _limits(axes, ends, log=name != "test_accuracy")
        axes.set_title(label + ", log scale" * (axes.get_yscale() == "log"), loc="left", fontsize=11.5, color=MUTED)
        if over_time:
            axes.set_xlim(left=0)
            axes.set_xlabel("training time, s")
        else:
            _epochs(axes, found)
        return to_svg(
            figure, f"{label} by {'time' if over_time else 'epoch'}", f"curves {found.model} {name} {over_time}"
        )


def violation(found: Comparison, one: Configuration) -> Markup:
    """A line per interface, the mean over the seeds; rings are the violation at the entry of a parallel phase.

    Parallel phases are shaded. The scale is that of all configurations, so that they can be compared.
    """
    longest = max(one.counted, key=lambda run: len(run.epochs)).epochs
    with matplotlib.rc_context(STYLE):
        figure = new_figure(300, 150)
        axes = figure.subplots()
        for number in (e["epoch"] + 1 for e in longest if e["phase"] == "parallel"):
            axes.axvspan(number - 0.5, number + 0.5, color=Look(0, 0).colour, alpha=0.13, linewidth=0)
        for k in range(interfaces(one)):
            for name, mark in (("violation", ".-"), ("violation_at_entry", "o")):
                points = _by_epoch(one, name, k)
                means = [statistics.fmean(points.get(e["epoch"] + 1, [math.nan])) for e in longest]  # gaps stay gaps
                at = [e["epoch"] + 1 for e in longest]
                axes.plot(at, means, mark, color=interface_look(k).colour, mfc="none", markersize=3.5, linewidth=1.2)
        every = [e for other in found.configurations for run in other.counted for e in run.epochs]
        values = [
            v for e in every for v in (*e["violation"], *e["violation_at_entry"]) if v is not None and v <= LARGEST
        ]
        _limits(axes, values, log=True)
        _epochs(axes, found)
        return to_svg(figure, f"{one.label}: violation per interface", f"violation {found.model} {one.label}")


def interfaces(one: Configuration) -> int:
    return min(max((len(e["violation"]) for run in one.counted for e in run.epochs), default=0), RANKS)


def interface_look(k: int) -> Look:
    return Look(1 + k % COLOURS, 0)


def timeline(spans: Sequence[Span], salt: str) -> tuple[Legend, Markup]:
    """The last steps, a row per stage. Shares are those of each stage's time."""
    chosen = window(spans, STEPS)[:BARS]
    ranks = sorted({span.rank for span in chosen})[:RANKS]
    there = {span.name for span in chosen}
    names = [name for name in NAMES if name in there] + sorted(there - set(NAMES))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(900, 46 + 36 * len(ranks))
        axes = figure.subplots()
        for span in (span for span in chosen if span.rank in ranks):
            row, height = ranks.index(span.rank), 0.3 if span.name in _HALF else 0.72
            bar = (1000 * span.begin, 1000 * (span.end - span.begin))
            axes.broken_barh(
                [bar], (-row - 0.36, height), facecolors=Look(HUES.get(span.name, 0), 0).colour, linewidth=0
            )
            if span.name == "forward":
                axes.text(bar[0], 0.4 - row, str(span.step), fontsize=8, color=MUTED, clip_on=True)
        axes.set_yticks([-row for row in range(len(ranks))], [f"stage {rank}" for rank in ranks])
        axes.set_ylim(-len(ranks) + 0.5, 0.7)
        axes.set_xlim(0, 1000 * max((span.end for span in chosen), default=1.0))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("milliseconds")
        svg = to_svg(figure, f"timeline of the last {STEPS} steps, a row per stage", f"timeline {salt}")
    found = shares(chosen).values()
    return [(patch(name), f"{name} {', '.join(f'{own.get(name, 0.0):.0%}' for own in found)}") for name in names], svg


def patch(name: str) -> Markup:
    return Markup(
        '<svg class="swatch" width="14" height="10" aria-hidden="true">'
        '<rect width="14" height="10" style="fill:var(--c{})"/></svg>'
    ).format(HUES.get(name, 0))


def swatch(look: Look) -> Markup:
    """The line of a configuration, for legends and tables."""
    return Markup(
        '<svg class="swatch" width="26" height="10" aria-hidden="true">'
        '<line x1="1" x2="25" y1="5" y2="5" style="stroke:var(--c{});stroke-dasharray:{}"/></svg>'
    ).format(look.hue, ",".join(f"{2 * dash:g}" for dash in look.dashes) or "none")


def _by_epoch(one: Configuration, name: str, k: int | None = None) -> dict[int, list[float]]:
    """The values of all runs, or the k-th of each, for the epochs that have some."""
    found: dict[int, list[float]] = {}
    for epoch in (epoch for run in one.counted for epoch in run.epochs):
        value = epoch[name] if k is None else next(iter(epoch[name][k:]), None)
        if value is not None and abs(value) <= LARGEST:
            found.setdefault(epoch["epoch"] + 1, []).append(value)
    return dict(sorted(found.items()))


def _clock(one: Configuration) -> dict[int, float]:
    """Training time until the end of each epoch: of the median run, since other work only ever adds time."""
    seconds = _by_epoch(one, "seconds")
    return dict(zip(seconds, accumulate(map(statistics.median, seconds.values())), strict=True))


def _epochs(axes: Axes, found: Comparison) -> None:
    axes.set_xlim(0.5, max((run.epochs[-1]["epoch"] for run in found.runs if run.epochs), default=0) + 1.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(False, axis="x")
    axes.set_xlabel("epoch")


def _limits(axes: Axes, values: Iterable[float], log: bool) -> None:
    """Room for most of the values: an accuracy begins low, a loss high, and what went astray may leave the frame."""
    known = sorted(v for v in values if v > 0 or not log)
    if not known:
        return
    low, high = (known[0], known[-1 - len(known) // 100]) if log else (known[len(known) // 20], known[-1])
    if log and high > 3 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.25, high * 1.25)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        room = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
