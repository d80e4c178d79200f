"""One cut of the network: its filter, its stores and the size of its features, joined by a coupling.

In: sample ids, the outputs of the stage before, the adjoints of the stage after. Out: states and multipliers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parlay.coupling import Coupling, Pair
from parlay.coupling.base import penalty
from parlay.filters import Filter
from parlay.stores import Store

FOLLOW = 0.1  # of the running mean square: it follows a change of the features within some ten steps


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
        self.elements = math.prod(states.shape)
        self.mean_square = torch.zeros((), device=self.device)
        """s²: running, of one element of the features."""
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
        small = self.down(x)
        loss = self.coupling.local_loss(small, Pair(pair.state.to(there), multiplier), b)
        if self.coupling.detail == 0 or self.states.shape == self.shape:
            return loss
        share = self.elements / math.prod(self.shape)  # b is for the small tensor: per element it is the same for x
        return loss + self.coupling.detail * penalty(x.float(), self.up(small), b * share)

    @torch.no_grad()
    def update(
        self, ids: Tensor, pair: Pair, x: Tensor, before: Tensor | None, p: Tensor, after: Tensor | None, beta: Tensor
    ) -> Tensor:
        """New auxiliary variables of these samples; x and p are of those at the positions `before` and `after`.

        Gives the violation ‖λ − x‖ / ‖x‖ that the step has seen.
        """
        seen, violation = pair.of(before), torch.zeros((), device=self.device)
        if len(seen.state):
            x = self.down(x.to(self.device))
            violation = _relative(seen.state, x)
            self._follow(x)
        b, s2 = self._stiffness(beta.to(self.device)), self.mean_square
        p = self.coupling.shrink * p
        if before is None or after is None:
            self._scatter(ids, self.coupling.update(pair, x, p, b, s2))
            return violation
        if len(before):
            self._scatter(ids[before.to(ids.device)], self.coupling.update(seen, x, None, b, s2))
        if len(after):
            self._scatter(ids[after.to(ids.device)], self.coupling.update(pair.of(after), None, p, b, s2))
        return violation

    @torch.no_grad()
    def start(self, ids: Tensor, x: Tensor) -> Tensor:
        """Set the auxiliary variables from a pass through the whole network; x is small already.

        Gives the violation of the states that stood there before: how far the network has moved away from them.
        """
        violation = _relative(self.states.gather(ids).float(), x)
        self._follow(x)
        self._scatter(ids, self.coupling.start(x))
        return violation

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        kept = {"states": self.states.tensor(), "mean_square": self.mean_square}
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
        self.mean_square.copy_(kept["mean_square"])
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
        return self.coupling.stiffness(beta, self.elements, self.mean_square)

    def _follow(self, x: Tensor) -> None:
        """The running mean square; its first value is taken whole. In place, for a recorded step."""
        s2, now = self.mean_square, x.square().mean()
        s2.copy_(torch.where(s2 == 0, now, torch.lerp(s2, now, FOLLOW)))


def _relative(state: Tensor, x: Tensor) -> Tensor:
    return ((state - x).square().mean() / x.square().mean().clamp_min(1e-12)).sqrt()
