"""The timeline of a run: spans of every rank in, bars as inline SVG out, a row per rank."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from markupsafe import Markup

from parlay.report.svg import MUTED, STYLE, Look, new_figure, to_svg
from parlay.timeline import NAMES, Span, shares, window

STEPS = 4  # drawn: more of them become too thin to read
_HUES = {"forward": 1, "backward": 4, "update": 3, "send": 7, "receive": 6, "wait": 2, "replay": 8}


def timeline(spans: Sequence[Span], salt: str) -> Markup:
    """The last steps, their numbers above them. Work is as tall as its row, messages and waits are half as tall."""
    chosen = window(spans, STEPS)
    ranks = sorted({span.rank for span in chosen})
    with matplotlib.rc_context(STYLE):
        figure = new_figure(900, 46 + 36 * len(ranks))
        axes = figure.add_subplot()
        for row, rank in enumerate(ranks):
            for name in _names(chosen):
                bars = [(1000 * s.begin, 1000 * (s.end - s.begin)) for s in chosen if (s.rank, s.name) == (rank, name)]
                axes.broken_barh(bars, _extent(row, name), facecolors=Look(hue(name), 0).colour, linewidth=0)
            begins = {s.step: s.begin for s in reversed(chosen) if s.rank == rank and s.name == "forward"}
            for step, begin in begins.items():
                axes.text(1000 * begin, 0.4 - row, str(step), fontsize=8, color=MUTED, clip_on=True)
        axes.set_yticks([-row for row in range(len(ranks))], [f"stage {rank}" for rank in ranks])
        axes.set_ylim(-len(ranks) + 0.5, 0.7)
        axes.set_xlim(0, 1000 * max(span.end for span in chosen))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("milliseconds", color=MUTED)
        return to_svg(figure, f"timeline of the last {STEPS} steps, a row per stage", f"timeline {salt}")


def legend(spans: Sequence[Span]) -> list[tuple[Markup, str]]:
    """A patch and a text for every kind of span that the drawing shows, with its share of each rank's time."""
    chosen = window(spans, STEPS)
    found = shares(chosen)
    return [
        (patch(name), f"{name} {', '.join(f'{own.get(name, 0.0):.0%}' for own in found.values())}")
        for name in _names(chosen)
    ]


def _names(spans: Sequence[Span]) -> list[str]:
    """In the order of a step, unknown ones last."""
    there = dict.fromkeys(span.name for span in spans)
    return [name for name in NAMES if name in there] + [name for name in there if name not in NAMES]


def _extent(row: int, name: str) -> tuple[float, float]:
    return (-row - 0.36, 0.3) if name in ("send", "receive", "wait") else (-row - 0.36, 0.72)


def hue(name: str) -> int:
    return _HUES.get(name, 0)


def patch(name: str) -> Markup:
    return Markup(
        '<svg class="swatch" width="14" height="10" viewBox="0 0 14 10" aria-hidden="true">'
        '<rect width="14" height="10" style="fill:var(--c{})"/></svg>'
    ).format(hue(name))
