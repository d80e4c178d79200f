"""Stages side by side on one GPU: a lane for each, joined by events. On other devices everything runs in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from parlay.lanes import Lanes


@final
class Branches:
    """Lanes that leave the current one together and come back together.

    Tensors that cross from one lane to another must live until the lanes have come back: only then may their memory
    be used again. Inside a captured step the lanes become branches of the graph.
    """

    def __init__(self, lanes: Lanes, count: int) -> None:
        self._all = lanes
        self._lanes = [lanes.lane() for _ in range(count)]

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """The lanes begin where the current one is now, which waits for all of them at the end."""
        for lane in self._lanes:
            lane.follow(self._all.current)
        yield
        for lane in self._lanes:
            self._all.current.follow(lane)

    def lane(self, k: int) -> Any:
        return self._lanes[k]

    def after(self, k: int, earlier: int) -> None:
        """Lane k goes on when lane `earlier` has done what it has been given so far."""
        self._lanes[k].follow(self._lanes[earlier])
