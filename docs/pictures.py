"""The pictures of the documentation, drawn by the code of the report: `python docs/pictures.py`, into docs/pictures/.

Nothing in them was measured. The timelines are simulated from stage times of one unit forward and two backward.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from parlay.report.svg import INK, MUTED, PAPER, RULE, STYLE, Look, new_figure, standalone, to_svg
from parlay_paper.timelines import Times, draw, play, replay

FOLDER = Path(__file__).parent / "pictures"
FORWARD, BACKWARD, STATE, MULTIPLIER, STAGE = (Look(hue, 0).colour for hue in (1, 4, 2, 6, 0))
K = 3


def network() -> str:
    """The network as it was, and cut: what crosses a cut is a stored state, not an output."""
    figure, axes = _sheet(900, 330, (0, 90), (0, 33))
    for block in range(9):
        _box(axes, 9 + 8 * block, 26, 6, 4, STAGE, "")
        if block:
            _arrow(axes, (7 + 8 * block, 28), (9 + 8 * block, 28), MUTED)
    _arrow(axes, (5, 28), (9, 28), MUTED)
    _arrow(axes, (79, 28), (83, 28), MUTED)
    _text(axes, 4, 28, "images", ha="right")
    _text(axes, 83.5, 28, "loss φ", ha="left")
    _text(axes, 9, 31.4, "the network: every block waits for the one before, and for the loss to come back", ha="left")
    for cut in (32, 56):
        axes.plot([cut, cut], [24.6, 30.4], color=STATE, linewidth=1.2, dashes=(4, 3))
    _text(
        axes, 9, 21.6, "cut into K = 3 stages: each takes its input from a store and has a loss of its own", ha="left"
    )
    for k in range(K):
        left = 9 + 27 * k
        _box(axes, left, 12.5, 17, 6, STAGE, f"stage {k}: f{_n(k)}", INK)
        if k == 0:
            _text(axes, 4, 15.5, "images", ha="right")
            _arrow(axes, (5, 15.5), (left, 15.5), MUTED)
        else:
            _store(axes, left - 4.5, 3.2, k)
            _arrow(axes, (left + 0.4, 8.2), (left + 3.4, 12.4), STATE)
        if k < K - 1:
            _arrow(axes, (left + 14, 12.4), (left + 22.2, 6.2), FORWARD)
            _text(axes, left + 18.6, 10.4, f"output x{_n(k)}", ha="left", colour=FORWARD)
            _text(
                axes,
                left + 13,
                1.2,
                f"b ‖λ{_n(k + 1)} − x{_n(k)}‖² − ⟨κ{_n(k + 1)}, λ{_n(k + 1)} − x{_n(k)}⟩",
                ha="left",
                size=10,
            )
        else:
            _arrow(axes, (left + 17, 15.5), (left + 20, 15.5), MUTED)
            _text(axes, left + 20.5, 15.5, "φ", ha="left")
    return standalone(to_svg(figure, "a network of nine blocks, whole and cut into three stages", "docs network"))


def step() -> str:
    """One parallel step: all stages at once, then all interfaces."""
    figure, axes = _sheet(900, 400, (0, 90), (0, 40))
    _text(axes, 0.5, 38.4, "1. every stage at once, on its states of the batch", ha="left")
    _text(axes, 63, 38.4, "2. every interface", ha="left")
    axes.plot([61, 61], [1, 37], color=RULE, linewidth=1)
    for k in range(K):
        y = 28.5 - 13 * k
        _box(axes, 0.5, y, 9, 5, STATE if k else STAGE, f"λ{_n(k)}" if k else "images", INK)
        _box(axes, 13, y, 12, 5, FORWARD, f"forward f{_n(k)}")
        own = "φ, the network's loss" if k == K - 1 else f"b‖λ{_n(k + 1)}−x{_n(k)}‖² + ⟨κ{_n(k + 1)}, x{_n(k)}⟩"
        _text(axes, 34.6, y + 2.5, own, size=10.5)
        _box(axes, 44, y, 14, 5, BACKWARD, "backward, update")
        _arrow(axes, (9.5, y + 2.5), (13, y + 2.5), MUTED)
        _arrow(axes, (25, y + 2.5), (26.5, y + 2.5), MUTED)
        _arrow(axes, (42.6, y + 2.5), (44, y + 2.5), MUTED)
    for k in range(1, K):
        y = 35 - 13 * k
        _box(axes, 65, y - 2.4, 24, 8, PAPER, "", edge=STATE)
        _text(axes, 77, y + 3.6, f"κ{_n(k)} ← κ{_n(k)} + a (p{_n(k)} − κ{_n(k)})", colour=MULTIPLIER)
        _text(axes, 77, y - 0.2, f"λ{_n(k)} ← x{_n(k - 1)} − (p{_n(k)} − κ{_n(k)}) / 2b", colour=STATE)
        axes.plot([19, 19, 63], [y + 6.4, y + 4.2, y + 4.2], color=FORWARD, linewidth=1.2)
        _arrow(axes, (63, y + 4.2), (65, y + 4.2), FORWARD)
        _text(axes, 20, y + 2.7, f"output x{_n(k - 1)}", ha="left", size=10, colour=FORWARD)
        axes.plot([51, 51, 63], [y - 1.6, y + 0.6, y + 0.6], color=BACKWARD, linewidth=1.2)
        _arrow(axes, (63, y + 0.6), (65, y + 0.6), BACKWARD)
        _text(axes, 50, y - 0.6, f"adjoint p{_n(k)}", ha="right", size=10, colour=BACKWARD)
    return standalone(to_svg(figure, "one parallel step of three stages and two interfaces", "docs step"))


def waiting() -> str:
    """The picture of the README: who works when, in as much time."""
    times = Times((1.0,) * K, (2.0,) * K)
    rows = [
        ("serial training: one stage works, the others wait", play(times, "SS")),
        ("layers in parallel: every stage works all the time", play(times, "P" * 2 * K)),
    ]
    return standalone(
        draw(rows, K, "docs waiting", "time (simulated). Blue: forward, violet: backward; numbers are batches")
    )


def timeline() -> str:
    """Serial, layer-parallel, hybrid and replay on one clock, for stages of equal length."""
    times = Times((1.0,) * K, (2.0,) * K)
    rows = [
        ("serial: one batch after the other, there and back", play(times, "SSSSS")),
        ("layer-parallel: all stages at once, each on its states of the batch", play(times, "PPPPP")),
        ("hybrid, alternate:4:1: the last of five batches (epochs) is serial", play(times, "PPPPS")),
        ("replay, from empty queues: batches stream, answers come 2(K−1−k) steps later", replay(times, 9)),
    ]
    return standalone(draw(rows, K, "docs", "forward passes of a stage (simulated)"))


def _sheet(width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = new_figure(width, height, None)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.set_axis_off()
    return figure, axes


def _box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    text: str,
    ink: str = PAPER,
    edge: str = "",
) -> None:
    light = ink == INK  # dark letters on a tint of the colour, light ones on the colour itself
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge or colour, alpha=0.35 if light else 1.0)
    )
    if text:
        _text(axes, x + width / 2, y + height / 2, text, colour=ink)


def _store(axes: Axes, x: float, y: float, k: int) -> None:
    """States and multipliers of all samples, as sheets behind each other."""
    for n in range(4):
        axes.add_patch(Rectangle((x + 0.6 * n, y + 0.5 * n), 5.5, 3.4, facecolor=PAPER, edgecolor=STATE, linewidth=1.2))
    _text(axes, x + 4.5, y + 3.2, f"λ{_n(k)}, κ{_n(k)}", size=10.5)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, shrinkA=0, shrinkB=0))


def _n(k: int) -> str:
    """As an index."""
    return "₀₁₂"[k]


def _text(axes: Axes, x: float, y: float, text: str, ha: str = "center", size: float = 11.5, colour: str = INK) -> None:
    axes.text(x, y, text, ha=ha, va="center", fontsize=size, color=colour)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for picture in (network, step, waiting, timeline):
            (FOLDER / f"{picture.__name__}.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
