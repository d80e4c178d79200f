"""The quadratic penalty method as it is printed (section 2.2.2, appendix B.1): both stages use a state at every step.

No β is right: with a small one, stage k trains on inputs that the label has moved far away; with a large one the
gradient of stage k-1, p + 2b (x − x_then), is drowned by the pull back to where its output was an epoch ago. From three
stages on, full state steps are unstable at any β (tests/test_joint_penalty.py): only the trust region bounds them, and
steps below 1/2 converge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from parlay.config.keys import option
from parlay.link.states import Pair, penalty
from parlay_paper.methods.formulas import Printed


@final
@dataclass(frozen=True)
class JointPenalty(Printed):
    """Minimise φ + Σ b ‖λ − x‖²."""

    keeps_multipliers: ClassVar[bool] = False

    beta: float = option(3.0, "weight of the penalty", form="B", above=0, most=1e12)

    def start(self, x: Tensor) -> Pair:
        return Pair(x, None)

    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        return penalty(x, pair.state, b)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        assert x is not None  # every stage computes
        assert p is not None  # every sample
        return Pair(self.stepped(pair.state, self.displaced(x, p, b, s2), b), None)
