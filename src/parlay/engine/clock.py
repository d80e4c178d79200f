"""Which batch is at which stage in which step. For three stages of a streamed method, lags 4, 2, 0:

        step       0   1   2   3   4   5   6   7
        stage 0    0   1   2   3   4   5   6   7      forward
                                   0   1   2   3      backward
        stage 1        0   1   2   3   4   5   6
                               0   1   2   3   4
        stage 2            0   1   2   3   4   5      both

No stage trains before its first adjoint has come. When a phase ends, steps without a new batch let the last ones run
out: every stage trains on every batch once. With stored methods all stages are at the batch that enters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from parlay.batch import Batch


class Turn(NamedTuple):
    """What one stage does in a step: a batch in each direction, with its number, or None."""

    forward: Batch | None
    backward: Batch | None
    number: int
    """Of the batch that goes forward."""
    lag: int

    @property
    def number_back(self) -> int:
        return self.number - self.lag


@final
class Clock:
    def __init__(self, timing: Sequence[tuple[int, int]]) -> None:
        """`entry` and `lag` of every stage."""
        self.timing = list(timing)
        self.depth = max(entry + lag for entry, lag in timing)
        self.step = 0
        self.batches: dict[int, Batch] = {}

    @property
    def empty(self) -> bool:
        """Is no batch on its way?"""
        return not self.batches

    def enter(self, batch: Batch | None) -> list[Turn]:
        """One step; what every stage has to do in it."""
        if batch is not None:
            self.batches[self.step] = batch
        turns = [self._turn(self.step - entry, lag) for entry, lag in self.timing]
        self.step += 1
        self.batches = {n: kept for n, kept in self.batches.items() if self.step - n <= self.depth}
        if not self.batches:
            self.step = 0
        return turns

    def _turn(self, number: int, lag: int) -> Turn:
        return Turn(self.batches.get(number), self.batches.get(number - lag), number, lag)

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        kept = list(self.batches.items())
        return {
            "way/step": torch.tensor(self.step),
            "way/batches": torch.tensor([[n, b.epoch, b.step, b.seed, b.rows] for n, b in kept]).view(-1, 5),
            "way/ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(b.ids for _, b in kept)]),
        }

    def load(self, kept: Mapping[str, Tensor]) -> None:
        self.step = int(kept["way/step"])
        rows = kept["way/batches"].tolist()
        ids = torch.split(kept["way/ids"], [row[4] for row in rows])
        self.batches = {
            n: Batch(own.clone(), epoch, step, 1.0, seed)
            for (n, epoch, step, seed, _), own in zip(rows, ids, strict=True)
        }
