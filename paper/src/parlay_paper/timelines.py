"""Simulated timelines: what the stages would do when, each on a device of its own, from the times of the stages.

A way of training is a string of letters, one batch each, as in `parlay.schedule`: S is a batch through the whole
network, P one on which all stages train at once. All ways share one clock, so that their lengths can be compared:

    S   stage 0  F1                B1 F2  ...      P   stage 0  F1 B1    F2 B2
        stage 1     F1         B1                      stage 1  F1 B1    F2 B2
        stage 2        F1 B1                           stage 2  F1 B1 .. F2 B2

Replay streams: stage k passes batch t - k on, and trains on the one that an answer has come for, 2(K-1-k) steps old.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes

from parlay.config.schedule import HYBRID, PARALLEL, Schedule
from parlay.report.svg import INK, MUTED, PAPER, STYLE, Look, new_figure, to_svg

FORWARD_SHARE = 1 / 3
"""Of a stage's time, where only the sum is known: a backward pass takes about two forward passes."""
BATCHES = 5
"""Drawn, one for an epoch: alternate:4:1 whole."""
ROW = 17  # pixels of a stage
HUES = {"forward": 1, "backward": 4, "replay": 8, "send": 7}
NAMES = {"forward": "forward", "backward": "backward and update", "replay": "forward again", "send": "messages"}


@final
@dataclass(frozen=True)
class Times:
    """Milliseconds of one batch in every stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """With the update of the weights."""
    messages: tuple[float, ...] = ()
    """To and from the neighbours in a parallel step, where they take time of their own."""
    serial: float | None = None
    """Of a batch through the whole network on one device, where that was measured too."""

    @property
    def stages(self) -> int:
        return len(self.forward)

    def message(self, k: int) -> float:
        return self.messages[k] if self.messages else 0.0

    @property
    def serial_step(self) -> float:
        return self.serial if self.serial is not None else sum(self.forward) + sum(self.backward)

    @property
    def parallel_step(self) -> float:
        return max(self.forward[k] + self.backward[k] + self.message(k) for k in range(self.stages))


class Bar(NamedTuple):
    """What a stage does with a batch, in milliseconds."""

    stage: int
    name: str
    batch: int
    begin: float
    end: float


Way = tuple[str, Sequence[Bar]]
"""What it is called, and what the stages do."""


def of_stages(stage_ms: Sequence[float], serial_ms: float | None = None, message_ms: Sequence[float] = ()) -> Times:
    """From sums of forward and backward."""
    forward = tuple(FORWARD_SHARE * ms for ms in stage_ms)
    backward = tuple((1 - FORWARD_SHARE) * ms for ms in stage_ms)
    return Times(forward, backward, tuple(message_ms), serial_ms)


def letters(schedule: str) -> str:
    """A few batches that stand for the epochs of a schedule: its pattern, without the serial epoch at its start."""
    kind = Schedule.parse(schedule)
    m, n = kind.parallel_epochs, kind.serial_epochs
    if m + n > BATCHES:  # 20:5 is drawn as 4:1
        n = max(1, round(BATCHES * n / (m + n)))
        m = BATCHES - n
    return ("P" * m + "S" * n) or kind.phases(BATCHES + 1)[1:]


def play(times: Times, letters: str) -> list[Bar]:
    """One batch after the other, each by its letter. In a parallel step all wait for the slowest stage."""
    bars: list[Bar] = []
    now = 0.0
    for batch, letter in enumerate(letters, 1):
        bars += (_parallel if letter == PARALLEL else _serial)(times, batch, now)
        now += times.parallel_step if letter == PARALLEL else times.serial_step
    return bars


def replay(times: Times, steps: int) -> list[Bar]:
    """Batches streaming through the stages, from empty queues on; a step takes as long as its slowest stage."""
    bars: list[Bar] = []
    last, now = times.stages - 1, 0.0
    for step in range(steps):
        ends = []
        for k in range(times.stages):
            forth, back, at = step - k, step - k - 2 * (last - k), now
            if forth >= 0 and k < last:
                bars.append(Bar(k, "forward", forth + 1, at, at := at + times.forward[k]))
            if back >= 0:  # the last stage has its own loss: it passes nothing on, and goes there and back once
                bars.append(Bar(k, "forward" if k == last else "replay", back + 1, at, at := at + times.forward[k]))
                bars.append(Bar(k, "backward", back + 1, at, at := at + times.backward[k]))
            ends.append(at)
        now = max(ends)
    return bars


def length(bars: Sequence[Bar]) -> float:
    return max((bar.end for bar in bars), default=0.0)


def ways(times: Times, schedule: str) -> list[Way]:
    """Serial, layer-parallel and hybrid, with as many batches each; where `schedule` is no hybrid, alternate:4:1."""
    hybrid = schedule if schedule.split(":")[0] in HYBRID[:2] else "alternate:4:1"
    pattern = letters(hybrid)
    named = {"serial": "S" * len(pattern), "layer-parallel": "P" * len(pattern), f"hybrid, {hybrid}": pattern}
    bars = {name: play(times, ways) for name, ways in named.items()}
    longest = length(bars["serial"])
    return [(f"{name}: {_speed(longest / length(own))}", own) for name, own in bars.items()]


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


def legend(rows: Sequence[Way]) -> list[tuple[int, str]]:
    """The hue and the name of every kind of bar."""
    there = {bar.name for _, bars in rows for bar in bars}
    return [(HUES[name], text) for name, text in NAMES.items() if name in there]


def _serial(times: Times, batch: int, now: float) -> Iterator[Bar]:
    scale = times.serial_step / (sum(times.forward) + sum(times.backward))
    for k in range(times.stages):
        yield Bar(k, "forward", batch, now, now := now + scale * times.forward[k])
    for k in reversed(range(times.stages)):
        yield Bar(k, "backward", batch, now, now := now + scale * times.backward[k])


def _parallel(times: Times, batch: int, now: float) -> Iterator[Bar]:
    for k in range(times.stages):
        at = now
        yield Bar(k, "forward", batch, at, at := at + times.forward[k])
        yield Bar(k, "backward", batch, at, at := at + times.backward[k])
        if times.message(k) > 0:
            yield Bar(k, "send", batch, at, at + times.message(k))


def _bars(axes: Axes, bars: Sequence[Bar], stages: int, longest: float) -> None:
    for bar in bars:
        spans = [(bar.begin, bar.end - bar.begin)]
        axes.broken_barh(spans, (-bar.stage - 0.42, 0.84), facecolors=Look(HUES[bar.name], 0).colour, linewidth=0)
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
