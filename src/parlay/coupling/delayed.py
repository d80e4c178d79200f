"""Decoupled delayed gradients (DDG; Huo et al. 2018, arXiv 1804.10574): the backward pass of the forward pass itself.

As features replay, but when the adjoint has come it goes back through the activations and weights that the batch met
on its way forward. The gradient is a true one, of weights 2(K-1-k) steps ago, and there is no second forward pass.

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

from parlay.coupling.streaming import Late, LateStation, Sent, Site, Station, Visit, answer, backward, copied


@final
@dataclass(frozen=True)
class Delayed(Late):
    """Kept activations; the gradient of the weights as they were."""

    def station(self, site: Site) -> Station:
        return Delaying(site, self)

    @property
    def recordable(self) -> bool:
        """What autograd keeps from one step to a later one has no fixed place in memory."""
        return False


class Kept(NamedTuple):
    """A batch between its two passes."""

    visit: Visit
    state: Tensor
    """What had arrived; a leaf, except at the first stage."""
    output: Tensor
    """With the graph of its making."""
    roughness: Tensor | None
    weights: dict[str, Tensor]


@final
class Delaying(LateStation):
    def __init__(self, site: Site, method: Delayed) -> None:
        super().__init__(site, method)
        self.kept: dict[int, Kept] = {}
        self.activation_bytes = 0

    def step(self, forth: Visit | None, features: Tensor | None, back: Visit | None, adjoint: Tensor | None) -> Sent:
        if self.lag == 0:
            return self.at_once(forth, features, self.method.shrink) if forth and features is not None else Sent()
        output = None
        if forth and features is not None:
            self.kept[int(forth.slot)] = self._forward(forth, features, self._copies(), counted=True)
            output = self.kept[int(forth.slot)].output.detach()
        if back is None or adjoint is None:
            return Sent(output)
        p, loss = self._backward(self.kept.pop(int(back.slot)), adjoint)
        return Sent(output, p, loss, trained=True)

    def _copies(self) -> dict[str, Tensor]:
        """The weights of the pass, now or ahead, as leaves that the optimiser will not touch."""
        with torch.no_grad():
            ahead = self.predicted()
            weights = copied((name, ahead.get(name, w)) for name, w in self.stage.parameters.items())
        return {name: w.requires_grad_(self.stage.parameters[name].requires_grad) for name, w in weights.items()}

    def _forward(self, forth: Visit, features: Tensor, weights: dict[str, Tensor], counted: bool) -> Kept:
        """`counted`: batch statistics follow this pass. They are copies in it: autograd keeps those of a batch norm."""
        state = self.state(features)
        buffers = copied(self.stage.module.named_buffers())
        if self.activation_bytes == 0:
            self.activation_bytes, whole = self._weighed(state, forth.seed, weights | buffers)
        else:
            whole = self.pass_through(self.up(state), forth.seed, weights | buffers)
        x = self.down(whole)
        if counted:
            for name, buffer in self.stage.module.named_buffers():
                buffer.copy_(buffers[name])
        return Kept(forth, state, x, self.roughness(whole, x), weights)

    def _weighed(self, state: Tensor, seed: int | None, instead: dict[str, Tensor]) -> tuple[int, Tensor]:
        """The first batch also shows how much autograd keeps of it."""
        seen: dict[int, int] = {}
        own = {tensor.untyped_storage().data_ptr() for tensor in instead.values()}

        def look(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return saved.detach()

        with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
            x = self.pass_through(self.up(state), seed, instead)
        return sum(seen.values()), x

    def _backward(self, kept: Kept, adjoint: Tensor) -> tuple[Tensor | None, Tensor]:
        p, rows = adjoint.to(kept.output.device), kept.visit.rows
        backward(kept.output, p / rows, kept.roughness)
        for name, copy in kept.weights.items():
            weight = self.stage.parameters[name]
            if copy.grad is not None:
                weight.grad = copy.grad if weight.grad is None else weight.grad + copy.grad
        loss = (p * kept.output.detach()).sum() / rows
        return answer(kept.state, rows, self.method.shrink), loss

    def queued(self) -> dict[str, Tensor]:
        """Activations come back from the kept input and weights, bit for bit."""
        found = super().queued()
        for slot, kept in self.kept.items():
            found[f"kept/{slot}/visit"] = torch.tensor([kept.visit.rows, kept.visit.seed or 0])
            found[f"kept/{slot}/state"] = kept.state.detach()
            found |= {f"kept/{slot}/weights/{name}": weight.detach() for name, weight in kept.weights.items()}
        return found

    def load_queued(self, kept: Mapping[str, Tensor]) -> None:
        super().load_queued(kept)
        self.stage.module.train()
        self.kept = {int(key.split("/")[1]): self._rebuilt(key, kept) for key in kept if key.endswith("/visit")}

    def _rebuilt(self, key: str, kept: Mapping[str, Tensor]) -> Kept:
        prefix = key.removesuffix("visit")
        rows, seed = kept[key].tolist()
        slot = torch.tensor([int(prefix.split("/")[1])])
        weights = {
            name: torch.empty_like(weight).copy_(kept[f"{prefix}weights/{name}"]).requires_grad_(weight.requires_grad)
            for name, weight in self.stage.parameters.items()
        }
        state = kept[f"{prefix}state"].to(self.stage.device, copy=True)
        return self._forward(Visit(rows, slot, seed), state, weights, counted=False)

    @property
    def bytes(self) -> int:
        """What is kept at most: graph and weights of every batch on its way."""
        weights = sum(weight.nbytes for weight in self.stage.parameters.values())
        return super().bytes + (self.lag + 1 if self.lag else 0) * (self.activation_bytes + weights)
