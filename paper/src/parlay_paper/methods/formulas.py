"""The paper's steps and penalties, where they differ from those that Parlay has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parlay.config.keys import option
from parlay.methods.stored import TINY, Stored

FORMS = ("relative", "mean", "sum")
_LARGEST: dict[str, Any] = {"above": 0, "most": 1e30}


@dataclass(frozen=True)
class Printed(Stored):
    form: str = option("relative", "size of the penalty: relative to the features, mean, or the paper's sum", FORMS)
    state_step: float = option(1.0, "α of λ ← λ + α (λ* − λ)", form="A", least=0, most=1)
    """1 solves the local problem for the state."""
    state_rate: float | None = option(None, "η of the paper's eq. (18), in the place of α", form="H", **_LARGEST)
    """Of its gradient step: α = 2bη."""
    trust: float = option(1.0, "largest displacement of a state, in units of its size", form="T", **_LARGEST)
    """τ: the displacement of a state from the output has a root mean square of at most τ s."""

    def stiffness(self, weight: Tensor, elements: int, s2: Tensor) -> Tensor:
        if self.form == "sum":  # the paper's ψ = ‖λ − x‖²
            return weight
        return weight / elements if self.form == "mean" else super().stiffness(weight, elements, s2)

    def displaced(self, x: Tensor, pull: Tensor, b: Tensor, s2: Tensor) -> Tensor:
        """λ* = x − pull / (2b), the displacement cut to the trust region, sample by sample."""
        d = pull / (2 * b)
        rms = d.flatten(1).square().mean(1).sqrt()
        cut = (self.trust * s2.sqrt() / rms.clamp_min(TINY)).clamp_max(1.0)
        return x - d * cut.view(-1, *[1] * (d.dim() - 1))

    def stepped(self, state: Tensor, minimiser: Tensor, b: Tensor) -> Tensor:
        """λ + α (λ* − λ)."""
        if self.state_rate is None:
            return minimiser if self.state_step == 1 else torch.lerp(state, minimiser, self.state_step)
        return torch.lerp(state, minimiser, 2 * b * self.state_rate)
