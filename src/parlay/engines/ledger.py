"""What all processes must know of the steps: whether anybody wants to stop or has a loss that is not finite, and, at
an epoch's end, everybody's losses.

A word on each step is posted as a tiny reduction and read some steps later: at the same step in all processes, and
mostly without waiting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay.engines.base import Batch, Totals, raise_if_not_finite
from parlay.engines.world import World

Trained = Batch | Sequence[Batch | None]
"""What the stages have trained on in a step: one batch, or, with a streaming method, each stage its own."""


class Row(NamedTuple):
    """A step as this process saw it."""

    samples: int | list[int]
    """Of all stages, or of each."""
    serial: bool
    """Then only the last stage has a loss."""
    loss: float


class Posted(NamedTuple):
    """A word that is not read yet."""

    batch: Trained
    row: Row | None
    flags: Tensor
    work: Any


@final
class Ledger:
    """Of one process."""

    def __init__(self, world: World) -> None:
        self.stopped = False
        """Have all agreed to stop?"""
        self.spoiled = False
        """Has this process met a loss that is not finite? Then it changes nothing any more."""
        self._world = world
        self._posted: deque[Posted] = deque()
        self._rows: list[Row] = []
        self._violations: list[Tensor] = []

    def note(self, batch: Trained, loss: float, stop: bool, serial: bool = False) -> None:
        """This process's word on a training step."""
        row = Row(_samples(batch), serial, loss)
        self._rows.append(row)
        self.spoiled = self.spoiled or not math.isfinite(loss)
        self._post(batch, row, stop, not math.isfinite(loss))

    def pass_by(self, batch: Batch, stop: bool) -> None:
        """The same of a step that trains nothing."""
        self._post(batch, None, stop, False)

    def violations(self, found: list[Tensor]) -> None:
        self._violations += found

    def read(self, keep: int) -> bool:
        """Read all words but the last `keep`: is it time to stop? Raises `Diverged` in all processes alike."""
        while len(self._posted) > keep:
            batch, row, flags, work = self._posted.popleft()
            self._world.finish(work)
            stop, bad = map(bool, flags.tolist())
            self.stopped = self.stopped or stop
            if bad and row is not None:
                self._raise(batch, row)
        return self.stopped

    def close_epoch(self, totals: Totals) -> None:
        """Add everybody's losses and violations of the steps since the last time, step by step."""
        rows, self._rows = self._rows, []
        seen = torch.stack(self._violations).tolist() if self._violations else []
        self._violations = []
        world = self._world
        found = world.gathered(lambda: ([row.loss for row in rows], seen))
        stages = [found[world.rank_of(k, 0) : world.rank_of(k + 1, 0)] for k in range(world.stages)]
        behind = iter(zip(*(replicas[0][1] for replicas in stages[1:]), strict=True))
        for i, row in enumerate(rows):
            losses = [sum(losses[i] for losses, _ in replicas) for replicas in stages]
            if isinstance(row.samples, list):
                totals.add_apart(row.samples, losses)
            elif row.serial:
                totals.add(row.samples, losses[-1:], [])
            else:
                totals.add(row.samples, losses, list(next(behind, ())))

    def _post(self, batch: Trained, row: Row | None, stop: bool, bad: bool) -> None:
        flags = torch.tensor([stop, bad], dtype=torch.int32)
        with self._world.naming_the_lost():
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._world.pulse, async_op=True)
        self._posted.append(Posted(batch, row, flags, work))

    def _raise(self, batch: Trained, row: Row) -> None:
        """Name the first stage; a step's loss is the sum of its replicas' parts."""
        world = self._world
        found = world.gathered(lambda: row.loss)
        losses = [sum(found[world.rank_of(k, 0) : world.rank_of(k + 1, 0)]) for k in range(world.stages)]
        raise_if_not_finite(batch, losses[-1:] if row.serial else losses, world.stages)


def _samples(batch: Trained) -> int | list[int]:
    if isinstance(batch, Batch):
        return len(batch.ids)
    return [len(its.ids) if its is not None else 0 for its in batch]
