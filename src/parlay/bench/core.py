"""The frame of a benchmark: systems that can be timed, rounds that time them in turn, rows that say what was seen.

In: anything that is a `Timed`. Out: `Row`s, one JSON object, a table and plain sentences. No torch in this module.

Machines have slow moments, and a ratio of two times that were taken minutes apart measures those too. So every round
times every system once, a ratio is taken inside its round, and the median over the rounds is told with its quartiles.

A speed-up is one of the same work: serial training's time per sample trained over that of the system. In the red-black
order a stage trains on half of the samples of a step, so that its ratio of step times is twice as large.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parlay.errors import InputError

SERIAL = "serial"
"""The system that all others are held against."""
LAYER_PARALLEL = "layer-parallel"
DATA_PARALLEL = "data-parallel"
MARGIN = 0.02  # of a ratio: two systems closer than this count as equal

Say = Callable[[str], None]


class Timed(ABC):
    """One system on one problem. Nothing of it may run while another one is timed."""

    system: str
    stages: int
    note: str = ""
    """What a reader must know of this system, in a few words: `M = 4`, `2 threads`."""
    baseline: bool = False
    """Is it one of those of which the fastest is what all are held against? The system `serial` always is."""
    samples: float | None = None
    """Samples of a step that each block is trained on, read after the last round; None: the whole batch."""

    @abstractmethod
    def time(self, steps: int) -> float:
        """Seconds of this many steps; the first call warms up on its own, outside of the clock."""

    def extra(self) -> dict[str, Any]:
        """Further numbers for its row, asked for once, after the last round: memory, waits."""
        return {}

    def close(self) -> None:
        """Give back what it holds: processes, memory. Called once, also after a failure."""
        return


@dataclass(frozen=True)
class Problem:
    """What all rows of a table have in common."""

    model: str
    batch_size: int


@dataclass(frozen=True)
class Row:
    """One system: medians over the rounds, quartiles as `low` and `high`. Ratios are taken round by round."""

    system: str
    stages: int
    model: str
    batch_size: int
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    speedup: float | None
    """By time per sample trained, over the fastest baseline: the row `serial` where there is only one, None without."""
    speedup_low: float | None
    speedup_high: float | None
    note: str = ""
    seconds: tuple[float, ...] = ()
    """Of a step, round by round."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    samples: float | None = None
    """Samples of a step that each block is trained on; None: the whole batch."""

    @property
    def samples_per_step(self) -> float:
        return self.batch_size if self.samples is None else self.samples

    @property
    def share(self) -> float:
        """Of the batch, the part that each block is trained on."""
        return self.samples_per_step / self.batch_size

    @property
    def sample_us(self) -> float:
        """Microseconds per sample trained."""
        return 1000 * self.step_ms / self.samples_per_step

    def per_step(self, speedup: float | None) -> float | None:
        """The same speed-up as a ratio of step times. It is of less work where the share is below 1."""
        return None if speedup is None else speedup / self.share

    def json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _NAMES}
        work = {"samples_per_step": self.samples_per_step, "sample_us": self.sample_us}
        ratio = {"speedup_per_step": self.per_step(self.speedup)}
        return {**own, **work, **ratio, "round_ms": [1000 * value for value in self.seconds], **self.extra}


_NAMES = (
    *("system", "stages", "model", "batch_size", "step_ms", "step_ms_low", "step_ms_high"),
    *("speedup", "speedup_low", "speedup_high", "note"),
)


def interleaved(systems: Sequence[Timed], problem: Problem, rounds: int, steps: int, say: Say) -> list[Row]:
    """Every round times every system once, each round beginning with another one. One row per system, in their order.

    A first round, not counted, warms all of them up.
    """
    if rounds < 1 or steps < 1:
        raise InputError(f"{rounds} rounds of {steps} steps measure nothing: write at least 1 of each")
    if not systems:
        raise InputError("there is nothing to time: name at least one system")
    seconds: list[list[float]] = [[] for _ in systems]
    for system in systems:
        say(f"warming up {_label(system)}")
        system.time(1)
    for turn in range(rounds):
        for i in _rotated(len(systems), turn):
            say(f"round {turn + 1} of {rounds}: {_label(systems[i])}")
            seconds[i].append(systems[i].time(steps) / steps)
    bases = [t for s, t in zip(systems, seconds, strict=True) if s.baseline or s.system == SERIAL]
    base = min(bases, key=statistics.median, default=None)
    return [_row(system, problem, times, base) for system, times in zip(systems, seconds, strict=True)]


