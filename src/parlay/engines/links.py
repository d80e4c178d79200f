"""Tensors from one process to its neighbour, without waiting: sends are posted and forgotten, receives posted ahead.

A link is one way between two ranks and a group of its own, so what goes up and what goes down never stand in each
other's order. On CPUs a message is gloo's broadcast in a group of two: unlike its send and receive, that says when it
is done, so a wait can go in short slices between which signals are handled and a dead peer is given up. Where every
process has a GPU it is NCCL's send and receive, and a wait holds the stream, not the process.

NCCL's kernels wait on the GPU for their neighbours, and whatever makes CUDA wait for a still GPU (a kernel that is used
for the first time) waits for them. So nothing may be posted there that a neighbour answers only after work of its own:
the messages of a parallel step go in one round, which all processes begin at the same place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay import signs
from parlay.errors import StageLost

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
class Round:
    """Messages that go together."""

    def __init__(self) -> None:
        self.messages: list[dist.P2POp] = []
        self._works: list[Any] | None = None

    def begin(self) -> None:
        self._works = dist.batch_isend_irecv(self.messages) if self.messages else []

    def is_completed(self) -> bool:
        return self._works is not None and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Once for all its messages: it is always the same stream that waits."""
        assert self._works is not None, "a round that has not begun"
        while self._works:
            self._works.pop().wait()


@final
class Rounds:
    """One round after the other, in one group: a message belongs to the one that `begin` will begin next."""

    def __init__(self, group: Any, stage: int) -> None:
        self.group, self.stage = group, stage
        self.next = Round()

    def begin(self) -> None:
        begun, self.next = self.next, Round()
        with Lost(f"stage {self.stage}", "another stage"):
            begun.begin()

    def meet(self, neighbours: Sequence[Neighbour]) -> None:
        """NCCL connects at the first message, and needs a still GPU for it: better before anything runs."""
        arrivals = []
        for neighbour in neighbours:
            there, back = neighbour.up, neighbour.down
            if dist.get_rank() != there.source:
                there, back = back, there
            there.send(torch.zeros(1, device=there.device))
            arrivals.append(back.receive((1,), torch.float32))
        self.begin()
        for arrival in arrivals:
            arrival.wait()
            if arrival.device.type == "cuda":
                torch.cuda.synchronize(arrival.device)


@final
class Arrival:
    """A tensor on its way here."""

    def __init__(self, link: Link, buffer: Tensor, work: Any) -> None:
        self._link, self._buffer, self._work = link, buffer, work
        self.device = link.device

    def wait(self) -> Tensor:
        self._link.finish(self._work)
        return self._buffer.to(self.device)


@final
class Link:
    """One way between this process and another. Both ends give shapes and types in the same order."""

    def __init__(
        self,
        group: Any,
        source: int,
        target: int,
        peer: str,
        device: torch.device,
        waits: Waits,
        rounds: Rounds | None = None,
    ) -> None:
        self.group, self.source, self.target, self.peer, self.device = group, source, target, peer, device
        self.waits, self.rounds = waits, rounds
        self._nccl = dist.get_backend(group) == "nccl"
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def within(self, rounds: Rounds) -> Link:
        """The same way, in rounds."""
        return Link(rounds.group, self.source, self.target, self.peer, self.device, self.waits, rounds)

    def send(self, tensor: Tensor) -> None:
        """Post a tensor, which must not change until it has gone. Feature maps travel, and arrive, channels last."""
        if tensor.numel() == 0:
            return
        while self._sent and (len(self._sent) >= IN_FLIGHT or self._sent[0][0].is_completed()):
            self.finish(self._sent.popleft()[0])
        tensor = _flat(tensor.detach() if self._nccl else tensor.detach().to("cpu"))
        self._sent.append((self._posted(tensor, dist.isend, self.target), tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Arrival:
        """Make ready for a tensor; `wait` gives it."""
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        place = self.device if self._nccl else torch.device("cpu")
        buffer = torch.empty(shape, dtype=dtype, device=place, memory_format=form)
        if buffer.numel() == 0:
            return Arrival(self, buffer, None)
        return Arrival(self, buffer, self._posted(_flat(buffer), dist.irecv, self.source))

    def _posted(self, tensor: Tensor, how: Callable[..., Any], peer: int) -> Any:
        if self.rounds is not None:
            self.rounds.next.messages.append(dist.P2POp(how, tensor, peer, group=self.group))
            return self.rounds.next
        with self._lost():
            if self._nccl:
                return how(tensor, peer, group=self.group)
            return dist.broadcast(tensor, self.source, group=self.group, async_op=True)

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
            if not self._nccl and self.rounds is None:
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

    def within(self, rounds: Rounds) -> Neighbour:
        return Neighbour(self.up.within(rounds), self.down.within(rounds))

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
