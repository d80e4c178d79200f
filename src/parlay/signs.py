"""Signs of life that this process gives to whoever watches over it. Where nobody listens, they do nothing.

beat(37)      step 37 begins                      waited(0.05)   waited just now for a neighbour, in seconds
beat()        still alive (evaluating, saving)    patience()     seconds to wait for a neighbour at most
with blocked(): ...                               in a call that returns only when other processes have come
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

from parlay.process import seconds

TIMEOUT = 15.0  # seconds; a step of the networks here takes far less, and a person waits no longer
STARTING = 8  # timeouts until the first step: torch and the data may be read from a slow disk
GAP = 0.5  # seconds between two looks at a clock; what is more, this process did not run


class Listener(Protocol):
    """Whoever is to hear the signs of this process."""

    def beat(self, step: int | None) -> None: ...

    def waited(self, seconds: float) -> None: ...

    def blocked(self) -> AbstractContextManager[None]: ...

    def patience(self) -> float: ...


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """From now on this one hears the signs; None: nobody does."""
    global _listener
    _listener = listener


def beat(step: int | None = None) -> None:
    """A sign of life; with its number, a step of training begins."""
    if _listener is not None:
        _listener.beat(step)


def waited(seconds: float) -> None:
    """A sign of life after so many seconds of waiting for a neighbour."""
    if _listener is not None:
        _listener.waited(seconds)


def blocked() -> AbstractContextManager[None]:
    """Inside, this process waits for others in one call, silently: those are judged, and not this one."""
    return _listener.blocked() if _listener is not None else nullcontext()


def patience() -> float:
    """Seconds that this process waits for another one before it gives up."""
    return _listener.patience() if _listener is not None else timeout()


def timeout() -> float:
    """Seconds without a sign of life after which a process counts as lost."""
    return seconds("PARLAY_TIMEOUT", TIMEOUT)


def starting() -> float:
    """Seconds that the processes of a run have to meet each other."""
    return timeout() * STARTING


@final
class RunningClock:
    """Seconds for which this process has run, to be asked often: a longer gap between two calls counts as `GAP`.

    A suspended machine stops all processes for any time and wakes them in any order. That is no silence of anybody.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last, self._counted = now, now(), 0.0

    def __call__(self) -> float:
        now = self._now()
        self._counted += min(now - self._last, GAP)
        self._last = now
        return self._counted
