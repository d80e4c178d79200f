"""A serial step as a pipeline: the batch in micro-batches, which follow each other through the processes (1F1B).

`torch.distributed.pipelining` runs it; here is what it needs to know. The gradient is the mean over the micro-batches,
and so that of the whole batch to rounding, but for batch norm: it normalises over each micro-batch, and its running
statistics take one step per micro-batch. Random numbers inside the network (dropout) are others than in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from parlay.stage import Stage


@final
class Piece(nn.Module):
    """A stage as the pipeline sees it. Feature maps go in and out as they lie in memory, channels last."""

    def __init__(self, stage: Stage, first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self.first, self.last = stage, first, last
        self.module = stage.module

    def forward(self, x: Tensor) -> Any:
        y = self.stage.forward(x if self.first else from_memory(x))
        return y if self.last else in_memory(y)


@final
class Pipeline:
    """Batches of one size through the stages. `taken` and `given` are a micro-batch of this stage's in- and output."""

    def __init__(
        self,
        stage: Stage,
        index: int,
        stages: int,
        group: Any,
        parts: int,
        loss: Callable[[Any, Tensor], Tensor],
        taken: Tensor,
        given: Any,
    ) -> None:
        self.first, self.last = index == 0, index == stages - 1
        piece = Piece(stage, self.first, self.last)
        shapes = (taken if self.first else in_memory(taken), given if self.last else in_memory(given))
        taken, given = (_like(shape) for shape in shapes)
        place = PipelineStage(piece, index, stages, stage.device, input_args=taken, output_args=given, group=group)
        self._schedule = Schedule1F1B(place, parts, loss_fn=loss)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward of a batch; the gradients are in the weights then. The loss, on the last stage."""
        losses: list[Tensor] = []
        if self.first:
            self._schedule.step(inputs, return_outputs=False)
        elif self.last:
            self._schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else None


def in_memory(x: Tensor) -> Tensor:
    """A contiguous tensor, of feature maps in the order in which they lie in memory."""
    return x.permute(0, 2, 3, 1).contiguous() if x.dim() == 4 else x.contiguous()


def from_memory(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.dim() == 4 else x


def _like(x: Any) -> Any:
    """Shape and type alone."""
    if isinstance(x, Tensor):
        return torch.empty_like(x, device="meta", requires_grad=x.is_floating_point())
    return tuple(_like(part) for part in x)
