"""Messages over gloo: between processes on CPUs, and on GPUs that several processes share.

A message is a broadcast in a group of two: unlike gloo's send and receive, it says when it is done. So a wait can go in
short slices, in which signals are handled and a lost neighbour is given up. Each way has a group of its own: what goes
up and what goes down never stand in each other's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay.engine.transport import Lost, Neighbours, Round, Side, Transport, Waits, flat
from parlay.link.link import Message

IN_FLIGHT = 8  # messages posted and not yet gone: bounds what a fast stage piles up before a slow one
CPU = torch.device("cpu")


class Ways(NamedTuple):
    """Between this process and a neighbour: a group for what comes, and one for what goes."""

    come: Any
    go: Any


class Post(NamedTuple):
    work: Any
    tensor: Tensor
    """Kept as long as gloo uses it."""
    peer: str


@final
class GlooRound(Round):
    def __init__(
        self,
        posts: Sequence[Post | None],
        buffers: Sequence[Tensor],
        device: torch.device,
        finish: Callable[[Post], None],
    ) -> None:
        self._posts, self._buffers, self._device, self._finish = posts, buffers, device, finish

    def wait(self) -> list[Tensor]:
        for post in self._posts:
            if post is not None:
                self._finish(post)
        return [buffer.to(self._device) for buffer in self._buffers]


@final
class Gloo(Transport):
    def __init__(self, neighbours: Neighbours, device: torch.device, ways: Mapping[Side, Ways], waits: Waits) -> None:
        super().__init__(neighbours, device)
        self.ways, self.waits = ways, waits
        self._rank = dist.get_rank()
        self._sent: deque[Post] = deque()

    def begin(self, sent: Sequence[tuple[Side, Tensor]], wanted: Sequence[tuple[Side, Message]]) -> Round:
        buffers = [self.buffer(message, CPU) for _, message in wanted]
        came = [
            self._post(side, self.ways[side].come, self.neighbours.of(side)[0], flat(buffer))
            if buffer.numel()
            else None
            for (side, _), buffer in zip(wanted, buffers, strict=True)
        ]
        for side, tensor in sent:
            if tensor.numel():
                while self._sent and (len(self._sent) >= IN_FLIGHT or self._sent[0].work.is_completed()):
                    self._finish(self._sent.popleft())
                self._sent.append(self._post(side, self.ways[side].go, self._rank, flat(tensor.detach().to(CPU))))
        return GlooRound(came, buffers, self.device, self._finish)

    def settle(self) -> None:
        while self._sent:
            self._finish(self._sent.popleft())

    def _post(self, side: Side, group: Any, source: int, tensor: Tensor) -> Post:
        peer = f"stage {self.neighbours.of(side)[1]}"
        with Lost(f"stage {self.waits.stage}", peer):
            return Post(dist.broadcast(tensor, source, group=group, async_op=True), tensor, peer)

    def _finish(self, post: Post) -> None:
        with Lost(f"stage {self.waits.stage}", post.peer):
            self.waits.until(post.work.is_completed, post.peer)
            post.work.wait()
