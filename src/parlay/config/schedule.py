"""When the stages train in parallel and when the network trains serially: phases as data.

A schedule prints and parses (`alternate:4:1`), and `phases` turns it into one letter per epoch, P or S.
The engine, the forecast and the drawings all read these letters. Those of the `adaptive` schedule that are still to
come are what is expected; after every parallel epoch `adapted` writes them anew.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from parlay.config.keys import said
from parlay.errors import InputError

PARALLEL, SERIAL = "P", "S"
KINDS = ("parallel", "serial", "alternate", "tail", "adaptive")
HYBRID = ("alternate", "tail", "adaptive")

LOSS_RATIO = 1.5
"""Of the whole network's training loss after a parallel epoch to the last stage's own loss during it, at most.

Stages may each do well and not fit together: the last one then learns its states by heart, which are no longer what
the others put out. Healthy runs stay below, the joint penalty is far above (results/resnet20).
"""
COSINE = 0.1
"""Of the parallel and the true gradient, at least: below it a step hardly points downhill (results/adaptive)."""


@dataclass(frozen=True)
class Schedule:
    """A sequence of phases; `parallel_epochs` and `serial_epochs` are the m and n of the hybrid kinds."""

    kind: str
    parallel_epochs: int = 0
    serial_epochs: int = 0
    threshold: float = COSINE
    """Of the adaptive kind: the least healthy cosine of the angle between the parallel and the true gradient."""

    @classmethod
    def parse(cls, text: str) -> Schedule:
        kind, *numbers = text.split(":")
        if kind not in KINDS:
            near = difflib.get_close_matches(kind[:100], KINDS, 1, 0.0)[0]
            raise InputError(f"unknown schedule '{said(text)}': write {_form(near)}")
        if kind == "adaptive":
            return cls(kind, threshold=_threshold(text, numbers))
        if len(numbers) != (2 if kind in ("alternate", "tail") else 0):
            raise InputError(f"schedule '{said(text)}' is incomplete or too long: write {_form(kind)}")
        if not all(re.fullmatch("[0-9]{1,6}", n) and int(n) > 0 for n in numbers):
            raise InputError(f"schedule '{said(text)}' needs two whole numbers from 1 to 999999: write {_form(kind)}")
        return cls(kind, *map(int, numbers))

    def __str__(self) -> str:
        if self.kind in ("alternate", "tail"):
            return f"{self.kind}:{self.parallel_epochs}:{self.serial_epochs}"
        if self.kind == "adaptive" and self.threshold != COSINE:
            return f"{self.kind}:{self.threshold:g}"
        return self.kind

    def phases(self, epochs: int) -> str:
        """One letter per epoch. The first epoch is serial: the paper's initial guess (appendix D)."""
        m, n = self.parallel_epochs, self.serial_epochs
        letters = {
            "parallel": lambda: iter(PARALLEL * epochs),
            "serial": lambda: iter(SERIAL * epochs),
            "alternate": lambda: alternate(m, n),
            "tail": lambda: iter(tail(m, n, epochs)),
            "adaptive": lambda: iter(PARALLEL * epochs),  # as long as all goes well
        }[self.kind]()
        return (SERIAL + "".join(islice(letters, 1, epochs)))[:epochs]

    def tail_epochs(self, epochs: int) -> int:
        """Of the kind `tail`: serial ones at the end."""
        m, n = self.parallel_epochs, self.serial_epochs
        return tail(m, n, epochs).count(SERIAL) if self.kind == "tail" else 0


def alternate(m: int, n: int) -> Iterator[str]:
    """m parallel epochs, n serial ones, and again:  4:1  PPPPS PPPPS PPPPS ..."""
    return cycle(PARALLEL * m + SERIAL * n)


def tail(m: int, n: int, epochs: int) -> str:
    """The same share of serial epochs, all at the end:  4:1 of 10  PPPPPPPP SS"""
    serial = round(epochs * n / (m + n))
    return PARALLEL * (epochs - serial) + SERIAL * serial


def healthy(train_loss: float, own_loss: float, cosine: float | None, threshold: float) -> bool:
    """Has a parallel epoch done the whole network good? Both signs must say so; a loss of NaN never does.

    `train_loss` is the whole network's, after the epoch; `own_loss` the last stage's, during it; `cosine` that of the
    angle between the parallel and the true gradient, None where it was not probed.
    """
    fits = train_loss <= LOSS_RATIO * own_loss
    return fits and (cosine is None or cosine >= threshold)


def adapted(phases: str, epoch: int, well: bool) -> str:
    """The phases, once it is known how `epoch` went: a serial epoch follows a parallel one that did not go well.

    expected  SPPPPPPP
    epoch 2   SPP|S|PPPP    not well
    epoch 3   SPPS|P|PPP    serial: parallel again, from states that are set anew
    """
    if well or phases[epoch] == SERIAL:
        return phases
    after = SERIAL + PARALLEL * len(phases)
    return (phases[: epoch + 1] + after)[: len(phases)]


def _threshold(text: str, numbers: list[str]) -> float:
    try:
        (value,) = map(float, numbers or [str(COSINE)])
    except ValueError:
        value = math.nan
    if not -1 <= value <= 1:
        form = "adaptive, or the least healthy cosine behind it, as in adaptive:0.2"
        raise InputError(f"schedule '{said(text)}' needs a number between -1 and 1, or none: write {form}")
    return value


def _form(kind: str) -> str:
    return f"{kind}:4:1" if kind in ("alternate", "tail") else kind
