"""The augmented Lagrangian method (section 2.2.2, appendix B): a multiplier carries the signal, the state stays put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parlay.config.keys import option
from parlay.link.states import Pair, penalty
from parlay.methods.stored import Stored


@dataclass(frozen=True)
class AugmentedLagrangian(Stored):
    """Minimise φ + Σ b ‖λ − x‖² − ⟨κ, λ − x⟩."""

    keeps_multipliers: ClassVar[bool] = True

    # 3 was the best of 0.1, 1, 3, 10 in prototypes on ResNet-20, CIFAR-10; not searched again
    beta: float = option(3.0, "weight of the penalty, or of the pull of replay", form="B", above=0, most=1e12)
    reach: float = option(
        0.25,
        "how far from its state, in units of it, an output still has its multiplier in full",
        form="R",
        above=0,
        most=1e12,
    )
    """Beyond that a multiplier counts less, with the square of the distance.

    It is an adjoint that was taken at the state, and says little of outputs far from it. Without the bound the loss has
    none either, since s² follows the outputs, and wide networks ran away (results/reach).
    """

    def start(self, x: Tensor) -> Pair:
        return Pair(x, torch.zeros_like(x))

    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        λ, κ = pair
        assert κ is not None
        return penalty(x, λ, b) + (self._weight(x, λ) * (κ * x).flatten(1).sum(1)).sum() / len(x)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:  # noqa: ARG002
        """κ ← κ − 2b (λ* − x) with λ* − x = (κ − p) / (2b), eq. (19): κ = p. Then λ* = x − (p − κ) / (2b) = x.

        Multiplier first, and full steps. The paper's eq. (20) has η/(2β) in place of 2b, the inverse dimension.
        """
        assert x is not None  # every stage computes
        assert p is not None  # every sample
        return Pair(x, p)

    @torch.no_grad()
    def _weight(self, x: Tensor, state: Tensor) -> Tensor:
        """Of the multipliers, sample by sample: min(1, reach ‖λ‖ / ‖λ − x‖)²."""
        moved, size = (torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (x - state, state))
        near: Tensor = self.reach * size / moved
        return near.nan_to_num(nan=1.0).clamp_max(1.0).square()  # 0 / 0 where neither is anything
