"""Learning rates over a training run, as a share of the initial one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parlay.errors import InputError

KINDS = ("cosine", "step", "constant", "hold")


@dataclass(frozen=True)
class Rate:
    """`cosine` to zero; `step`: a tenth after each quarter (the paper's); `constant`; `hold`: held until a serial tail
    begins, over which it is a cosine (over all epochs where there is none). All with a linear warm-up.
    """

    kind: str = "cosine"
    warmup: float = 0.0
    """Epochs over which the rate rises from zero."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown learning-rate schedule '{self.kind}': write one of {', '.join(KINDS)}")
        if self.warmup < 0:
            raise InputError(f"warmup is {self.warmup}: write a number of epochs of at least 0")

    def at(self, epoch: float, epochs: int, tail: int = 0) -> float:
        """The share at a moment of training, in epochs and fractions of one; the last `tail` ones are a serial tail."""
        progress = epoch / epochs
        shape = {
            "cosine": lambda: _cosine(progress),
            "step": lambda: 0.1 ** min(int(4 * progress), 3),
            "constant": lambda: 1.0,
            "hold": lambda: _cosine(max(0.0, epoch - epochs + tail) / tail if tail else progress),
        }[self.kind]()
        rise = min(1.0, epoch / self.warmup) if self.warmup > 0 else 1.0
        return shape * rise


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
