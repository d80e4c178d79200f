"""The quadratic penalty method (section 2.2.2, appendix B.1): the state alone carries the signal, λ = x − p / (2b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parlay.coupling.base import Coupling, Pair, penalty


@final
@dataclass(frozen=True)
class Penalty(Coupling):
    """Minimise φ + Σ b ‖λ − x‖²."""

    keeps_multipliers: ClassVar[bool] = False

    beta: float = 100.0
    trust: float = 0.3
    transport: int = 0

    def start(self, x: Tensor, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        return Pair(x if p is None else self.displaced(x, p, b, s2), None)

    def local_loss(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        state = pair.state
        if self.transport:
            with torch.no_grad():
                dims = [0, *range(2, x.dim())]
                state = (state - state.mean(dims, keepdim=True)) / state.std(dims, keepdim=True).clamp_min(1e-6)
                state = state * x.std(dims, keepdim=True) + x.mean(dims, keepdim=True)
        return penalty(x, state, b)

    def update(self, pair: Pair, x: Tensor, p: Tensor, b: Tensor, s2: Tensor) -> Pair:
        minimiser = self.displaced(x, p, b, s2)
        return Pair(self.stepped(pair.state, minimiser, b), None)
