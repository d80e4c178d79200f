"""The quadratic penalty method (section 2.2.2, appendix B.1): the state alone carries the signal, λ = x − p / (2b).

One tensor does two jobs: it is the input of stage k and the target of stage k-1. In the paper's order both use it at
every step, and no β is right: with a small one, stage k trains on inputs that the label has moved far away; with a
large one the gradient of stage k-1, p + 2b (x − x_then), is drowned by the pull back to where its output was an epoch
ago. Here the two take turns, red and black: in one epoch the state of a sample is an output, λ = x, and stage k trains
on it and displaces it by −p / (2b); in the next it is a target, stage k-1 trains on it and puts its new output in its
place. A displaced state is never an input, so b can be small. Each stage computes half of the samples of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parlay.config.keys import option
from parlay.data.batches import half
from parlay.link.states import Pair, penalty
from parlay.methods.stored import Stored


@dataclass(frozen=True)
class Penalty(Stored):
    """Minimise φ + Σ b ‖λ − x‖²."""

    keeps_multipliers: ClassVar[bool] = False

    beta: float = option(3.0, "weight of the penalty, or of the pull of replay", form="B", above=0, most=1e12)

    @property
    def computed(self) -> float:
        return 0.5

    def share(self, ids: Tensor, epoch: int, stage: int) -> Tensor | None:
        return ((half(ids) + epoch + stage) % 2 == 0).nonzero().squeeze(1)

    def start(self, x: Tensor) -> Pair:
        return Pair(x, None)

    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        return penalty(x, pair.state, b)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:  # noqa: ARG002
        if p is None:  # it was a target; now it is an output again
            assert x is not None
            return Pair(x, None)
        assert x is None
        return Pair(pair.state - p / (2 * b), None)  # it was an output, and p is its adjoint right there
