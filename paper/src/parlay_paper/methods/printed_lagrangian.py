"""The augmented Lagrangian with steps of any length, and with the multiplier as the paper prints it (appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parlay.config.keys import option
from parlay.link.states import Pair
from parlay.methods.augmented_lagrangian import AugmentedLagrangian
from parlay_paper.methods.formulas import Printed

MULTIPLIERS = ("printed", "hestenes")


@final
@dataclass(frozen=True)
class PrintedLagrangian(Printed):
    """Minimise φ + Σ b ‖λ − x‖² − ⟨κ, λ − x⟩."""

    keeps_multipliers: ClassVar[bool] = True

    beta: float = option(3.0, "weight of the penalty", form="B", above=0, most=1e12)
    multiplier: str = option("printed", "the paper's eq. (20), or hestenes: κ ← κ + a (p − κ)", MULTIPLIERS)
    """`hestenes` comes before the state, `printed` after it."""
    multiplier_step: float = option(1.0, "η of printed, a of hestenes", form="A", least=0, most=1e30)
    reach: float = option(0.25, "as of method al", form="R", above=0, most=1e12)

    def start(self, x: Tensor) -> Pair:
        return Pair(x, torch.zeros_like(x))

    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        return AugmentedLagrangian(reach=self.reach).objective(x, pair, b)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        state, κ = pair
        assert κ is not None
        assert x is not None  # every stage computes
        assert p is not None  # every sample
        if self.multiplier == "printed":
            state = self.stepped(state, self.displaced(x, p - κ, b, s2), b)
            return Pair(state, κ - self.multiplier_step / (2 * b) * (state - x))
        if self.multiplier_step == 1:  # comes out so, without a dozen passes over the tensors
            return Pair(self.stepped(state, x, b), p)
        κ = torch.lerp(κ, p, self.multiplier_step)
        return Pair(self.stepped(state, self.displaced(x, p - κ, b, s2), b), κ)
