"""A batch as it enters a step, and as a stage computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.data.batches import step_seed

AUGMENTATION = 1 << 20  # stream of the augmentation's random numbers; the stages' streams are their indices


@dataclass(frozen=True)
class Batch:
    """What enters at a step: the same in every process."""

    ids: Tensor
    epoch: int
    step: int
    rate: float
    """Learning rate as a share of the initial one."""
    seed: int
    weight: float = 0.0
    """Of the method's penalty in this epoch."""
    following: tuple[Tensor, ...] = ()
    """The ids of the next two steps of the epoch: their states can travel while this one is computed."""

    @property
    def rows(self) -> int:
        return len(self.ids)

    def random(self, stream: int) -> int:
        """The seed of one stream of random numbers: a function of seed, epoch and step, so nothing needs saving."""
        return step_seed(self.seed, self.epoch, self.step, stream)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.random(AUGMENTATION))


@dataclass(frozen=True)
class Pass:
    """A batch at a stage in one direction, as this process computes it."""

    batch: Batch
    number: int
    """Of the batch, counted since the stages were empty: it tells the batch's slots."""
    ids: Tensor
    """The samples of this process's replica."""
    places: Tensor
    """Where the replica's stores keep them."""
    positions: Tensor | None = None
    """Those among `ids` that this stage computes; None: all."""
    whole: int = 0
    """Samples that this stage computes in all its replicas together."""
    slots: Mapping[int, Tensor] = field(default_factory=dict)
    """In captured steps: the number modulo each count of slots, on the device."""
    changes: Mapping[str, Tensor] | None = None
    """The random changes of the inputs; None where inputs are taken as they are."""
    compiled: bool = False
    """The shapes are those of all full batches: run the compiled code."""

    @property
    def rows(self) -> int:
        """Samples that this process computes."""
        return len(self.ids) if self.positions is None else len(self.positions)

    @property
    def samples(self) -> Tensor:
        """Their ids."""
        return self.ids if self.positions is None else self.ids[self.positions]

    @property
    def share(self) -> float:
        """Of this process's mean in the mean over all replicas."""
        return self.rows / max(self.whole, 1)
