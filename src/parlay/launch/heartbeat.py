"""Signs of life: every rank writes its step and the time into its slot of one small file that all processes map.

A write is a few bytes of shared memory: it needs no thread and no answer, and it works in between slices of waiting
for a neighbour. The launcher reads the slots. Where no launcher has made the file, nobody listens to `parlay.signs`.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import final

from parlay import signs

# A rank under a launcher leaves the judgement to it: it sees all heartbeats, and may know that the other only computes.
SUPERVISED_PATIENCE = 24
FILE = "beats"
ENOUGH = 8  # steps before a pace is told
REMEMBERED = 31  # steps that the pace is the median of: epochs' ends, with their evaluations, do not count


@dataclass(frozen=True)
class Beat:
    """What a rank last said."""

    step: int
    """Of training, counted through all epochs; -1 before the first."""
    at: float
    """By the machine's monotonic clock; 0 where it has said nothing yet."""
    waited: float
    """Seconds in all, where it waited in slices."""
    pace: float
    """Seconds of a step without the waiting; 0 before there were enough (not those with a `blocked`)."""
    blocked: int = 0
    """In a call that waits for others: its silence says nothing."""
    computed: float = 0.0
    """Seconds in all, of the steps that a pace can be told from."""


NEVER = Beat(-1, 0.0, 0.0, 0.0)
CELL = 8  # bytes of a number
FIELDS = len(astuple(NEVER))
SLOT = 1 + 2 * FIELDS  # cells


@final
class Beats:
    """The slots of all ranks: how many beats it has written, and the last two of them, in turn.

    A rank may be preempted, or killed, in the middle of a write, and what it has half written must not be read: a time
    of 0 would be the silence of a whole run. So the beat before stays until the new one is whole, and then one store of
    eight bytes, the count, puts it in place.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(ranks * SLOT * CELL))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._bytes = memoryview(self._map)
        self._cells = self._bytes.cast("d")

    def write(self, rank: int, beat: Beat) -> None:
        count = self._cells[rank * SLOT] + 1
        at = self._place(rank, count)
        self._cells[at : at + FIELDS] = array("d", astuple(beat))
        self._cells[rank * SLOT] = count

    def read(self, rank: int) -> Beat:
        while True:
            count = self._cells[rank * SLOT]
            at = self._place(rank, count)
            step, time_, waited, pace, blocked, computed = self._cells[at : at + FIELDS]
            if self._cells[rank * SLOT] == count:  # else the next but one may have been written over it
                return Beat(int(step), time_, waited, pace, int(blocked), computed) if count else NEVER

    def close(self) -> None:
        self._cells.release()
        self._bytes.release()
        self._map.close()

    @staticmethod
    def _place(rank: int, count: float) -> int:
        """Where the beat of that count stands."""
        return rank * SLOT + 1 + int(count) % 2 * FIELDS


@final
class Pulse:
    """This process's own slot."""

    def __init__(self, beats: Beats, rank: int) -> None:
        self._beats, self._rank = beats, rank
        self._step, self._began, self._waited, self._waited_before = -1, 0.0, 0.0, 0.0
        self._paces: deque[float] = deque(maxlen=REMEMBERED)
        self._pace = self._computed = 0.0
        self._blocked = 0
        self._mixed = False
        """Was there a call in this step of which it is not known how much was waiting?"""

    def beat(self, step: int | None) -> None:
        now = time.monotonic()
        if step is not None:
            if step == self._step + 1 and self._step >= 0 and not self._mixed:
                self._paces.append(now - self._began - (self._waited - self._waited_before))
                self._computed += self._paces[-1]
                if len(self._paces) >= ENOUGH:
                    self._pace = sorted(self._paces)[len(self._paces) // 2]
            self._step, self._began, self._waited_before, self._mixed = step, now, self._waited, False
        beat = Beat(self._step, now, self._waited, self._pace, self._blocked, self._computed)
        self._beats.write(self._rank, beat)

    def waited(self, seconds: float) -> None:
        self._waited += seconds
        self.beat(None)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        self._blocked += 1
        self._mixed = True
        self.beat(None)
        try:
            yield
        finally:
            self._blocked -= 1
            self.beat(None)

    def patience(self) -> float:
        return signs.timeout() * SUPERVISED_PATIENCE


def start(folder: Path, rank: int, ranks: int) -> None:
    """From now on this process beats."""
    signs.listen(Pulse(Beats(folder / FILE, ranks), rank))
