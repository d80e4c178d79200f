"""A link: the cut before stage k at run time. It joins stage k-1 and stage k.

    stage k-1   put_output(x) ─► [ memory, where stage k lives ] ─► input   stage k
                loss, adjoint ◄─ [ state, multiplier, adjoint  ] ◄─ put_adjoint

Where one process has both stages, the two ends are this one object. Where they are two processes each makes one: the
engine carries what `outgoing` gives at one end to `arrive` at the other. UP goes from stage k-1 to stage k.

All that is stored and sent is small, where a filter is in use: DS(x), and the gradient with respect to DS(x). Adjoints
are per sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from parlay.batch import Pass
from parlay.link.filters import Filter
from parlay.stores import Store

Pool = Callable[[Tensor], Tensor]
"""Sums over all replicas of a stage."""


class Direction(Enum):
    UP = "up"
    DOWN = "down"


class Message(NamedTuple):
    """What is on its way: the shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class LinkEnd:
    """What a method needs to make a link, or this process's end of one."""

    k: int
    stages: int
    shape: tuple[int, ...]
    """Of an output of stage k-1, per sample."""
    filter: Filter
    rows: int
    """Samples of a full batch."""
    device: torch.device
    lower: bool = True
    """Is stage k-1 in this process?"""
    upper: bool = True
    """Is stage k?"""
    store_dtype: torch.dtype = torch.float32
    """Of what is kept for every sample."""
    store: Callable[[str], Store] | None = None
    """Makes a store with a place for every sample."""
    pool: Pool | None = None
    fixed: bool = False
    """Must memory stay in its place, because a captured step uses it?"""


class Link(ABC):
    """Each call stands for one stage: forward, loss, backward of stage k-1 or k, and what comes after both."""

    starts: ClassVar[bool] = False
    """Must a pass over the training set fill it before the first parallel step?"""
    filled = True
    """Has it what a parallel step needs?"""
    slot_counts: tuple[int, ...] = ()
    """Of the batches on their way that it has slots for."""

    def __init__(self, end: LinkEnd) -> None:
        self.end, self.k = end, end.k
        self.dtype = torch.float32
        """Of an output of stage k-1, as its precision makes it: two processes must know it before the first message."""
        self.small = end.filter.shape(end.shape)

    def down(self, x: Tensor) -> Tensor:
        """DS."""
        return self.end.filter.down(x)

    def up(self, small: Tensor) -> Tensor:
        """US."""
        return self.end.filter.up(small, self.end.shape)

    def set_weight(self, weight: float) -> None:  # noqa: B027
        """Of the method's penalty, in the steps to come."""

    def prefetch(self, places: Tensor) -> None:  # noqa: B027
        """These are gathered next."""

    def gather(self, both: Pass) -> bool:  # noqa: ARG002
        """Before the stages begin: read what they need of this batch. False where there is nothing to read."""
        return False

    @abstractmethod
    def put_output(self, p: Pass, x: Tensor) -> Tensor:
        """Stage k-1 puts out x. Gives DS(x) with its graph."""

    @abstractmethod
    def input(self, p: Pass, precision: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """The state as a leaf, whose gradient is the adjoint, and what stage k takes: US of it."""

    @abstractmethod
    def loss(self, p: Pass, x: Tensor, small: Tensor) -> Tensor:
        """What stage k-1 minimises in the place of the network's loss: a mean over the samples."""

    @abstractmethod
    def put_adjoint(self, p: Pass, gradient: Tensor | None) -> None:
        """The gradient of stage k's loss with respect to the state; None: the loss does not depend on it."""

    def renew(self, before: Pass | None, after: Pass | None) -> list[Tensor]:  # noqa: ARG002
        """Stages k-1 and k have done these passes: new states and signals. Gives the violations that were met."""
        return []

    def settle(self) -> list[Tensor]:
        """Renew what could not be renewed before outputs of stage k-1 had come from another process."""
        return []

    # Filling it

    def reset(self) -> None:  # noqa: B027
        """The states are set anew from here on."""

    def start(self, p: Pass, small: Tensor) -> Tensor | None:
        """From a pass through the whole network. Gives the violation of the states that stood there before."""
        raise NotImplementedError

    # Between two processes

    def outgoing(self, way: Direction, p: Pass | None) -> list[Tensor]:  # noqa: ARG002
        """What this end sends; p is the pass of the stage that has made it."""
        return []

    def incoming(self, way: Direction, p: Pass | None) -> list[Message]:  # noqa: ARG002
        """The same as the other end knows it before it comes."""
        return []

    def arrive(self, way: Direction, p: Pass, tensors: list[Tensor]) -> None:  # noqa: B027
        """It has come."""

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, kept: Mapping[str, Tensor]) -> bool:  # noqa: ARG002
        """Take what `tensors` gave. False, and nothing taken, where it is of another filter, type or method."""
        return True

    @property
    def bytes(self) -> int:
        """Of its memory."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Give the memory back."""
