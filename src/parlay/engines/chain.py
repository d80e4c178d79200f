"""Along the stages: full-size outputs up, gradients down, in their own type. For serial steps and evaluations."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from parlay.engines.links import Arrival, Neighbour
from parlay.timeline import Recorder

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


@final
class Chain:
    """This process's place in the chain. `shape` is that of a sample that comes from the stage before."""

    def __init__(
        self, before: Neighbour | None, behind: Neighbour | None, shape: tuple[int, ...], recorder: Recorder
    ) -> None:
        self.before, self.behind, self.shape = before, behind, shape
        self.dtype = torch.float32
        """Of what comes from the stage before; mixed precision may put out another one."""
        self._recorder = recorder
        self._introduced = [before is None, behind is None]

    def send(self, y: Tensor, step: int) -> None:
        """To the stage behind; the first time with word of its type."""
        assert self.behind is not None
        with self._recorder.span("send", step):
            if not self._introduced[1]:
                self._introduced[1] = True
                self.behind.up.send(torch.tensor([DTYPES.index(y.dtype)], device=y.device))
            self.behind.up.send(y)

    def receive(self, samples: int, step: int) -> Tensor:
        assert self.before is not None
        if not self._introduced[0]:
            self._introduced[0] = True
            self.dtype = DTYPES[int(self._awaited(self.before.up.receive((1,), torch.int64), step))]
        return self._awaited(self.before.up.receive((samples, *self.shape), self.dtype), step)

    def send_back(self, gradient: Tensor) -> None:
        assert self.before is not None
        self.before.down.send(gradient)

    def receive_back(self, y: Tensor, step: int) -> Tensor:
        """The gradient of y, which went to the stage behind."""
        assert self.behind is not None
        return self._awaited(self.behind.down.receive(tuple(y.shape), y.dtype), step)

    def _awaited(self, arrival: Arrival, step: int) -> Tensor:
        with self._recorder.span("wait", step):
            return arrival.wait()
