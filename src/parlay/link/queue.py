"""A link whose states live a few steps: a batch streams through it, and its adjoint streams back.

In the slot of a batch lies DS(x), from the pass of stage k-1 until no stage needs it any more: stage k takes it one
step later, and again for its second pass where the method makes one. The adjoint lies in a slot for one step. In one
process both ends use the same slots; over two, each has those that its stage reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from parlay.batch import Pass
from parlay.link.link import Direction, Link, LinkEnd, Message


@final
class Slots:
    """Batches on their way, each in the slot of its number. Feature maps lie channels last, as stages want them.

    `fixed`: all slots are one tensor, addressed by tensors, so that one captured step serves all of them.
    """

    def __init__(self, count: int, rows: int, fixed: bool = False) -> None:
        self.count, self.rows, self.fixed = count, rows, fixed
        self._kept: dict[int, Tensor] = {}
        self._memory: Tensor | None = None

    def put(self, p: Pass, x: Tensor) -> None:
        x = x.detach()
        if self.fixed:
            x = _channels_last(x)
            if self._memory is None:
                self._memory = x.new_zeros(self.count, self.rows, *x.shape[1:])
            self._memory[:, : len(x)].index_copy_(0, self._slot(p), x.unsqueeze(0))
        else:
            self._kept[p.number % self.count] = in_order(x)

    def take(self, p: Pass) -> Tensor:
        if self.fixed:
            assert self._memory is not None
            return _channels_first(self._memory[:, : p.rows].index_select(0, self._slot(p))[0])
        return self._kept[p.number % self.count][: p.rows]

    def _slot(self, p: Pass) -> Tensor:
        assert self._memory is not None
        return p.slots[self.count] if p.slots else torch.tensor([p.number % self.count], device=self._memory.device)

    def tensors(self, name: str) -> dict[str, Tensor]:
        kept: Mapping[int, Tensor] = self._kept
        if self._memory is not None:
            kept = {slot: _channels_first(batch) for slot, batch in enumerate(self._memory)}
        return {f"{name}/{slot}": batch for slot, batch in kept.items()}

    def load(self, name: str, kept: Mapping[str, Tensor], device: torch.device) -> None:
        self._kept, self._memory = {}, None
        for key, batch in kept.items():
            if key.startswith(f"{name}/"):
                slot = int(key.removeprefix(f"{name}/"))
                here = batch.to(device, copy=True)
                if not self.fixed:
                    self._kept[slot] = in_order(here)
                    continue
                lying = _channels_last(here)
                if self._memory is None:
                    self._memory = lying.new_zeros(self.count, self.rows, *lying.shape[1:])
                self._memory[slot, : len(lying)] = lying

    @property
    def bytes(self) -> int:
        return self._memory.nbytes if self._memory is not None else sum(x.nbytes for x in self._kept.values())


@final
class QueueLink(Link):
    def __init__(
        self,
        end: LinkEnd,
        lag: int,
        *,
        pulled: bool = False,
        adjoints: bool = True,
        signal: tuple[int, ...] | None = None,
    ) -> None:
        """`lag` is that of stage k-1. `pulled`: it takes its outputs again. `adjoints`: they come back.

        `signal`: the shape of what comes back for a sample, where that is no adjoint.
        """
        super().__init__(end)
        self.outputs = Slots(max(lag + 1, 2), end.rows, end.fixed)
        self.adjoints = Slots(2, end.rows, end.fixed)
        self.slot_counts = (self.outputs.count, self.adjoints.count)
        self._keeps, self._returns = pulled or end.upper, adjoints
        self._signal = self.small if signal is None else signal
        self._output: Tensor | None = None
        self._adjoint: Tensor | None = None

    def put_output(self, p: Pass, x: Tensor) -> Tensor:
        small = self.down(x)
        self._output = small.detach()
        if self._keeps:
            self.outputs.put(p, small)
        return small

    def input(self, p: Pass, precision: torch.dtype | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        state = self.outputs.take(p).detach().requires_grad_()
        return state, self.up(state)

    def loss(self, p: Pass, x: Tensor, small: Tensor) -> Tensor:  # noqa: ARG002
        return (self.adjoint(p) * small).sum() / p.rows

    def adjoint(self, p: Pass) -> Tensor:
        """What came back for this batch, per sample."""
        return self.adjoints.take(p)

    def put_adjoint(self, p: Pass, gradient: Tensor | None) -> None:
        if gradient is None:  # nothing depends on the state
            gradient = torch.zeros(p.rows, *self.small, device=self.end.device)
        # losses are means, so a sample's share of the gradient is one in `rows`
        self.send_back(p, gradient.float() * p.rows)

    def send_back(self, p: Pass, signal: Tensor) -> None:
        """Per sample."""
        self._adjoint = signal.detach()
        if self.end.lower:
            self.adjoints.put(p, self._adjoint)

    # Between two processes

    def outgoing(self, way: Direction, p: Pass | None) -> list[Tensor]:
        sent = self._output if way is Direction.UP else self._adjoint
        if p is None or (way is Direction.UP) != self.end.lower or not (way is Direction.UP or self._returns):
            return []
        assert sent is not None
        return [sent]

    def incoming(self, way: Direction, p: Pass | None) -> list[Message]:
        if p is None or not (way is Direction.UP or self._returns):
            return []
        if way is Direction.UP:
            return [Message((p.rows, *self.small), self.dtype)]
        return [Message((p.rows, *self._signal), torch.float32)]

    def arrive(self, way: Direction, p: Pass, tensors: list[Tensor]) -> None:
        (self.outputs if way is Direction.UP else self.adjoints).put(p, tensors[0])

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        return self.outputs.tensors("outputs") | self.adjoints.tensors("adjoints")

    def load(self, kept: Mapping[str, Tensor]) -> bool:
        if self._keeps:
            self.outputs.load("outputs", kept, self.end.device)
        if self.end.lower:
            self.adjoints.load("adjoints", kept, self.end.device)
        return True

    @property
    def bytes(self) -> int:
        return self.outputs.bytes + self.adjoints.bytes


def in_order(x: Tensor) -> Tensor:
    """Feature maps channels last: sums over another order round otherwise, after a resume too."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.dim() == 4 else x
