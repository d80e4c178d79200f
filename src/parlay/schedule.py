"""When the stages train in parallel and when the network trains serially: phases as data.

A schedule prints and parses (`alternate:4:1`), and `phases` turns it into one letter per epoch, P or S.
The engine, the forecast and the drawings all read these letters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from parlay.errors import InputError

PARALLEL, SERIAL = "P", "S"
KINDS = ("parallel", "serial", "alternate", "tail")


@dataclass(frozen=True)
class Schedule:
    """A sequence of phases; `parallel_epochs` and `serial_epochs` are the m and n of the hybrid kinds."""

    kind: str
    parallel_epochs: int = 0
    serial_epochs: int = 0

    @classmethod
    def parse(cls, text: str) -> Schedule:
        kind, *numbers = text.split(":")
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, 1, 0.0)[0]
            raise InputError(f"unknown schedule '{text}': write {_form(near)}")
        if len(numbers) != (2 if kind in ("alternate", "tail") else 0):
            raise InputError(f"schedule '{text}' is incomplete or too long: write {_form(kind)}")
        if not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise InputError(f"schedule '{text}' needs two whole numbers of at least 1: write {_form(kind)}")
        return cls(kind, *map(int, numbers))

    def __str__(self) -> str:
        if self.kind in ("alternate", "tail"):
            return f"{self.kind}:{self.parallel_epochs}:{self.serial_epochs}"
        return self.kind

    def phases(self, epochs: int) -> str:
        """One letter per epoch. The first epoch is serial: the paper's initial guess (appendix D)."""
        m, n = self.parallel_epochs, self.serial_epochs
        letters = {
            "parallel": lambda: iter(PARALLEL * epochs),
            "serial": lambda: iter(SERIAL * epochs),
            "alternate": lambda: alternate(m, n),
            "tail": lambda: tail(m, n, epochs),
        }[self.kind]()
        return (SERIAL + "".join(islice(letters, 1, epochs)))[:epochs]


def alternate(m: int, n: int) -> Iterator[str]:
    """m parallel epochs, n serial ones, and again:  4:1  PPPPS PPPPS PPPPS ..."""
    return cycle(PARALLEL * m + SERIAL * n)


def tail(m: int, n: int, epochs: int) -> Iterator[str]:
    """The same share of serial epochs, all at the end:  4:1 of 10  PPPPPPPP SS"""
    serial = round(epochs * n / (m + n))
    return iter(PARALLEL * (epochs - serial) + SERIAL * serial)


def _form(kind: str) -> str:
    return f"{kind}:4:1" if kind in ("alternate", "tail") else kind
