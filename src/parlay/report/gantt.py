"""Simulated timelines as inline SVG: serial, layer-parallel and hybrid training one above the other, on one clock."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes

from parlay.config.schedule import HYBRID
from parlay.report.simulate import Bar, Times, length, letters, play
from parlay.report.spans import hue, patch
from parlay.report.svg import INK, MUTED, PAPER, STYLE, Look, new_figure, to_svg

ROW = 17  # pixels of a stage
Way = tuple[str, Sequence[Bar]]
"""What it is called, and what the stages do."""


def ways(times: Times, schedule: str) -> list[Way]:
    """The same number of batches, one for an epoch; `schedule` where it is a hybrid one, else alternate:4:1."""
    hybrid = schedule if schedule.split(":")[0] in HYBRID[:2] else "alternate:4:1"
    pattern = letters(hybrid)
    return [
        ("serial", play(times, "S" * len(pattern))),
        ("layer-parallel", play(times, "P" * len(pattern))),
        (f"hybrid, {hybrid}", play(times, pattern)),
    ]


def simulated(times: Times, schedule: str, salt: str) -> Markup:
    found = ways(times, schedule)
    longest = length(found[0][1])
    titles = [f"{name}: {_speed(longest / length(bars))}" for name, bars in found]
    return draw([(title, bars) for title, (_, bars) in zip(titles, found, strict=True)], times.stages, salt)


def draw(rows: Sequence[Way], stages: int, salt: str, unit: str = "milliseconds") -> Markup:
    with matplotlib.rc_context(STYLE):
        figure = new_figure(900, 40 + len(rows) * (26 + ROW * stages))
        drawn = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        longest = max(length(bars) for _, bars in rows)
        for axes, (title, bars) in zip(drawn, rows, strict=True):
            _bars(axes, bars, stages, longest)
            axes.set_title(title, loc="left", fontsize=11.5, color=INK, pad=3)
            axes.tick_params(bottom=axes is drawn[-1])
            axes.spines["bottom"].set_visible(axes is drawn[-1])
        drawn[-1].set_xlim(0, longest)
        drawn[-1].set_xlabel(unit)
        return to_svg(figure, "simulated timeline: " + "; ".join(title for title, _ in rows), f"simulated {salt}")


def legend(rows: Sequence[Way]) -> list[tuple[Markup, str]]:
    """A patch and a name for every kind of bar."""
    names = {"forward": "forward", "backward": "backward and update", "replay": "forward again", "send": "messages"}
    there = {bar.name for _, bars in rows for bar in bars}
    return [(patch(name), text) for name, text in names.items() if name in there]


def _bars(axes: Axes, bars: Sequence[Bar], stages: int, longest: float) -> None:
    for bar in bars:
        spans = [(bar.begin, bar.end - bar.begin)]
        axes.broken_barh(spans, (-bar.stage - 0.42, 0.84), facecolors=Look(hue(bar.name), 0).colour, linewidth=0)
        if bar.end - bar.begin > 0.014 * longest and bar.name != "send":
            middle = (bar.begin + bar.end) / 2
            axes.text(middle, -bar.stage, str(bar.batch), ha="center", va="center", fontsize=9, color=PAPER)
    axes.set_yticks([-k for k in range(stages)], [f"stage {k}" for k in range(stages)], fontsize=10)
    axes.set_ylim(-stages + 0.5, 0.5)
    axes.grid(False)
    axes.axvline(length(bars), color=MUTED, linewidth=0.8)
    axes.spines["left"].set_visible(False)


def _speed(ratio: float) -> str:
    return f"{ratio:.2f} times as fast as serial" if abs(ratio - 1) > 5e-3 else "the baseline"
