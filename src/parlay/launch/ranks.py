"""The launcher's side of a rank: its process, its last words on standard error, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import final

from parlay.launch.places import Place

TAIL = 20  # lines of a rank's standard error that are kept, for naming what ended it
CHUNK = 65_536
STDERR = 2


@final
class Rank:
    """One process of the run, in a session of its own: a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self, place: Place, command: list[str], environment: dict[str, str], loud: bool) -> None:
        """Rank 0 has the terminal (its standard output goes there too: the launcher's own is for the result)."""
        self.place = place
        self.loud = loud
        first = place.rank == 0
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=STDERR if first else subprocess.PIPE,
            stderr=None if first else subprocess.STDOUT,
            start_new_session=True,
        )
        self.began = time.monotonic()
        self.ended_at: float | None = None
        self.stuck = ""
        """Why it was ended, where it was for giving no sign of life."""
        self.cpu = CpuClock(self.process.pid)
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._rest = b""
        if self.process.stdout is not None:
            os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def look(self) -> bool:
        """Has it ended since the last look?"""
        if self.ended_at is None and self.process.poll() is not None:
            self.read()
            self.ended_at = time.monotonic()
            return True
        return False

    def read(self) -> bool:
        """Take what it has written; False at the end of it."""
        if self.process.stdout is None:
            return False
        while True:
            try:
                content = os.read(self.process.stdout.fileno(), CHUNK)
            except BlockingIOError:
                return True
            if not content:
                return False
            *lines, self._rest = (self._rest + content).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace"))

    def last_words(self) -> str:
        """The last line that says something."""
        lines = [*self._tail, self._rest.decode(errors="replace")]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """With whatever it has started itself."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _hear(self, line: str) -> None:
        self._tail.append(line)
        if self.loud:
            print(f"[{self.place}] {line}", file=sys.stderr, flush=True)


@final
class CpuClock:
    """Does a process compute? Silence alone does not say: a large step may take longer than any timeout."""

    BUSY = 0.05  # of a core; the threads that only listen for messages take a tenth of that

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._seconds, self._at = 0.0, 0.0

    def restart(self, now: float) -> None:
        self._seconds, self._at = self._used(), now

    def busy(self, now: float) -> bool:
        """Since the last restart. One that waits for a disk, now, counts as busy: a sync can take long."""
        return self._used() - self._seconds > self.BUSY * (now - self._at) or self._fields()[:1] == ["D"]

    def stopped(self) -> bool:
        """By SIGSTOP, or in a debugger."""
        return self._fields()[:1] in (["T"], ["t"])

    def _used(self) -> float:
        fields = self._fields()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

    def _fields(self) -> list[str]:
        """Those of /proc/PID/stat behind the name, which may hold anything."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return []
