"""The frame of a benchmark: systems that are timed in turn, and what was seen of each. No torch in this module.

Machines have slow moments, and a ratio of two times that were taken minutes apart measures those too. So every round
times every system once, a ratio is taken inside its round, and the median over the rounds is given with its quartiles.

A speed-up is one of the same work: serial training's time per sample trained over that of the system. In the red-black
order a stage trains on half of the samples of a step, so that its ratio of step times is twice as large.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

SERIAL, LAYER_PARALLEL, DATA_PARALLEL = "serial", "layer-parallel", "data-parallel"
MARGIN = 0.02  # of a ratio: two systems closer than this count as equal

Say = Callable[[str], None]


class System(ABC):
    """One way to train, on one problem. Nothing of it may run while another one is timed."""

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

    @property
    def label(self) -> str:
        return f"{self.system} ({self.note})" if self.note else self.system


class Problem(NamedTuple):
    """What all rows of a table have in common."""

    model: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch_size}"


@dataclass(frozen=True)
class Result:
    """What was seen of one system."""

    system: str
    stages: int
    problem: Problem
    seconds: tuple[float, ...]
    """Of a step, round by round."""
    speedups: tuple[float, ...] = ()
    """By time per sample trained, over the fastest baseline, round by round; none where there is no baseline."""
    note: str = ""
    samples: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    @property
    def speedup(self) -> float | None:
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def samples_per_step(self) -> float:
        return self.problem.batch_size if self.samples is None else self.samples

    @property
    def share(self) -> float:
        """Of the batch, the part that each block is trained on."""
        return self.samples_per_step / self.problem.batch_size

    @property
    def sample_us(self) -> float:
        """Microseconds per sample trained."""
        return 1000 * self.step_ms / self.samples_per_step

    @property
    def speedup_per_step(self) -> float | None:
        """The same speed-up as a ratio of step times. It is of less work where the share is below 1."""
        return self.speedup / self.share if self.speedup is not None else None

    def json(self) -> dict[str, Any]:
        low, _, high = quartiles(self.seconds)
        slow, _, fast = quartiles(self.speedups) if self.speedups else (None, None, None)
        return {
            "system": self.system,
            "stages": self.stages,
            **self.problem._asdict(),
            "step_ms": self.step_ms,
            "step_ms_low": 1000 * low,
            "step_ms_high": 1000 * high,
            "speedup": self.speedup,
            "speedup_low": slow,
            "speedup_high": fast,
            "note": self.note,
            "samples_per_step": self.samples_per_step,
            "sample_us": self.sample_us,
            "speedup_per_step": self.speedup_per_step,
            "round_ms": [1000 * value for value in self.seconds],
            **self.extra,
        }


def interleaved(systems: Sequence[System], problem: Problem, rounds: int, steps: int, say: Say) -> list[Result]:
    """Every round times every system once, each round beginning with another one. One result per system, in order.

    A first round, not counted, warms all of them up.
    """
    for system in systems:
        say(f"warming up {system.label}")
        system.time(1)
    seconds: list[list[float]] = [[] for _ in systems]
    for turn in range(rounds):
        for n in range(len(systems)):
            i = (n + turn) % len(systems)
            say(f"round {turn + 1} of {rounds}: {systems[i].label}")
            seconds[i].append(systems[i].time(steps) / steps)
    bases = [times for s, times in zip(systems, seconds, strict=True) if s.baseline or s.system == SERIAL]
    base = min(bases, key=statistics.median, default=[])
    return [_result(system, problem, times, base) for system, times in zip(systems, seconds, strict=True)]


def _result(system: System, problem: Problem, times: Sequence[float], base: Sequence[float]) -> Result:
    share = 1.0 if system.samples is None else system.samples / problem.batch_size
    ratios = tuple(share * b / t for b, t in zip(base, times, strict=False))
    about = system.note, system.samples, system.extra()
    return Result(system.system, system.stages, problem, tuple(times), ratios, *about)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value, that value three times."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, middle, high


def baseline(results: Sequence[Result]) -> Result | None:
    """The one that all speed-ups are over: its own is 1 in every round."""
    return next((one for one in results if set(one.speedups) == {1.0}), None)


def best(results: Sequence[Result]) -> list[Result]:
    """Of several of one system and problem (a pipeline at several M) the fastest, which names the others."""
    groups: dict[tuple[str, int, Problem], list[Result]] = {}
    for one in results:
        groups.setdefault((one.system, one.stages, one.problem), []).append(one)
    return [_fastest(group) if len(group) > 1 else group[0] for group in groups.values()]


def _fastest(group: Sequence[Result]) -> Result:
    found = min(group, key=lambda one: one.step_ms)
    return replace(found, extra={**found.extra, "tried_step_ms": {one.note: one.step_ms for one in group}})


def as_json(results: Sequence[Result], environment: Mapping[str, Any], command: str, **more: Any) -> dict[str, Any]:
    """The object of `parlay bench --json`."""
    base = baseline(results)
    return {
        "rows": [one.json() for one in results],
        "baseline": base.system if base is not None else None,
        "speedup_of": "time per sample trained",
        "says": sentences(results),
        **more,
        "environment": dict(environment),
        "command": command,
    }


def sentences(results: Sequence[Result]) -> list[str]:
    """What the numbers say against layer-parallel training, plainly, and which of them are of less work per step."""
    found = []
    for problem in dict.fromkeys(one.problem for one in results):
        here = [one for one in results if one.problem == problem]
        less = [one for one in here if one.share < 1]
        if less:
            found.append(
                f"{problem}: each stage trains on {less[0].samples_per_step:g} of {problem.batch_size} samples in a "
                f"step ({', '.join(dict.fromkeys(one.system for one in less))}). "
                "Speed-ups are by time per sample trained."
            )
        for ours in (one for one in here if one.system == LAYER_PARALLEL):
            for other in here:
                ratio = _ratio(other, ours)
                if ratio < 1 - MARGIN and other.system.startswith((SERIAL, "pipeline", DATA_PARALLEL)):
                    found.append(f"{problem}: {_against(other.system, ours.stages, ratio)}")
    return found


def _against(other: str, stages: int, ratio: float) -> str:
    if other == SERIAL:
        slower = f"layer-parallel on {stages} stages is slower than serial training"
        return f"{slower} ({ratio:.2f} times its speed). Train serially here."
    faster = f"{other} is {1 / ratio:.2f} times as fast as layer-parallel"
    if other == DATA_PARALLEL:
        return f"{faster} on {stages} devices. Take data-parallel training (DDP) here."
    return f"{faster}."


def _ratio(other: Result, ours: Result) -> float:
    """How many times as fast as the other we are, per sample trained: round by round."""
    pairs = zip(other.seconds, ours.seconds, strict=True)
    return ours.share / other.share * statistics.median(a / b for a, b in pairs)
