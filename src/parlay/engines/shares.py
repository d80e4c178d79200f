"""Which samples of a batch a process computes, and when: its replica's share, its stage's turn, its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from parlay.coupling import Coupling, Method


def owner(ids: Tensor, replicas: int) -> Tensor:
    """The replica that has a sample, whatever the batch, and with it the sample's states.

    By pairs of ids, one of either half of the data: a method in which those take turns then leaves nobody idle.
    Batches are drawn without regard to this, so shares of a batch differ by some samples; sums are weighted exactly.
    """
    return ids // 2 % replicas


def owned(samples: int, replica: int, replicas: int) -> int:
    """How many samples of a data set are this replica's."""
    return int((owner(torch.arange(samples), replicas) == replica).sum())


@dataclass(frozen=True)
class Share:
    """This process's part of a batch."""

    ids: Tensor
    rows: Tensor
    """Where the store has them."""
    turn: Tensor | None
    """Positions of the samples that this stage computes; None: all."""
    turn_before: Tensor | None
    """The same of the stage before."""
    whole: int
    """Samples that this stage computes in all its replicas."""

    @property
    def taken(self) -> Tensor:
        """The ids that this stage computes."""
        return self.ids if self.turn is None else self.ids[self.turn]

    @property
    def weight(self) -> float:
        """Of this share's mean in the mean over all replicas."""
        return len(self.taken) / max(self.whole, 1)

    def count(self, turn: Tensor | None) -> int:
        return len(self.ids) if turn is None else len(turn)


@final
class Shares:
    """How batches are divided, for one process."""

    def __init__(self, coupling: Method, samples: int, stage: int, stages: int, replica: int, replicas: int) -> None:
        self._coupling, self._stage, self._stages = coupling, stage, stages
        self._replica, self._replicas = replica, replicas
        self._row_of = (owner(torch.arange(samples), replicas) == replica).cumsum(0) - 1

    def of(self, ids: Tensor, epoch: int, parallel: bool) -> Share:
        take_turns = parallel and self._stages > 1  # a single stage has no neighbour to take turns with

        def turn(ids: Tensor, stage: int) -> Tensor | None:
            coupling = self._coupling
            return coupling.turn(ids, epoch, stage) if take_turns and isinstance(coupling, Coupling) else None

        if self._replicas == 1:
            own = turn(ids, self._stage)
            return Share(ids, ids, own, turn(ids, self._stage - 1), len(ids) if own is None else len(own))
        everybody = turn(ids, self._stage)
        whole = len(ids) if everybody is None else len(everybody)
        mine = self.mine(ids, ids)
        return Share(mine, self._row_of[mine], turn(mine, self._stage), turn(mine, self._stage - 1), whole)

    def mine(self, ids: Tensor, values: Tensor) -> Tensor:
        """Of values of all samples of a batch, those of this replica's."""
        if self._replicas == 1 or len(values) == 0:
            return values
        return values[(owner(ids, self._replicas) == self._replica).to(values.device)]


def divided(samples: int, asked: int, stages: int) -> int:
    """How many equal parts a batch is divided into, near to as many as asked for or, with 0, twice the stages.

    1F1B takes no fewer than there are stages. 1 where no number near by divides the batch, or for a single stage.
    """
    if stages == 1:
        return 1
    wanted = asked or 2 * stages  # of 2, 4 and 8 with two stages, 2 was never the fastest (results/cpu-bench)
    most = max(asked, stages) if asked else min(2 * wanted, samples // 2)  # by itself, no parts of a single sample
    found = [parts for parts in range(stages, most + 1) if samples % parts == 0]
    return min(found, key=lambda parts: abs(parts - wanted), default=1)
