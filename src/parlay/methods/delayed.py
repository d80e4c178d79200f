"""Decoupled delayed gradients (DDG; Huo et al. 2018, arXiv 1804.10574): the backward pass of the forward pass itself.

As features replay, but when the adjoint has come it goes back through the activations and weights that the batch met on
its way forward. The gradient is a true one, of weights 2(K-1-k) steps ago, and there is no second forward pass.

Activations are kept, not computed again from kept weights: to save that pass is what the method is for. The weights are
copied for every batch on its way, because the optimiser changes them in place; beside activations they are small.
With `predict` the copies are weights predicted ahead, for both passes (Chen et al., SpecTrain).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from parlay.batch import Batch, Pass
from parlay.link.queue import in_order
from parlay.methods.streamed import Ahead, AheadWorker
from parlay.stage.worker import Place, Worker, copied


@dataclass(frozen=True)
class Delayed(Ahead):
    """Kept activations; the gradient of the weights as they were."""

    def worker(self, place: Place) -> Worker:
        return DelayedWorker(place, self) if self.lag(place.k, place.stages) else AheadWorker(place, self)

    @property
    def can_be_captured(self) -> bool:
        """What autograd keeps from one step to a later one has no fixed place in memory yet."""
        return False


class Saved(NamedTuple):
    """A batch between its two passes."""

    batch: Pass
    state: Tensor
    """A leaf, except at the first stage."""
    small: Tensor
    """DS of the output, with the graph of its making."""
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    """As they were before the pass."""


@final
class DelayedWorker(AheadWorker):
    def __init__(self, place: Place, method: Delayed) -> None:
        super().__init__(place, method)
        self._saved: dict[int, Saved] = {}
        self._activation_bytes = 0

    def forward(self, p: Pass) -> None:
        leaf, x = self.input(p)
        weights, before = self._copies(), copied(self.stage.module.named_buffers())
        y = self._passed(x, p, weights, copied(before.items()), counted=True)
        assert self.after is not None
        self._saved[p.number] = Saved(p, x if leaf is None else leaf, self.after.put_output(p, y), weights, before)

    def loss(self, p: Pass) -> Tensor:
        self._p = self.adjoint(p)
        return (self._p * self._saved[p.number].small.detach()).sum() / p.rows

    def backward(self, p: Pass) -> None:
        saved = self._saved.pop(p.number)
        self.back(saved.small, self._p, p.rows)
        for name, copy in saved.weights.items():
            weight = self.stage.parameters[name]
            if copy.grad is not None:
                weight.grad = copy.grad if weight.grad is None else weight.grad + copy.grad
        self._state = saved.state
        self.answer(p)

    def _copies(self) -> dict[str, Tensor]:
        """The weights of the pass, now or ahead, as leaves that the optimiser will not touch."""
        with torch.no_grad():
            ahead = self.predicted()
            weights = copied((name, ahead.get(name, w)) for name, w in self.stage.parameters.items())
        return {name: w.requires_grad_(self.stage.parameters[name].requires_grad) for name, w in weights.items()}

    def _passed(
        self, x: Tensor, p: Pass, weights: dict[str, Tensor], buffers: dict[str, Tensor], counted: bool
    ) -> Tensor:
        """`counted`: batch statistics follow this pass. They are copies in it: autograd keeps those of a batch norm."""
        if self._activation_bytes:
            y = self.run(x, p, weights | buffers)
        else:
            self._activation_bytes, y = self._weighed(x, p, weights | buffers)
        if counted:
            for name, buffer in self.stage.module.named_buffers():
                buffer.copy_(buffers[name])
        return y

    def _weighed(self, x: Tensor, p: Pass, weights: dict[str, Tensor]) -> tuple[int, Tensor]:
        """The first batch also shows how much autograd keeps of it."""
        seen: dict[int, int] = {}
        own = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}

        def look(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return saved.detach()

        with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
            y = self.run(x, p, weights)
        return sum(seen.values()), y

    def tensors(self) -> dict[str, Tensor]:
        """Activations come back from the saved input and weights, bit for bit."""
        found = super().tensors()
        for number, saved in self._saved.items():
            p = saved.batch
            found[f"saved/{number}/pass"] = torch.tensor([p.rows, p.batch.seed, p.batch.epoch, p.batch.step])
            found[f"saved/{number}/state"] = saved.state.detach()
            found |= {f"saved/{number}/weights/{name}": weight.detach() for name, weight in saved.weights.items()}
            found |= {f"saved/{number}/buffers/{name}": buffer for name, buffer in saved.buffers.items()}
        return found

    def load(self, kept: Mapping[str, Tensor]) -> None:
        super().load(kept)
        self.stage.module.train()
        numbers = [int(key.split("/")[1]) for key in kept if key.startswith("saved/") and key.endswith("/pass")]
        self._saved = {number: self._rebuilt(number, kept) for number in numbers}

    def _rebuilt(self, number: int, kept: Mapping[str, Tensor]) -> Saved:
        rows, seed, epoch, step = kept[f"saved/{number}/pass"].tolist()
        ids = torch.zeros(rows, dtype=torch.int64)
        p = Pass(Batch(ids, epoch, step, 1.0, seed), number, ids, ids, whole=rows)
        weights = {
            name: torch.empty_like(weight)
            .copy_(kept[f"saved/{number}/weights/{name}"])
            .requires_grad_(weight.requires_grad)
            for name, weight in self.stage.parameters.items()
        }
        buffers = {  # older checkpoints have none
            name: torch.empty_like(buffer).copy_(kept.get(f"saved/{number}/buffers/{name}", buffer))
            for name, buffer in self.stage.module.named_buffers()
        }
        state = in_order(kept[f"saved/{number}/state"].to(self.stage.device, copy=True))
        x = state if self.before is None else self.before.up(state.requires_grad_())
        self.seed(p.batch, None)
        assert self.after is not None
        y = self._passed(x, p, weights, copied(buffers.items()), counted=False)
        return Saved(p, state, self.after.down(y), weights, buffers)

    @property
    def bytes(self) -> int:
        """What is kept at most: graph and weights of every batch on its way."""
        weights = sum(weight.nbytes for weight in self.stage.parameters.values())
        return super().bytes + (self.lag + 1) * (self._activation_bytes + weights)
