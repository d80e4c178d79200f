"""Messages over NCCL, where each process has a GPU: all of a round in one coalesced call, on one communicator.

A wait holds the stream, not the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay.engine.transport import Lost, Neighbours, Round, Side, Transport, flat
from parlay.link.link import Message


@final
class NcclRound(Round):
    def __init__(self, works: Sequence[Any], buffers: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        self._works, self._buffers = list(works), buffers
        self._sent = sent
        """Kept until the stream has waited."""

    def wait(self) -> list[Tensor]:
        while self._works:
            self._works.pop().wait()
        self._sent = ()
        return list(self._buffers)


@final
class Nccl(Transport):
    def __init__(self, neighbours: Neighbours, device: torch.device, group: Any, stage: int) -> None:
        super().__init__(neighbours, device)
        self.group, self.stage = group, stage
        self._last: list[Round] = []

    def connect(self) -> None:
        """NCCL connects at the first message, and needs a still GPU for it: better before anything runs."""
        number, sides = torch.zeros(1, device=self.device), self.neighbours.sides()
        word = Message((1,), torch.float32)
        self.begin([(side, number) for side in sides], [(side, word) for side in sides]).wait()
        torch.cuda.synchronize(self.device)

    def begin(self, sent: Sequence[tuple[Side, Tensor]], wanted: Sequence[tuple[Side, Message]]) -> Round:
        buffers = [self.buffer(message, self.device) for _, message in wanted]
        gone = [(side, flat(tensor.detach())) for side, tensor in sent]
        ops = [
            dist.P2POp(how, tensor, self.neighbours.of(side)[0], group=self.group)
            for how, side, tensor in [
                *((dist.irecv, side, flat(buffer)) for (side, _), buffer in zip(wanted, buffers, strict=True)),
                *((dist.isend, side, tensor) for side, tensor in gone),
            ]
            if tensor.numel()
        ]
        with Lost(f"stage {self.stage}", "another stage"):
            round_ = NcclRound(dist.batch_isend_irecv(ops) if ops else [], buffers, [tensor for _, tensor in gone])
        self._last = [*self._last[-1:], round_]
        return round_

    def settle(self) -> None:
        for round_ in self._last:
            round_.wait()
        self._last = []
