"""What carries tensors between this process and those with the stages before and after its own.

Messages go in rounds. A process begins a round at the same place in a step as all others, having waited only for
rounds before it. On GPUs that rule is what keeps NCCL from standing still: its kernels wait on the GPU for their
neighbours, so nothing may be posted that a neighbour answers only after work of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay import signs
from parlay.errors import StageLost
from parlay.link.link import Message

SLICE = 0.05  # seconds of a wait between two signs of life


class Side(Enum):
    """Whose: of the process with the stages before, or of that with those after."""

    BEFORE = -1
    AFTER = 1


class Neighbours(NamedTuple):
    """Their ranks and the stages that meet there; None at an end of the network."""

    before: tuple[int, int] | None
    after: tuple[int, int] | None

    def of(self, side: Side) -> tuple[int, int]:
        found = self.before if side is Side.BEFORE else self.after
        assert found is not None
        return found

    def sides(self) -> list[Side]:
        return [side for side, peer in zip(Side, self, strict=True) if peer is not None]


class Round(ABC):
    """Messages that have begun together."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """The tensors that were asked for, once they are there."""


class Transport(ABC):
    def __init__(self, neighbours: Neighbours, device: torch.device) -> None:
        self.neighbours, self.device = neighbours, device

    @abstractmethod
    def begin(self, sent: Sequence[tuple[Side, Tensor]], wanted: Sequence[tuple[Side, Message]]) -> Round:
        """Tensors that are sent must not change until they have gone. Both ends name messages in one order."""

    @abstractmethod
    def settle(self) -> None:
        """Until all that was sent has gone."""

    def send(self, side: Side, tensor: Tensor) -> None:
        self.begin([(side, tensor)], [])

    def receive(self, side: Side, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.begin([], [(side, Message(shape, dtype))]).wait()[0]

    def buffer(self, message: Message, device: torch.device) -> Tensor:
        """Feature maps travel, and arrive, channels last."""
        form = torch.channels_last if len(message.shape) == 4 else torch.contiguous_format
        return torch.empty(message.shape, dtype=message.dtype, device=device, memory_format=form)


@final
class Waits:
    """Where this process waits for others, and for how long it has."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.seconds = 0.0

    def until(self, done: Callable[[], bool], whom: str, times: int = 1) -> None:
        """Wait in short slices; StageLost where it takes too many times the usual patience."""
        if done():
            return
        began = said = time.perf_counter()
        patience, clock = times * signs.patience(), signs.RunningClock()
        pause = 1e-4
        while not done():
            time.sleep(pause)
            now = time.perf_counter()
            if now - said > SLICE:
                signs.waited(now - said)
                said = now
                pause = 1e-3
            if clock() > patience:
                raise StageLost(f"stage {self.stage} lost {whom}: no answer for {patience:g} seconds")
        now = time.perf_counter()
        signs.waited(now - said)
        self.seconds += now - began


@final
class Lost:
    """Inside, what gloo and NCCL say about a connection that is gone becomes a line that names who lost whom."""

    def __init__(self, who: str, whom: str) -> None:
        self.who, self.whom = who, whom

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        if kind in (RuntimeError, dist.DistBackendError, dist.DistNetworkError):
            raise StageLost(f"{self.who} lost {self.whom}: {' '.join(str(error).split())}") from error


def flat(tensor: Tensor) -> Tensor:
    """The tensor as bytes: a view, where it is contiguous, or channels last with feature maps."""
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.contiguous().reshape(-1).view(torch.uint8)
