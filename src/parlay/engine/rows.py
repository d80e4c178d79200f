"""Which samples of a batch a process computes: its replica's share, its stage's, its micro-batches."""

from __future__ import annotations

from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor


class Shares(Protocol):
    """What is asked of a method."""

    def share(self, ids: Tensor, epoch: int, stage: int) -> Tensor | None: ...


def owner(ids: Tensor, replicas: int) -> Tensor:
    """The replica that has a sample, whatever the batch, and with it the sample's states.

    By pairs of ids, one of either half of the data: a method in which those take turns then leaves nobody idle.
    Batches are drawn without regard to this, so shares of a batch differ by some samples; sums are weighted exactly.
    """
    return ids // 2 % replicas


def owned(samples: int, replica: int, replicas: int) -> int:
    """How many samples of a data set are this replica's."""
    return int((owner(torch.arange(samples), replicas) == replica).sum())


class Share(NamedTuple):
    """This process's part of a batch at a stage."""

    ids: Tensor
    places: Tensor
    """Where the stores have them."""
    positions: Tensor | None
    """Those among `ids` that the stage computes; None: all."""
    whole: int
    """Samples that the stage computes in all its replicas."""


@final
class Rows:
    """How batches are divided, for one process."""

    def __init__(self, method: Shares, samples: int, stages: int, replica: int, replicas: int) -> None:
        self._method, self._stages = method, stages
        self._replica, self._replicas = replica, replicas
        self._place_of = (owner(torch.arange(samples), replicas) == replica).cumsum(0) - 1

    def of(self, ids: Tensor, epoch: int, k: int) -> Share:
        """In a parallel step."""
        # a single stage has no neighbour to take turns with
        everybody = self._method.share(ids, epoch, k) if self._stages > 1 else None
        whole = len(ids) if everybody is None else len(everybody)
        if self._replicas == 1:
            return Share(ids, ids, everybody, whole)
        own = self.own(ids, ids)
        positions = self._method.share(own, epoch, k) if self._stages > 1 else None
        return Share(own, self._place_of[own], positions, whole)

    def all(self, ids: Tensor) -> Share:
        """Where all stages compute all samples."""
        own = self.own(ids, ids)
        return Share(own, own if self._replicas == 1 else self._place_of[own], None, len(ids))

    def own(self, ids: Tensor, values: Tensor) -> Tensor:
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
