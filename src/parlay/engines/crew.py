"""The processes that run the same training loop side by side, as the loop sees them.

Every one of them makes the same calls in the same order. What only one may do (files, locks) the leader does, and all
learn how it went: an error of one is an error of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar, final

T = TypeVar("T")


class Crew(ABC):
    """Who runs the loop. `leads`: is this the process that writes the run folder and talks to the user?"""

    leads: bool
    size: int

    @abstractmethod
    def led(self, work: Callable[[], T]) -> T:
        """What `work` gives to the leader, to all; the others do not call it. Its error is raised everywhere."""

    @abstractmethod
    def gathered(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives to each process, to all, in the order of the ranks. One's error is raised everywhere."""


@final
class Alone(Crew):
    """A single process."""

    leads = True
    size = 1

    def led(self, work: Callable[[], T]) -> T:
        return work()

    def gathered(self, work: Callable[[], T]) -> list[T]:
        return [work()]
