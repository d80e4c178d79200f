"""One cut of the network: its filter, its stores and its running moments, joined by a coupling.

Comes in: sample ids, the outputs of the stage before, the adjoints of the stage after. Goes out: states and multipliers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parlay.coupling import Coupling, Moments, Pair
from parlay.filters import Filter
from parlay.stores import Store

MOMENT_RATE = 0.1  # of the running mean squares: they follow a change of the features within some ten steps


class Interface:
    """The cut between stage k-1 and stage k. It lives on the device of stage k."""

    def __init__(
        self, shape: tuple[int, ...], reduce: Filter, coupling: Coupling, states: Store, multipliers: Store | None
    ) -> None:
        self.shape = shape
        self.filter = reduce
        self.coupling = coupling
        self.states = states
        self.multipliers = multipliers
        self.device = states.device
        self.elements = states.shape.numel() if isinstance(states.shape, torch.Size) else _product(states.shape)
        self.moments = self._no_moments()
        self.filled = False

    @property
    def bytes(self) -> int:
        return self.states.bytes + (self.multipliers.bytes if self.multipliers else 0)

    def prefetch(self, ids: Tensor) -> None:
        self.states.prefetch(ids)
        if self.multipliers:
            self.multipliers.prefetch(ids)

    def gather(self, ids: Tensor) -> Pair:
        multiplier = self.multipliers.gather(ids).float() if self.multipliers else None
        return Pair(self.states.gather(ids).float(), multiplier)

    def down(self, x: Tensor) -> Tensor:
        return self.filter.down(x.float())

    def up(self, state: Tensor) -> Tensor:
        return self.filter.up(state, self.shape)

    def local_loss(self, x: Tensor, pair: Pair, beta: Tensor) -> Tensor:
        """The local loss of the stage before, on the device of its output x."""
        there = x.device
        b = self._stiffness(beta.to(self.device)).to(there)
        multiplier = pair.multiplier.to(there) if pair.multiplier is not None else None
        return self.coupling.local_loss(self.down(x), Pair(pair.state.to(there), multiplier), b)

    @torch.no_grad()
    def update(self, ids: Tensor, pair: Pair, x: Tensor, p: Tensor, beta: Tensor) -> Tensor:
        """New auxiliary variables of these samples. Gives the violation ‖λ − x‖ / ‖x‖ that the step has seen."""
        x = self.down(x.to(self.device))
        violation = _relative(pair.state, x)
        self._follow(x, p)
        b = self._stiffness(beta.to(self.device))
        self._scatter(ids, self.coupling.update(pair, x, p, b, self.moments.features))
        return violation

    @torch.no_grad()
    def start(self, ids: Tensor, x: Tensor, p: Tensor | None, beta: Tensor) -> Tensor:
        """Set the auxiliary variables from a pass through the whole network; x and p are small already.

        Gives the violation of the states that stood there before: how far the network has moved away from them.
        """
        violation = _relative(self.states.gather(ids).float(), x)
        self._follow(x, p)
        b = self._stiffness(beta.to(self.device))
        self._scatter(ids, self.coupling.start(x, p, b, self.moments.features))
        return violation

    def forget_moments(self) -> None:
        self.moments = self._no_moments()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        kept = {"states": self.states.tensor(), "features": self.moments.features, "adjoints": self.moments.adjoints}
        if self.multipliers:
            kept["multipliers"] = self.multipliers.tensor()
        return kept

    def load(self, kept: dict[str, Tensor]) -> bool:
        """Take what `tensors` gave. False, and nothing taken, where it is of another cut, filter, dtype or method."""
        wanted = self.tensors()
        if {n: (t.shape, t.dtype) for n, t in kept.items()} != {n: (t.shape, t.dtype) for n, t in wanted.items()}:
            return False
        self.states.load(kept["states"])
        if self.multipliers:
            self.multipliers.load(kept["multipliers"])
        self.moments = Moments(kept["features"].to(self.device), kept["adjoints"].to(self.device))
        self.filled = True
        return True

    def close(self) -> None:
        self.states.close()
        if self.multipliers:
            self.multipliers.close()

    def _scatter(self, ids: Tensor, pair: Pair) -> None:
        self.states.scatter(ids, pair.state)
        if self.multipliers and pair.multiplier is not None:
            self.multipliers.scatter(ids, pair.multiplier)

    def _stiffness(self, beta: Tensor) -> Tensor:
        return self.coupling.stiffness(beta, self.elements, self.moments)

    def _follow(self, x: Tensor, p: Tensor | None) -> None:
        features = _running(self.moments.features, x.square().mean())
        adjoints = self.moments.adjoints if p is None else _running(self.moments.adjoints, p.square().mean())
        self.moments = Moments(features, adjoints)

    def _no_moments(self) -> Moments:
        return Moments(torch.zeros((), device=self.device), torch.zeros((), device=self.device))


def _running(old: Tensor, new: Tensor) -> Tensor:
    """A running mean that takes its first value whole."""
    return torch.where(old == 0, new, torch.lerp(old, new, MOMENT_RATE))


def _relative(state: Tensor, x: Tensor) -> Tensor:
    return ((state - x).square().mean() / x.square().mean().clamp_min(1e-12)).sqrt()


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
