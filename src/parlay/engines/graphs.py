"""CUDA graphs: a step of fixed shapes, recorded once and replayed without the host in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

from torch import Tensor

from parlay.lanes import Graph, Lanes

Inputs = dict[str, Tensor]
WARM = 3  # steps before the recording: lazily made buffers (momentum, workspaces) and compiled code must exist by then


class Step(Protocol):
    def __call__(self, inputs: Inputs, quick: bool = False) -> Tensor:
        """`quick`: the shapes are those of all full batches, so code that is made for them pays."""
        ...


@final
class Graphed:
    """A step as a graph. The first calls run as they are, and count; those that are not `full`, or of other shapes, do.

    So does every call of a step that cannot be recorded: `forget` clears what the attempt has left, `say` tells why.
    `around` is entered for each step of the recorded shapes: what it does there is not recorded.
    """

    def __init__(
        self,
        step: Step,
        full: Callable[[Inputs], bool],
        lanes: Lanes,
        forget: Callable[[], None],
        say: Callable[[str], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.step, self.full, self.forget, self.say, self.around = step, full, forget, say, around
        self.lanes, self.lane = lanes, lanes.lane()
        self.graph: Graph | None = None
        self.inputs: Inputs = {}
        self.output: Tensor | None = None
        self.calls = 0
        self.impossible = False

    def __call__(self, inputs: Inputs) -> Tensor:
        """The step's output, a tensor of its own."""
        if not self.full(inputs) or any(inputs[name].shape != value.shape for name, value in self.inputs.items()):
            with self.lanes.current:
                return self.step(inputs)
        with self.around():
            return self._quickly(inputs)

    def _quickly(self, inputs: Inputs) -> Tensor:
        self.calls += 1
        if self.calls <= WARM or self.impossible or (self.graph is None and not self._record()):
            return self._aside(inputs)
        for name, value in inputs.items():
            self.inputs[name].copy_(value, non_blocking=True)
        assert self.graph is not None
        assert self.output is not None
        self.graph.replay()
        return self.output.clone()

    def _aside(self, inputs: Inputs) -> Tensor:
        """As recording asks for it: on the stream that will record."""
        self.inputs = self.inputs or {name: value.clone() for name, value in inputs.items()}
        outside = self.lanes.current
        self.lane.follow(outside)
        with self.lane, self.lanes.fastest_kernels():
            output = self.step(inputs, quick=True)
        outside.follow(self.lane)
        return output

    def _record(self) -> bool:
        try:
            with self.lanes.capture(self.lane) as graph, self.lanes.fastest_kernels():
                self.output = self.step(self.inputs, quick=True)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self.say(f"steps are not recorded as CUDA graphs: {reason}")
            self.impossible = True
            self.forget()
            return False
        self.graph = graph
        return True
