"""Methods that keep a state for every sample, for an epoch.

    λ  state        what stage k takes as its input
    κ  multiplier   the Lagrange multiplier of the link, or None
    x  output       what stage k-1 puts out
    p  adjoint      gradient of stage k's loss with respect to λ, per sample
    b  stiffness    of the penalty b ‖λ − x‖², the same for all samples of a link

All tensors are those that are stored and sent: where a filter is in use, the small ones.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parlay.config.keys import option
from parlay.link.link import LinkEnd
from parlay.link.states import Pair, StateLink
from parlay.methods.method import Method

TINY = 1e-12
SIDE = 8  # pixels: between the digits' 4 and 2 and the 16 and 8 of CIFAR, downsampled by 2
DETAIL = 0.3  # results/detail


@dataclass(frozen=True)
class Stored(Method):
    slack: ClassVar[int] = 1
    keeps_multipliers: ClassVar[bool]

    beta: float
    """Weight of the penalty, relative to the size of the features: one β serves every network and link."""
    beta_final: float | None = option(
        None, "weight in the last epoch: it grows geometrically", form="B", above=0, most=1e12
    )
    """None: constant."""
    detail: float | None = option(
        None,
        "weight of what downsampling leaves out; 1 is the paper's, 0.3 the default from 8 x 8 kept pixels on",
        form="W",
        least=0,
        most=1e12,
    )
    """Of ‖x − US(DS(x))‖². With 1 the whole penalty is the paper's, ψ(US(Λ), x).

    Without it the stage after learns on smooth features and meets rough ones in the whole network; with 1 the stage
    before is held back (results/detail). On maps of a few pixels nearly all that is there is detail.
    None: `DETAIL` where a small map has at least `SIDE` pixels a side, and 0 below.
    """

    def link(self, end: LinkEnd) -> StateLink:
        return StateLink(end, self)

    def weight(self, epoch: int, epochs: int) -> float:
        """β of an epoch: constant, or geometric from `beta` to `beta_final`."""
        if self.beta_final is None or epochs < 2:
            return self.beta
        return float(self.beta * (self.beta_final / self.beta) ** (epoch / (epochs - 1)))

    @property
    def keeps(self) -> int:
        return 2 if self.keeps_multipliers else 1

    # What a link asks

    def detail_of(self, small: tuple[int, ...]) -> float:
        """The weight of the detail at a cut where samples of this shape are kept."""
        if self.detail is not None:
            return self.detail
        return DETAIL if min(small[1:], default=0) >= SIDE else 0.0

    def stiffness(self, weight: Tensor, elements: int, s2: Tensor) -> Tensor:
        """b = β / (D s²); the samples have D elements, of the mean square s²."""
        return weight / (elements * s2).clamp_min(TINY)

    @abstractmethod
    def start(self, x: Tensor) -> Pair:
        """State and multiplier for outputs x of a pass through the whole network."""

    @abstractmethod
    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        """What stage k-1 minimises in the place of the network's loss: a mean over the samples."""

    @abstractmethod
    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        """The pair after a step, from outputs and adjoints.

        x is None where stage k-1 has not computed these samples, p where stage k has not.
        """
