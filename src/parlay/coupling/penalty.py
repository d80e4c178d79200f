"""The quadratic penalty method (section 2.2.2, appendix B.1): the state alone carries the signal, λ = x − p / (2b).

One tensor does two jobs: it is the input of stage k and the target of stage k-1. In the paper's order (`joint`) both
use it at every visit, and no β is right: with a small one, stage k trains on inputs that the label has moved far away;
with a large one the gradient of stage k-1, p + 2b (x − x_then), is drowned by the second term, the pull back to where
its output was an epoch ago. In the order `red-black` the two take turns: at one visit of a sample its state is an
output, λ = x, and stage k trains on it and displaces it by −p / (2b); at the next it is a target, stage k-1 trains on
it and puts its new output in its place. A displaced state is never an input, so b can be small. Each stage computes
half of the samples of a step, and half as much crosses an interface.

`trust`, `state_step` and `state_rate` are for the joint order alone. There, full state steps are unstable from K = 3
on at any β (tests/test_known_answer.py): only the trust region bounds them, and steps below 1/2 converge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from parlay.coupling.base import Coupling, Pair, penalty
from parlay.data.batches import half
from parlay.errors import InputError

ORDERS = ("red-black", "joint")


@final
@dataclass(frozen=True)
class Penalty(Coupling):
    """Minimise φ + Σ b ‖λ − x‖²."""

    keeps_multipliers: ClassVar[bool] = False

    beta: float = 3.0
    order: str = "red-black"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ORDERS:
            raise InputError(f"unknown order '{self.order}': write {' or '.join(ORDERS)}")

    @property
    def portion(self) -> float:
        return 1.0 if self.order == "joint" else 0.5

    def turn(self, ids: Tensor, epoch: int, stage: int) -> Tensor | None:
        if self.order == "joint":
            return None
        return ((half(ids) + epoch + stage) % 2 == 0).nonzero().squeeze(1)

    def start(self, x: Tensor) -> Pair:
        return Pair(x, None)

    def local_loss(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        return penalty(x, pair.state, b)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        if p is None:  # it was a target; now it is an output again
            assert x is not None
            return Pair(x, None)
        if x is None:  # it was an output, and p is its adjoint right there
            return Pair(pair.state - p / (2 * b), None)
        return Pair(self.stepped(pair.state, self.displaced(x, p, b, s2), b), None)
