"""A step as one CUDA graph: captured once, replayed without the host in between.

Whatever can go wrong, and what follows:

- A batch of another shape than that of the capture, a method that cannot be captured: the step runs eagerly.
- Something in the network waits for the host, or fails otherwise inside the capture: one line says so, nothing of the
  attempt is kept, and all steps run eagerly.
- A number in the step is baked into the graph. So rate, β, ids and slots are tensors, and all inputs of a step reach
  the device as one piece.
- What the capture would find already done (low-precision copies of weights that are fresh) would not be in the graph:
  `prepare` makes it due again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from parlay.lanes import Graph, Lanes

Inputs = dict[str, Tensor]
WARM = 3  # steps before the capture: lazily made buffers (momentum, workspaces) and compiled code must exist by then
WORD = 8  # bytes that a part of the inputs begins at a multiple of


class Step(Protocol):
    def __call__(self, inputs: Inputs, compiled: bool = False) -> Tensor: ...


class Part(NamedTuple):
    """Where a tensor lies among the inputs."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


Layout = tuple[Part, ...]


def packed(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
    """All inputs in one piece: one copy takes them to the device."""
    layout = tuple(Part(name, value.shape, value.dtype) for name, value in inputs.items())
    piece = torch.zeros(sum(_words(part) for part in layout) * WORD, dtype=torch.uint8)
    for (_, begin, end), value in zip(_places(layout), inputs.values(), strict=True):
        piece[begin:end] = value.contiguous().view(-1).view(torch.uint8)
    return piece, layout


def unpacked(piece: Tensor, layout: Layout) -> Inputs:
    """Views."""
    return {p.name: piece[begin:end].view(p.dtype).view(p.shape) for p, begin, end in _places(layout)}


def _places(layout: Layout) -> list[tuple[Part, int, int]]:
    found, begin = [], 0
    for part in layout:
        found.append((part, begin, begin + math.prod(part.shape) * part.dtype.itemsize))
        begin += _words(part) * WORD
    return found


def _words(part: Part) -> int:
    return -(-math.prod(part.shape) * part.dtype.itemsize // WORD)


@final
class Captured:
    """The first three full batches run eagerly, as does any batch whose shape differs from the captured one."""

    def __init__(
        self,
        step: Step,
        lanes: Lanes,
        prepare: Callable[[], None],
        forget: Callable[[], None],
        say: Callable[[str], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`around` is entered for each step of the captured shapes: what it does there is not captured."""
        self.step, self.prepare, self.forget, self.say, self.around = step, prepare, forget, say, around
        self.lanes, self.lane = lanes, lanes.lane()
        self.graph: Graph | None = None
        self.piece: Tensor | None = None
        self.layout: Layout = ()
        self.output: Tensor | None = None
        self.calls = 0
        self.impossible = False

    def __call__(self, inputs: Inputs, full: bool) -> Tensor:
        """The step's output, a tensor of its own. `full`: the batch has the shape of most."""
        piece, layout = packed(inputs)
        piece = self.lanes.send(piece)
        if not full or (self.layout and layout != self.layout):
            with self.lanes.current:
                return self.step(unpacked(piece, layout))
        with self.around():
            return self._full(piece, layout)

    def _full(self, piece: Tensor, layout: Layout) -> Tensor:
        self.calls += 1
        self.layout = layout
        if self.calls <= WARM or self.impossible or (self.graph is None and not self._capture(piece)):
            return self._aside(unpacked(piece, layout))
        assert self.graph is not None
        assert self.piece is not None
        assert self.output is not None
        self.piece.copy_(piece, non_blocking=True)
        self.graph.replay()
        return self.output.clone()

    def _aside(self, inputs: Inputs) -> Tensor:
        """As a capture asks for it: in the lane that will capture."""
        outside = self.lanes.current
        self.lane.follow(outside)
        with self.lane, self.lanes.fastest_kernels():
            output = self.step(inputs, compiled=True)
        outside.follow(self.lane)
        return output

    def _capture(self, piece: Tensor) -> bool:
        self.prepare()
        self.piece = piece.clone()
        inputs: Any = unpacked(self.piece, self.layout)
        try:
            with self.lanes.capture(self.lane) as graph, self.lanes.fastest_kernels():
                self.output = self.step(inputs, compiled=True)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self.say(f"steps are not captured as CUDA graphs: {reason}")
            self.impossible, self.output = True, None
            self.forget()
            return False
        self.graph = graph
        return True
