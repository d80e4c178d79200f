"""Who was the first cause, when one rank has ended and the others with it, and what to say about it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.launch.places import Place
from parlay.launch.worker import Word

# How torch says that another process is gone.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "ncclRemoteError"),
    *("DistBackendError", "DistNetworkError", "DistStoreError", "StageLost"),
)


@dataclass(frozen=True)
class End:
    """The end of a rank that was not orderly."""

    place: Place
    pid: int
    code: int
    """Negative: the signal."""
    at: float
    step: int
    word: Word | None
    last_words: str
    stuck: str = ""
    """Why the launcher ended it, where it was for giving no sign of life."""

    @property
    def reason(self) -> str:
        return self.word.error if self.word else self.last_words

    @property
    def follows(self) -> int:
        """0: a cause of its own; 1: maybe, an abort that a lost neighbour can bring about; 2: only lost another."""
        if self.stuck:
            return -1
        if self.word is not None:
            return 2 if self.word.lost or any(sign in self.word.error for sign in LOST) else 0
        if self.code == -signal.SIGABRT:
            return 1
        return 0


def first_cause(ends: Sequence[End]) -> End:
    """Survivors fail too, within milliseconds, and blame each other: those come last, and else the first to end."""
    return min(ends, key=lambda end: (end.follows, end.at))


def describe(end: End) -> str:
    who = f"{end.place} (process {end.pid})"
    when = f" in step {end.step}" if end.step >= 0 else " before its first step"
    if end.stuck:
        return f"{who} {end.stuck}{when} and was ended"
    if end.code < 0:
        reason = f": {end.last_words}" if end.last_words and end.code == -signal.SIGABRT else ""
        return f"{who} was killed by signal {-end.code} ({_name(-end.code)}){when}{reason}"
    if end.word is not None and end.reason:
        return f"{who} failed{when}: {end.reason}"
    return f"{who} ended with exit code {end.code}{when}" + (f": {end.reason}" if end.reason else "")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"