def baseline(rows: Sequence[Row]) -> Row | None:
    """The row that all speed-ups are over: its own is 1 in every round."""
    return next((row for row in rows if row.speedup_low == row.speedup == row.speedup_high == 1), None)


def best(rows: Sequence[Row]) -> list[Row]:
    """Of several rows of one system and problem (a pipeline at several M) the fastest, which names the others."""
    found: list[Row] = []
    for row in rows:
        same = [other for other in rows if _key(other) == _key(row)]
        if row is not same[0]:
            continue
        winner = min(same, key=lambda other: other.step_ms)
        tried = {other.note: other.step_ms for other in same}
        found.append(_with_extra(winner, {"tried_step_ms": tried}) if len(same) > 1 else winner)
    return found


def as_json(rows: Sequence[Row], environment: Mapping[str, Any], command: str, **more: Any) -> dict[str, Any]:
    """The object of `parlay bench --json`."""
    base = baseline(rows)
    return {
        "rows": [row.json() for row in rows],
        "baseline": base.system if base is not None else None,
        "speedup_of": "time per sample trained",
        "says": sentences(rows),
        **more,
        "environment": dict(environment),
        "command": command,
    }


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the numbers say against layer-parallel training, plainly, and which of them are of less work per step."""
    told = []
    for problem in dict.fromkeys((row.model, row.batch_size) for row in rows):
        here = [row for row in rows if (row.model, row.batch_size) == problem]
        ours = [row for row in here if row.system == LAYER_PARALLEL]
        where = f"{problem[0]}, batch {problem[1]}"
        less = [row for row in here if row.share < 1]
        if less:
            names = ", ".join(dict.fromkeys(row.system for row in less))
            told.append(
                f"{where}: each stage trains on {less[0].samples_per_step:g} of {problem[1]} samples in a step "
                f"({names}). Speed-ups are by time per sample trained."
            )
        told += [sentence for row in ours for sentence in _against(row, here, where)]
    return told


def _against(ours: Row, here: Sequence[Row], where: str) -> list[str]:
    told = []
    for other in here:
        ratio = _ratio(other, ours)
        if other.system == SERIAL and ratio < 1 - MARGIN:
            told.append(
                f"{where}: layer-parallel on {ours.stages} stages is slower than serial training "
                f"({ratio:.2f} times its speed). Train serially here."
            )
        elif other.system == DATA_PARALLEL and ratio < 1 - MARGIN:
            told.append(
                f"{where}: data-parallel is {1 / ratio:.2f} times as fast as layer-parallel on {ours.stages} devices. "
                "Take data-parallel training (DDP) here."
            )
        elif other.system not in (SERIAL, DATA_PARALLEL) and _is_baseline(other) and ratio < 1 - MARGIN:
            told.append(f"{where}: {other.system} is {1 / ratio:.2f} times as fast as layer-parallel.")
    return told


def _is_baseline(row: Row) -> bool:
    """Not a variant of layer-parallel training itself, nor a bound of it."""
    return row.system.startswith(("serial", "pipeline", "data-parallel"))


def _ratio(other: Row, ours: Row) -> float:
    """How many times as fast as the other we are, per sample trained: round by round where both have them."""
    work = ours.share / other.share
    if len(other.seconds) == len(ours.seconds) and ours.seconds:
        return work * statistics.median(a / b for a, b in zip(other.seconds, ours.seconds, strict=True))
    return work * other.step_ms / ours.step_ms


def _row(system: Timed, problem: Problem, times: Sequence[float], base: Sequence[float] | None) -> Row:
    low, middle, high = quartiles(times)
    share = 1.0 if system.samples is None else system.samples / problem.batch_size
    ratios = [share * b / t for b, t in zip(base, times, strict=True)] if base is not None else []
    slow, usual, fast = quartiles(ratios) if ratios else (None, None, None)
    return Row(
        system=system.system,
        stages=system.stages,
        model=problem.model,
        batch_size=problem.batch_size,
        step_ms=1000 * middle,
        step_ms_low=1000 * low,
        step_ms_high=1000 * high,
        speedup=usual,
        speedup_low=slow,
        speedup_high=fast,
        note=system.note,
        seconds=tuple(times),
        extra=system.extra(),
        samples=system.samples,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value, that value three times."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _with_extra(row: Row, more: Mapping[str, Any]) -> Row:
    return replace(row, extra={**row.extra, **more})


def _key(row: Row) -> tuple[str, int, str, int]:
    return row.system, row.stages, row.model, row.batch_size


def _label(system: Timed) -> str:
    return f"{system.system} ({system.note})" if system.note else system.system


def _rotated(count: int, turn: int) -> list[int]:
    return [(i + turn) % count for i in range(count)]
