"""Heartbeats: every rank writes its step and the time into its slot of one small file that all processes map.

A write is a few bytes of shared memory. It needs no thread and no answer, and works between two slices of a wait.
The launcher reads the slots, and asks the kernel whether a silent rank computes.
"""

from __future__ import annotations

import mmap
import os
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
ENOUGH = 8  # steps before their time is told
BUSY = 0.05  # of a core; the threads that only listen for messages take a tenth of that
REMEMBERED = 31  # steps that it is the median of: epochs' ends, with their evaluations, do not count


@dataclass(frozen=True)
class Beat:
    """What a rank last said."""

    step: int = -1
    """Of training, counted through all epochs; -1 before the first."""
    at: float = 0.0
    """By the machine's monotonic clock; 0 where it has said nothing yet."""
    step_seconds: float = 0.0
    """Of a step without the waiting; 0 before there were enough steps (not those with a `blocked`)."""
    blocked: int = 0
    """In a call that waits for others: its silence says nothing."""
    computed: float = 0.0
    """Seconds in all, of the steps that count for `step_seconds`."""


FIELDS = len(astuple(Beat()))
SLOT = 1 + 2 * FIELDS  # numbers of eight bytes


@final
class BeatFile:
    """The slots of all ranks: how many beats it has written, and the last two of them, in turn.

    A rank may be stopped or killed in the middle of a write, and what is half written must not be read. So the beat
    before stays until the new one is whole, and then one store of eight bytes, the count, puts it in place.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * ranks * SLOT))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._bytes = memoryview(self._map)
        self._cells = self._bytes.cast("d")

    def write(self, rank: int, beat: Beat) -> None:
        count = self._cells[rank * SLOT] + 1
        self._cells[self._of(rank, count)] = array("d", astuple(beat))
        self._cells[rank * SLOT] = count

    def read(self, rank: int) -> Beat:
        while True:
            count = self._cells[rank * SLOT]
            step, at, step_seconds, blocked, computed = self._cells[self._of(rank, count)]
            if self._cells[rank * SLOT] == count:  # else the next but one may have been written over it
                return Beat(int(step), at, step_seconds, int(blocked), computed) if count else Beat()

    def close(self) -> None:
        self._cells.release()
        self._bytes.release()
        self._map.close()

    @staticmethod
    def _of(rank: int, count: float) -> slice:
        """Where the beat of that count stands."""
        start = rank * SLOT + 1 + int(count) % 2 * FIELDS
        return slice(start, start + FIELDS)


@final
class Heartbeat(signs.Listener):
    """This process's own: it listens to `parlay.signs`."""

    def __init__(self, file: BeatFile, rank: int) -> None:
        self._file, self._rank = file, rank
        self._step, self._began, self._waited = -1, 0.0, 0.0
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._step_seconds = self._computed = 0.0
        self._blocked = 0
        self._mixed = False
        """Was there a call in this step of which it is not known how much was waiting?"""

    def beat(self, step: int | None = None) -> None:
        now = time.monotonic()
        if step is not None:
            if step == self._step + 1 and self._step >= 0 and not self._mixed:
                self._last.append(now - self._began - self._waited)
                self._computed += self._last[-1]
                if len(self._last) >= ENOUGH:
                    self._step_seconds = sorted(self._last)[len(self._last) // 2]
            self._step, self._began, self._waited, self._mixed = step, now, 0.0, False
        self._file.write(self._rank, Beat(self._step, now, self._step_seconds, self._blocked, self._computed))

    def waited(self, seconds: float) -> None:
        self._waited += seconds
        self.beat()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        self._blocked += 1
        self._mixed = True
        self.beat()
        try:
            yield
        finally:
            self._blocked -= 1
            self.beat()

    def patience(self) -> float:
        return signs.timeout() * SUPERVISED_PATIENCE


@final
class CpuClock:
    """Does a process compute? Silence alone does not say: a large step may take longer than any timeout."""

    def __init__(self, pid: int) -> None:
        self._path, self._seconds, self._at = f"/proc/{pid}/stat", 0.0, 0.0

    def restart(self, now: float) -> None:
        self._seconds, self._at = self._used(), now

    def busy(self, now: float) -> bool:
        """Since the last restart. One that waits for a disk, now, counts as busy: a sync can take long."""
        return self._used() - self._seconds > BUSY * (now - self._at) or self._fields()[:1] == ["D"]

    def stopped(self) -> bool:
        """By SIGSTOP, or in a debugger."""
        return self._fields()[:1] in (["T"], ["t"])

    def _used(self) -> float:
        fields = self._fields()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

    def _fields(self) -> list[str]:
        """Those of /proc/PID/stat behind the name, which may hold anything."""
        try:
            with open(self._path) as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return []
