"""A forecast of `parlay plan --json`: what its stages take, as the page shows it. Nothing in it was trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from parlay.config.schedule import PARALLEL
from parlay.report.simulate import Times, of_stages

GIB = 1 << 30


@dataclass(frozen=True)
class Forecast:
    dataset: str
    model: str
    device: str
    batch_size: int
    cuts: tuple[int, ...]
    auxiliary_gib: float
    speedup_parallel: float
    speedup: float
    phases: str
    times: Times
    """Of a whole batch: of two steps where a stage trains on half of it in one."""
    share: float = 1.0
    """Of the samples of a step, the part that a stage trains on."""

    @property
    def title(self) -> str:
        return f"{self.model} cut into {self.times.stages} stages, batch {self.batch_size}, {self.device}"

    @property
    def speeds(self) -> str:
        """In words, and what a bar of the timeline is."""
        told = (
            f"Projected speed-up over serial training, by time per sample trained: {self.speedup_parallel:.2f} in a "
            f"parallel epoch, {self.speedup:.2f} over the whole schedule"
        )
        if self.share == 1:
            return told
        return f"{told}; bars are of the {1 / self.share:g} steps in which a stage trains on a whole batch"

    @property
    def schedule(self) -> str:
        """One of the same share of serial epochs, in fives; the first epoch, which always is serial, aside."""
        parallel = self.phases[1:].count(PARALLEL)
        m = round(5 * parallel / max(len(self.phases) - 1, 1))
        return "parallel" if m == 5 else "serial" if m == 0 else f"alternate:{m}:{5 - m}"

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Forecast:
        stage_ms = [_positive("stage_ms", ms) for ms in content["stage_ms"]]
        if not stage_ms:
            raise ValueError("stage_ms")
        messages: list[float] = []
        if content.get("link_gib_per_second"):
            rate = GIB * _positive("link_gib_per_second", content["link_gib_per_second"]) / 1000
            messages = [(a + b) / rate for a, b in pairwise([0, *map(float, content["exchange_bytes"]), 0])]
        if len(messages) not in (0, len(stage_ms)):
            raise ValueError("exchange_bytes")
        share = _positive("samples_per_step", content.get("samples_per_step", content["batch_size"]))
        share /= _positive("batch_size", content["batch_size"])
        return cls(
            dataset=str(content["dataset"]),
            model=str(content["model"]),
            device=str(content["device"]),
            batch_size=int(content["batch_size"]),
            cuts=tuple(map(int, content["cuts"])),
            auxiliary_gib=float(content["auxiliary_gib"]),
            speedup_parallel=_positive("speedup_parallel_epoch", content["speedup_parallel_epoch"]),
            speedup=_positive("speedup", content["speedup"]),
            phases=str(content["phases"]),
            times=of_stages(
                [ms / share for ms in stage_ms],
                _positive("serial_ms", content["serial_ms"]),
                [ms / share for ms in messages],
            ),
            share=share,
        )


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(name)
    return float(value)
