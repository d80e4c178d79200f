"""The whole network as a chain: full-size outputs go up along the processes, gradients come back down.

For serial steps, evaluations and the pass that sets the states. In one process it is a loop over the stages.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parlay import signs
from parlay.engine.own import Own
from parlay.engine.transport import Side, Transport
from parlay.stage.norms import JointNorms
from parlay.timeline import Recorder

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


@final
class Chain:
    def __init__(self, own: Own, transport: Transport | None = None, timeline: int = 0) -> None:
        """`timeline`: steps of an epoch whose spans are recorded."""
        self.own, self._transport = own, transport
        self.recorder = Recorder(own.world.rank, timeline > 0)
        self.shape = own.shapes[own.range[0] - 1] if not own.first else ()
        """Of a sample that comes from the stage before."""
        self.dtype = torch.float32
        self.norms: list[JointNorms] = []
        self.number = -1
        """Of the step, for the spans."""
        if transport is not None:
            self._tell_types()

    def _tell_types(self) -> None:
        """One sample goes along the stages: in mixed precision nobody knows beforehand which type they put out."""
        own = self.own
        x = own.feed.batch(torch.zeros(1, dtype=torch.int64))[0] if own.first else torch.empty(0)
        if not own.first:
            told = self.receive_tensor(Side.BEFORE, (1,), torch.int64)
            self.dtype = DTYPES[int(told)]
            x = torch.zeros(1, *self.shape, dtype=self.dtype, device=own.device)
        for stage in own.stages:
            stage.module.eval()
        with torch.no_grad():
            y: Any = x
            for k, stage in enumerate(own.stages, own.range[0]):
                y = stage.forward(y)
                for link in own.links:
                    if link.k == k + 1:
                        link.dtype = y.dtype
        for link in own.links:
            if link.k == own.range[0]:
                link.dtype = self.dtype
        if not own.last:
            self.send_tensor(Side.AFTER, torch.tensor([DTYPES.index(y.dtype)], device=own.device))

    def forward(self, x: Tensor) -> Any:
        """Through the network. The result is that of the network on the last process, of the own stages elsewhere."""
        signs.beat()
        y: Any = x if self.own.first else self.receive(len(x))
        for norms in self.norms:  # each replica sees all samples
            norms.on = False
        try:
            for stage in self.own.stages:
                y = stage.forward(y)
        finally:
            for norms in self.norms:
                norms.on = True
        if not self.own.last:
            self.send(y)
        return y

    def send(self, y: Tensor) -> None:
        self.send_tensor(Side.AFTER, y)

    def receive(self, rows: int) -> Tensor:
        return self.receive_tensor(Side.BEFORE, (rows, *self.shape), self.dtype)

    def send_back(self, gradient: Tensor) -> None:
        self.send_tensor(Side.BEFORE, gradient)

    def receive_back(self, y: Tensor) -> Tensor:
        """The gradient of y, which went to the stage after."""
        return self.receive_tensor(Side.AFTER, tuple(y.shape), y.dtype)

    def send_tensor(self, side: Side, tensor: Tensor) -> None:
        assert self._transport is not None
        with self.recorder.span("send", self.number):
            self._transport.send(side, tensor)

    def receive_tensor(self, side: Side, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._transport is not None
        with self.recorder.span("wait", self.number):
            return self._transport.receive(side, shape, dtype)
