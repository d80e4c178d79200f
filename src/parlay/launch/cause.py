"""Which of several ranks that failed was the first cause, and what to say about it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.launch.rank import ExitReport, Position

# How torch says that another process is gone.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "ncclRemoteError"),
    *("DistBackendError", "DistNetworkError", "DistStoreError", "StageLost"),
)


@dataclass(frozen=True)
class Failure:
    """The end of a rank that was not orderly."""

    position: Position
    pid: int
    code: int
    """Negative: the signal."""
    at: float
    step: int
    report: ExitReport | None
    last_line: str = ""
    """Of its output."""
    stuck: str = ""
    """Why the launcher ended it, where it was for giving no sign of life."""

    @property
    def doubt(self) -> int:
        """That it was the cause. 1: an abort that a lost neighbour can bring about; 2: it says that it lost another."""
        if self.stuck:
            return -1
        if self.report is not None:
            return 2 if self.report.lost or any(sign in self.report.message for sign in LOST) else 0
        return 1 if self.code == -signal.SIGABRT else 0

    def __str__(self) -> str:
        who = f"{self.position} (process {self.pid})"
        when = f" in step {self.step}" if self.step >= 0 else " before its first step"
        if self.stuck:
            return f"{who} {self.stuck}{when} and was ended"
        if self.code < 0:
            reason = f": {self.last_line}" if self.last_line and self.code == -signal.SIGABRT else ""
            return f"{who} was killed by signal {-self.code} ({_name(-self.code)}){when}{reason}"
        if self.report is not None and self.report.message:
            return f"{who} failed{when}: {self.report.message}"
        return f"{who} ended with exit code {self.code}{when}" + (f": {self.last_line}" if self.last_line else "")


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Survivors fail too, within milliseconds, and name each other: those come last, and else the first to end."""
    return min(failures, key=lambda failure: (failure.doubt, failure.at))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"
