"""The augmented Lagrangian method (section 2.2.2, appendix B): a multiplier carries the signal, the state stays put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parlay.coupling.base import Coupling, Pair, penalty
from parlay.errors import InputError

MULTIPLIERS = ("hestenes", "printed")


@final
@dataclass(frozen=True)
class AugmentedLagrangian(Coupling):
    """Minimise φ + Σ b ‖λ − x‖² − ⟨κ, λ − x⟩."""

    keeps_multipliers: ClassVar[bool] = True

    beta: float = 3.0  # best of 0.1, 1, 3, 10 in prototypes on ResNet-20, CIFAR-10; not searched again
    multiplier: str = "hestenes"
    """`hestenes`: κ ← κ + a (p − κ), before the state. `printed`: the paper's eq. (20), after it."""
    multiplier_step: float = 1.0
    """a of `hestenes`, η of `printed`."""
    reach: float = 0.25
    """A multiplier counts in full while an output is within this share of its state's size from the state, and beyond
    that less, with the square of the distance.

    It is an adjoint that was taken at the state, and says little of outputs far from it. And s² follows the outputs: as
    they grow the penalty comes to β and no further, while ⟨κ, x⟩ falls without bound. WRN-40-10 ran away so at rates
    from 0.003 to 0.1; with it, it has 64.2 % at 0.1. Small networks that do not run away end as they did
    (results/reach).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiplier not in MULTIPLIERS:
            raise InputError(f"unknown multiplier update '{self.multiplier}': write {' or '.join(MULTIPLIERS)}")
        if not 0 <= self.multiplier_step < float("inf"):
            raise InputError(f"multiplier-step is {self.multiplier_step}: write a number of at least 0")
        if not 0 < self.reach < float("inf"):
            raise InputError(f"reach is {self.reach}: write a number greater than 0")

    def start(self, x: Tensor) -> Pair:
        return Pair(x, torch.zeros_like(x))

    def local_loss(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        state, κ = _both(pair)
        return penalty(x, state, b) + (self._weight(x, state) * (κ * x).flatten(1).sum(1)).sum() / len(x)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        state, κ = _both(pair)
        assert x is not None  # every stage has its turn
        assert p is not None  # at every step
        if self.multiplier == "hestenes":
            # κ ← κ − 2b (λ* − x) with λ* − x = (κ − p) / (2b), eq. (19). The printed factor η/(2β) in place of 2b
            # has the inverse dimension. Multiplier first: full steps then give κ = p and λ = x, at any β.
            if self.multiplier_step == 1:  # the usual case, as it comes out, without a dozen passes over the tensors
                return Pair(self.stepped(state, x, b), p)
            κ = torch.lerp(κ, p, self.multiplier_step)
            state = self.stepped(state, self.displaced(x, p - κ, b, s2), b)
        else:
            state = self.stepped(state, self.displaced(x, p - κ, b, s2), b)
            κ = κ - self.multiplier_step / (2 * b) * (state - x)
        return Pair(state, κ)

    @torch.no_grad()
    def _weight(self, x: Tensor, state: Tensor) -> Tensor:
        """Of the multipliers, sample by sample: min(1, reach ‖λ‖ / ‖λ − x‖)²."""
        moved, size = (torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (x - state, state))
        near: Tensor = self.reach * size / moved
        return near.nan_to_num(nan=1.0).clamp_max(1.0).square()  # 0 / 0 where neither is anything


def _both(pair: Pair) -> tuple[Tensor, Tensor]:
    assert pair.multiplier is not None
    return pair.state, pair.multiplier
