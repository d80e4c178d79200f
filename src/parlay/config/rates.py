"""Learning rates over a training run, as a share of the initial one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parlay.config.keys import said
from parlay.errors import InputError

KINDS = ("cosine", "step", "constant", "hold")


@dataclass(frozen=True)
class Rate:
    """`cosine` to zero; `step`: a tenth after each quarter (the paper's); `constant`; `hold`: held until a serial tail
    begins, over which it is a cosine (over all epochs where there is none). All with a linear warm-up.

    `hold:0.3` holds three tenths of the rate, and the tail begins with all of it: gradients that are an epoch old want
    smaller steps.
    """

    kind: str = "cosine"
    warmup: float = 0.0
    """Epochs over which the rate rises from zero."""

    def __post_init__(self) -> None:
        (name, colon, share), kind = self.kind.partition(":"), said(self.kind)
        if name not in KINDS or (colon and name != "hold"):
            raise InputError(f"unknown learning-rate schedule '{kind}': write one of {', '.join(KINDS)}")
        if colon and not (_is_number(share) and 0 < float(share) <= 1):
            raise InputError(f"learning-rate schedule '{kind}': write a share above 0 and up to 1, as in hold:0.3")
        if self.warmup < 0:
            raise InputError(f"warmup is {self.warmup}: write a number of epochs of at least 0")

    def at(self, epoch: float, epochs: int, tail: int = 0) -> float:
        """The share at a moment of training, in epochs and fractions of one; the last `tail` ones are a serial tail."""
        progress, (name, _, share) = epoch / epochs, self.kind.partition(":")
        shape = {
            "cosine": lambda: _cosine(progress),
            "step": lambda: 0.1 ** min(int(4 * progress), 3),
            "constant": lambda: 1.0,
            "hold": lambda: _held(epoch, epochs, tail, float(share or 1)),
        }[name]()
        rise = min(1.0, epoch / self.warmup) if self.warmup > 0 else 1.0
        return shape * rise


def _held(epoch: float, epochs: int, tail: int, share: float) -> float:
    if not tail:
        return _cosine(epoch / epochs)
    return share if epoch < epochs - tail else _cosine((epoch - epochs + tail) / tail)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
