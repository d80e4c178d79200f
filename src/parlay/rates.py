"""Learning rates over a training run, as a share of the initial one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parlay.errors import InputError

KINDS = ("cosine", "step", "constant")


@dataclass(frozen=True)
class Rate:
    """`cosine` to zero; `step`: a tenth after each quarter (the paper's); `constant`. All with a linear warm-up."""

    kind: str = "cosine"
    warmup: float = 0.0
    """Epochs over which the rate rises from zero."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown learning-rate schedule '{self.kind}': write one of {', '.join(KINDS)}")
        if self.warmup < 0:
            raise InputError(f"warmup is {self.warmup}: write a number of epochs of at least 0")

    def at(self, epoch: float, epochs: int) -> float:
        """The share at a moment of training, in epochs and fractions of one."""
        progress = epoch / epochs
        shape = {
            "cosine": lambda: 0.5 * (1 + math.cos(math.pi * progress)),
            "step": lambda: 0.1 ** min(int(4 * progress), 3),
            "constant": lambda: 1.0,
        }[self.kind]()
        rise = min(1.0, epoch / self.warmup) if self.warmup > 0 else 1.0
        return shape * rise
