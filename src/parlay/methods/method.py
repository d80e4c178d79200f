"""A method: what a link keeps, what a stage minimises, and how state and signal are renewed. One file per method.

Two numbers say when a batch is where: `entry`, the steps until it reaches stage k, and `lag`, the steps from its
forward pass there to its backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parlay.config.keys import check_fields
from parlay.link.link import Link, LinkEnd
from parlay.stage.worker import Place, Worker


@dataclass(frozen=True)
class Method(ABC):
    """Its options are its fields, each declared by `config.keys.option`."""

    fresh_inputs: ClassVar[bool] = False
    """Does nothing live as long as an epoch, so that inputs may be augmented anew in each?"""
    takes_replicas: ClassVar[bool] = True
    guesses: ClassVar[bool] = False
    """Does a stage train at once on a guess of its signal, so that `lag` is until it learns how good that was?"""
    slack: ClassVar[int] = 0
    """Rounds between processes that may still be under way when a step goes on."""

    def __post_init__(self) -> None:
        check_fields(self)

    def entry(self, k: int, stages: int) -> int:  # noqa: ARG002
        """Steps until a batch reaches stage k."""
        return 0

    def lag(self, k: int, stages: int) -> int:  # noqa: ARG002
        """Steps from the forward pass of a batch at stage k to its backward pass there."""
        return 0

    def delay(self, stages: int) -> int | None:  # noqa: ARG002
        """Steps by which the oldest signal is old; None: about an epoch."""
        return None

    @abstractmethod
    def link(self, end: LinkEnd) -> Link: ...

    def worker(self, place: Place) -> Worker:
        """A stage at work."""
        return Worker(place)

    def share(self, ids: Tensor, epoch: int, stage: int) -> Tensor | None:  # noqa: ARG002
        """Positions in a batch of the samples that a stage computes; None: all of them."""
        return None

    def weight(self, epoch: int, epochs: int) -> float | None:  # noqa: ARG002
        """Of the penalty in an epoch; None for methods without one."""
        return None

    # For plans

    @property
    def can_be_captured(self) -> bool:
        """Does every step do the same on the same memory, so that one captured step can be replayed?"""
        return True

    @property
    def keeps(self) -> int:
        """Tensors that a link keeps for every sample."""
        return 0

    @property
    def computed(self) -> float:
        """Share of the samples of a step that a stage computes."""
        return 1.0

    def work(self, k: int, stages: int) -> float:  # noqa: ARG002
        """Of a step of stage k, in units of its forward and backward pass."""
        return 1.0

    def queued(self, k: int, stages: int) -> tuple[int, int]:  # noqa: ARG002
        """Batches of inputs and of outputs that wait in slots for stage k."""
        return 0, 0
