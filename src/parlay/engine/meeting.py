"""Where the ranks meet: a store of keys that this start of the run has for itself.

`torchrun` keeps one store through all restarts, and gloo's keys in it are the same every time: a restarted rank would
find the addresses of dead ones there and try to connect to them. Its count of restarts is no help, each host has its
own. So rank 0 draws a name for the new start and answers everybody's greeting with it, until all have taken it up:

    rank r   hello/r = a number drawn now             rank 0   answer/r = that number and the new name, again and again
    rank r   has its own number back: NAME/r = here   rank 0   sees all NAME/r: the ranks of this start are complete

An old greeting may be answered too; nobody is left who would take that up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from parlay.errors import StageLost
from parlay.signs import RunningClock

PAUSE = 0.02


def meet(patience: float) -> tuple[Store, int, int]:
    """The store, this rank and the number of ranks, for `init_process_group`. All ranks call it."""
    store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
    name = agree(store, rank, ranks, patience) if ranks > 1 else "alone"
    return PrefixStore(name, store), rank, ranks


def agree(store: Store, rank: int, ranks: int, patience: float) -> str:
    """A name that no earlier start had."""
    until = _Deadline(patience, rank)
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", mine)
        until(lambda: _read(store, f"answer/{rank}").startswith(mine))
        name = _read(store, f"answer/{rank}").removeprefix(mine)
        store.set(f"{name}/{rank}", "here")
        return name
    others = range(1, ranks)

    def complete() -> bool:
        for other in others:
            store.set(f"answer/{other}", _read(store, f"hello/{other}") + mine)
        return store.check([f"{mine}/{other}" for other in others])

    until(complete)
    return mine


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


class _Deadline:
    def __init__(self, patience: float, rank: int) -> None:
        self.patience, self.rank, self.clock = patience, rank, RunningClock()

    def __call__(self, done: Callable[[], bool]) -> None:
        """Wait until it is so."""
        while not done():
            if self.clock() > self.patience:
                raise StageLost(f"rank {self.rank} has not met all others within {self.patience:g} seconds")
            time.sleep(PAUSE)
