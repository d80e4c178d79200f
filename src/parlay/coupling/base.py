"""How two neighbouring stages are joined: the small interface that every method implements.

    λ  state        what stage k takes as its input, per sample
    κ  multiplier   the Lagrange multiplier of the interface, or None
    x  output       what stage k-1 puts out
    p  adjoint      gradient of stage k's local loss with respect to λ, per sample
    b  stiffness    of the penalty b ‖λ − x‖², the same for all samples of an interface

All tensors are those that are stored and sent: where a filter is in use, the small ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from parlay.errors import InputError

FORMS = ("relative", "mean", "sum")
TINY = 1e-12
SIDE = 8  # pixels: between the digits' 4 and 2 and the 16 and 8 of CIFAR, downsampled by 2
DETAIL = 0.3


class Pair(NamedTuple):
    """The auxiliary variables of a batch at one interface."""

    state: Tensor
    multiplier: Tensor | None

    def of(self, turn: Tensor | None) -> Pair:
        """Those of the samples at the given positions of the batch; None: of all."""
        if turn is None:
            return self
        turn = turn.to(self.state.device)
        return Pair(self.state[turn], None if self.multiplier is None else self.multiplier[turn])

    def copy(self) -> Pair:
        return Pair(self.state.clone(), None if self.multiplier is None else self.multiplier.clone())

    def put(self, turn: Tensor, new: Pair) -> None:
        """Replace those at the given positions."""
        turn = turn.to(self.state.device)
        self.state.index_copy_(0, turn, new.state)
        if self.multiplier is not None and new.multiplier is not None:
            self.multiplier.index_copy_(0, turn, new.multiplier)

    def float(self) -> Pair:
        """In single precision, whatever they are stored in."""
        return Pair(self.state.float(), None if self.multiplier is None else self.multiplier.float())


@dataclass(frozen=True)
class Coupling(ABC):
    """A method: what it keeps per sample, its local loss, its update. One file per method."""

    keeps_multipliers: ClassVar[bool]

    beta: float
    form: str = "relative"
    state_step: float = 1.0
    """α of λ ← λ + α (λ* − λ): 1 solves the local problem for the state."""
    state_rate: float | None = None
    """η of the paper's gradient step, eq. (18): α = 2bη. Replaces `state_step` where it is given."""
    trust: float = 1.0
    """τ: the displacement of a state from the output has a root mean square of at most τ s."""
    detail: float | None = None
    """Weight of what DS leaves out, ‖x − US(DS(x))‖². With 1 the whole penalty is the paper's, ψ(US(Λ), x).

    Without it the stage after learns on smooth features and meets rough ones in the whole network: 82.5 % in place of
    84.4 % (results/resnet20). With 1 the stage before is held back: at weight decay 1e-3, 0.3 was better on each of six
    seeds, 85.9 against 84.8 % in the mean. On maps of a few pixels nearly all that is there is detail, which 1 flattens
    (digits, 8 x 8: 15.3 %, with 0 93.9 %).
    None: `DETAIL` where a small map has at least `SIDE` pixels a side, and 0 below.
    """
    shrink: float = 1.0
    """Factor on an adjoint that crosses an interface: the signal is old when it is used (Zhuang et al., FDG)."""
    beta_final: float | None = None
    """β of the last epoch; it grows geometrically from `beta`. None: constant."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InputError(f"unknown form of the penalty '{self.form}': write one of {', '.join(FORMS)}")
        positive = {
            "beta": self.beta,
            "trust": self.trust,
            "shrink": self.shrink,
            "beta-final": self.beta_final,
            "state-rate": self.state_rate,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}: write a number greater than 0")
        if self.detail is not None and not 0 <= self.detail < float("inf"):
            raise InputError(f"detail is {self.detail}: write a number of at least 0")
        if not 0 <= self.state_step <= 1:
            raise InputError(f"state-step is {self.state_step}: write a number between 0 and 1")

    def beta_at(self, epoch: int, epochs: int) -> float:
        """β of an epoch: constant, or geometric from `beta` to `beta_final`."""
        if self.beta_final is None or epochs < 2:
            return self.beta
        return float(self.beta * (self.beta_final / self.beta) ** (epoch / (epochs - 1)))

    def detail_of(self, small: tuple[int, ...]) -> float:
        """The weight of the detail at a cut where samples of this shape are kept."""
        if self.detail is not None:
            return self.detail
        return DETAIL if min(small[1:], default=0) >= SIDE else 0.0

    def stiffness(self, beta: Tensor, elements: int, s2: Tensor) -> Tensor:
        """b of the penalty b ‖λ − x‖²; the samples have D = `elements` elements, of the mean square s²."""
        if self.form == "sum":  # the paper's ψ = ‖λ − x‖²
            return beta
        if self.form == "mean":
            return beta / elements
        return beta / (elements * s2).clamp_min(TINY)  # relative: one β serves every network and interface

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

    fresh_inputs: ClassVar[bool] = False
    """Are inputs augmented in every epoch? States that are kept per sample belong to unchanged inputs."""

    def share(self, ids: Tensor, epoch: int, k: int) -> Tensor | None:
        """Positions in the batch of the samples that stage k computes in this step; None: all of them."""
        return self.turn(ids, epoch, k)

    def weight(self, epoch: int, epochs: int) -> float | None:
        """Of the penalty in this epoch; None for methods that have none."""
        return self.beta_at(epoch, epochs)

    def work(self, k: int, stages: int) -> float:  # noqa: ARG002
        """Of a step of stage k, in units of its forward and backward pass."""
        return 1.0

    @property
    def portion(self) -> float:
        """Of the samples of a step, the part that each stage trains on: all, unless neighbours take turns (`turn`)."""
        return 1.0

    def turn(self, ids: Tensor, epoch: int, stage: int) -> Tensor | None:  # noqa: ARG002
        """Positions in the batch of the samples that a stage computes in this step; None: all of them."""
        return None

    @abstractmethod
    def start(self, x: Tensor) -> Pair:
        """The auxiliary variables for outputs x of a pass through the whole network."""

    @abstractmethod
    def local_loss(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        """What stage k-1 minimises instead of the network's loss: a mean over the samples."""

    @abstractmethod
    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        """New auxiliary variables from the step's outputs and adjoints.

        x is None where it was not the turn of the stage before, p where not of the stage after.
        """


def penalty(x: Tensor, state: Tensor, b: Tensor) -> Tensor:
    """b ‖λ − x‖², mean over the samples."""
    return b * (x - state).square().sum() / len(x)
