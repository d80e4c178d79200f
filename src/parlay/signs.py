"""Signs of life that this process gives to whoever watches over it. Where nobody does, they cost a call.

beat(37)      step 37 begins                      waited(0.05)   waited just now for a neighbour, in seconds
beat()        still alive (evaluating, saving)    patience()     seconds to wait for a neighbour at most
with blocked(): ...                               in a call that returns only when other processes have come
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import final

from parlay.process import seconds

TIMEOUT = 15.0  # seconds; a step of the networks here takes far less, and a person waits no longer
STARTING = 8  # timeouts until the first step: torch and the data may be read from a slow disk
GAP = 0.5  # seconds between two looks at a clock; for the rest of a longer gap this process did not run


class Listener:
    """Hears the signs. This one does nothing with them."""

    def beat(self, step: int | None) -> None: ...

    def waited(self, seconds: float) -> None: ...

    def blocked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def patience(self) -> float:
        return timeout()


_listener = Listener()


def listen(listener: Listener) -> None:
    """From now on this one hears the signs."""
    global _listener
    _listener = listener


def beat(step: int | None = None) -> None:
    _listener.beat(step)


def waited(seconds: float) -> None:
    _listener.waited(seconds)


def blocked() -> AbstractContextManager[None]:
    return _listener.blocked()


def patience() -> float:
    return _listener.patience()


def timeout() -> float:
    """Seconds without a sign of life after which a process counts as lost."""
    return seconds("PARLAY_TIMEOUT", TIMEOUT)


@final
class RunningClock:
    """Seconds for which this process has run, to be asked often: a longer gap between two calls counts as `GAP`.

    Where a machine is suspended, all processes stop, and wake in any order: time that nobody ran is no silence.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last, self._counted = now, now(), 0.0

    def __call__(self) -> float:
        now = self._now()
        self._counted += min(now - self._last, GAP)
        self._last = now
        return self._counted
