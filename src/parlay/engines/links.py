"""Tensors from one process to its neighbour, without waiting: sends are posted and forgotten, receives posted ahead.

A link is one way between two ranks and a group of its own, so what goes up and what goes down never stand in each
other's order. On CPUs a message is gloo's broadcast in a group of two: unlike its send and receive, that says when it
is done, so a wait can go in short slices between which signals are handled and a dead peer is given up. Where every
process has a GPU it is NCCL's send and receive, and a wait holds the stream, not the process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay.errors import StageLost
from parlay.launch import heartbeat

IN_FLIGHT = 8  # messages posted and not yet gone: bounds what a fast stage piles up before a slow one
SLICE = 0.05  # seconds of a wait between two signs of life


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
        patience = times * heartbeat.patience()
        pause = 1e-4
        while not done():
            time.sleep(pause)
            now = time.perf_counter()
            if now - said > SLICE:
                heartbeat.waited(now - said)
                said = now
                pause = 1e-3
            if now - began > patience:
                raise StageLost(f"stage {self.stage} lost {whom}: no answer for {patience:g} seconds")
        now = time.perf_counter()
        heartbeat.waited(now - said)
        self.seconds += now - began


@final
class Arrival:
    """A tensor on its way here."""

    def __init__(self, link: Link, buffer: Tensor, work: Any) -> None:
        self._link, self._buffer, self._work = link, buffer, work

    def wait(self) -> Tensor:
        self._link.finish(self._work)
        return self._buffer.to(self._link.device)


@final
class Link:
    """One way between this process and another. Both ends give shapes and types in the same order."""

    def __init__(self, group: Any, source: int, target: int, peer: str, device: torch.device, waits: Waits) -> None:
        self.group, self.source, self.target, self.peer, self.device = group, source, target, peer, device
        self.waits = waits
        self._nccl = dist.get_backend(group) == "nccl"
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Post a tensor, which must not change until it has gone. Feature maps travel, and arrive, channels last."""
        if tensor.numel() == 0:
            return
        while self._sent and (len(self._sent) >= IN_FLIGHT or self._sent[0][0].is_completed()):
            self.finish(self._sent.popleft()[0])
        tensor = _flat(tensor.detach() if self._nccl else tensor.detach().to("cpu"))
        with self._lost():
            if self._nccl:
                work = dist.isend(tensor, self.target, group=self.group)
            else:
                work = dist.broadcast(tensor, self.source, group=self.group, async_op=True)
        self._sent.append((work, tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Arrival:
        """Make ready for a tensor; `wait` gives it."""
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        place = self.device if self._nccl else torch.device("cpu")
        buffer = torch.empty(shape, dtype=dtype, device=place, memory_format=form)
        if buffer.numel() == 0:
            return Arrival(self, buffer, None)
        with self._lost():
            if self._nccl:
                return Arrival(self, buffer, dist.irecv(_flat(buffer), self.source, group=self.group))
            work = dist.broadcast(_flat(buffer), self.source, group=self.group, async_op=True)
            return Arrival(self, buffer, work)

    def meet(self) -> None:
        """For NCCL, which connects at the first message and needs a still GPU for it: better before anything runs."""
        if dist.get_rank() == self.source:
            self.send(torch.zeros(1, device=self.device))
            self.settle()
        else:
            self.receive((1,), torch.float32).wait()
        torch.cuda.synchronize(self.device)

    def finish(self, work: Any) -> None:
        if work is None:
            return
        with self._lost():
            if not self._nccl:
                self.waits.until(work.is_completed, self.peer)
            work.wait()

    def settle(self) -> None:
        """Until all that was posted has gone."""
        while self._sent:
            self.finish(self._sent.popleft()[0])

    def _lost(self) -> Lost:
        return Lost(f"stage {self.waits.stage}", self.peer)


@final
class Neighbour:
    """The stage before or behind: what goes up the network and what goes down it."""

    def __init__(self, up: Link, down: Link) -> None:
        self.up, self.down = up, down

    def meet(self) -> None:
        self.up.meet()
        self.down.meet()

    def settle(self) -> None:
        self.up.settle()
        self.down.settle()


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


def _flat(tensor: Tensor) -> Tensor:
    """The tensor as bytes: a view, where it is contiguous, or channels last with feature maps."""
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.contiguous().reshape(-1).view(torch.uint8)
