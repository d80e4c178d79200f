"""A serial step as a pipeline: the batch in micro-batches, which follow each other through the processes (1F1B).

`torch.distributed.pipelining` runs it; here is what it needs to know. The gradient is the mean over the micro-batches,
and so that of the whole batch to rounding, but for batch norm: it normalises over each micro-batch, and its running
statistics take one step per micro-batch. Random numbers inside the network (dropout) are others than in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from parlay.stage.stage import Stage


@final
class Piece(nn.Module):
    """Own stages in a row, as the pipeline sees them. Feature maps go in and out as they lie in memory."""

    def __init__(self, stages: Sequence[Stage], first: bool, last: bool) -> None:
        super().__init__()
        self.stages, self.first, self.last = list(stages), first, last
        self.modules_of_stages = nn.ModuleList([stage.module for stage in stages])

    def forward(self, x: Tensor) -> Any:
        y: Any = x if self.first else from_memory(x)
        for stage in self.stages:
            y = stage.forward(y)
        return y if self.last else in_memory(y)


@final
class Pipeline:
    """Batches of one size through the stages. `taken` and `given` are what goes in and out of them here, a part's."""

    def __init__(
        self,
        stages: Sequence[Stage],
        position: int,
        processes: int,
        group: Any,
        parts: int,
        loss: Callable[[Any, Tensor], Tensor],
        taken: Tensor,
        given: Any,
        schedule: Any = Schedule1F1B,
    ) -> None:
        self.first, self.last = position == 0, position == processes - 1
        piece, device = Piece(stages, self.first, self.last), stages[0].device
        shapes = (taken if self.first else in_memory(taken), given if self.last else in_memory(given))
        taken, given = (_like(shape) for shape in shapes)
        place = PipelineStage(piece, position, processes, device, input_args=taken, output_args=given, group=group)
        self._schedule = schedule(place, parts, loss_fn=loss)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward of a batch; the gradients are in the weights then. The loss, on the last stage."""
        losses: list[Tensor] = []
        given: tuple[Tensor, ...] = (inputs,) if self.first else ()
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self._schedule.step(*given, return_outputs=False, **wanted)
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
