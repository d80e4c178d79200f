"""What the stages would do when, each on a device of its own: bars from the times of the stages, nothing measured here.

A way of training is a string of letters, one batch each, as in `config/schedule.py`: S is a batch through the whole
network, P one on which all stages train at once. Drawn on the same clock, so that the lengths can be compared:

    S   stage 0  F1                B1 F2  ...      P   stage 0  F1 B1    F2 B2
        stage 1     F1         B1                      stage 1  F1 B1    F2 B2
        stage 2        F1 B1                           stage 2  F1 B1 .. F2 B2

Replay streams: stage k passes batch t - k on, and trains on the one that an answer has come for, 2(K-1-k) steps old.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parlay.config.schedule import PARALLEL, Schedule
from parlay.timeline import Span

FORWARD_SHARE = 1 / 3
"""Of a stage's time, where only the sum is known: a backward pass takes about two forward passes."""

BATCHES = 5
"""Drawn, one for an epoch: alternate:4:1 whole."""


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


def of_stages(stage_ms: Sequence[float], serial_ms: float | None = None, message_ms: Sequence[float] = ()) -> Times:
    """From sums of forward and backward."""
    forward = tuple(FORWARD_SHARE * ms for ms in stage_ms)
    backward = tuple((1 - FORWARD_SHARE) * ms for ms in stage_ms)
    return Times(forward, backward, tuple(message_ms), serial_ms)


def of_spans(spans: Sequence[Span]) -> Times | None:
    """From the timeline of a run: medians over its parallel steps of what every rank did itself. None without any.

    A serial step over several processes is a pipeline, whose passes there and back are one span.
    """
    parallel = {(span.rank, span.step) for span in spans if span.name == "backward"}
    sums: dict[tuple[int, str, int], float] = {}
    for span in (span for span in spans if (span.rank, span.step) in parallel):
        key = span.rank, "backward" if span.name == "update" else span.name, span.step
        sums[key] = sums.get(key, 0.0) + 1000 * (span.end - span.begin)

    def median(rank: int, name: str) -> float:
        return statistics.median([ms for (r, n, _), ms in sums.items() if (r, n) == (rank, name)] or [0.0])

    ranks = sorted({span.rank for span in spans})
    forward, backward = (tuple(median(rank, name) for rank in ranks) for name in ("forward", "backward"))
    return Times(forward, backward) if ranks and all(forward) and all(backward) else None


def letters(schedule: str) -> str:
    """A few batches that stand for the epochs of a schedule: its pattern, without the serial epoch at its start."""
    kind = Schedule.parse(schedule)
    m, n = kind.parallel_epochs, kind.serial_epochs
    if m + n > BATCHES:  # 20:5 is drawn as 4:1
        n = max(1, round(BATCHES * n / (m + n)))
        m = BATCHES - n
    return ("P" * m + "S" * n) or kind.phases(BATCHES + 1)[1:]


def play(times: Times, ways: str) -> list[Bar]:
    """One batch after the other, each by its letter. In a parallel step all wait for the slowest stage."""
    bars: list[Bar] = []
    now = 0.0
    for batch, letter in enumerate(ways, 1):
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
