"""One cut of the network: its filter, its stores and the size of its features, joined by a coupling.

In: sample ids, the outputs of the stage before, the adjoints of the stage after. Out: states and multipliers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from parlay.coupling import Coupling, Pair
from parlay.coupling.base import penalty
from parlay.filters import Filter
from parlay.stores import Store
from parlay.stores.window import Windows

Pool = Callable[[Tensor], Tensor]
FOLLOW = 0.1  # of the running mean square: it follows a change of the features within some ten steps


@final
class Cut:
    """What the stages on both sides of a cut know of it: filter, coupling, and the size of the features there.

    Where each side is a process of its own, each keeps one; both follow the same outputs, and so they agree.
    """

    def __init__(
        self, shape: tuple[int, ...], reduce: Filter, coupling: Coupling, device: torch.device, pool: Pool | None = None
    ) -> None:
        self.shape = shape
        self.filter = reduce
        self.small = reduce.shape(shape)
        self.coupling = coupling
        self.device = device
        self.pool = pool
        """Sums over all replicas of a stage, where a batch is divided among several."""
        self.elements = math.prod(self.small)
        self.detail = coupling.detail_of(self.small) if self.small != shape else 0.0
        self.mean_square = torch.zeros((), device=device)
        """s²: running, of one element of the features."""

    def down(self, x: Tensor) -> Tensor:
        return self.filter.down(x.float())

    def up(self, state: Tensor) -> Tensor:
        return self.filter.up(state, self.shape)

    def local_loss(self, x: Tensor, pair: Pair, beta: Tensor, small: Tensor | None = None) -> Tensor:
        """The local loss of the stage before, on the device of its output x; `small` is DS(x) where it is known."""
        there = x.device
        b = self.stiffness(beta.to(self.device)).to(there)
        multiplier = pair.multiplier.to(there) if pair.multiplier is not None else None
        small = self.down(x) if small is None else small
        loss = self.coupling.local_loss(small, Pair(pair.state.to(there), multiplier), b)
        if self.detail == 0:
            return loss
        share = self.elements / math.prod(self.shape)  # b is for the small tensor: per element it is the same for x
        return loss + self.detail * penalty(x.float(), self.up(small), b * share)

    def stiffness(self, beta: Tensor) -> Tensor:
        return self.coupling.stiffness(beta, self.elements, self.mean_square)

    def observe(self, state: Tensor, x: Tensor) -> Tensor:
        """Follow the outputs x, small already. Gives the violation ‖λ − x‖ / ‖x‖ of the states."""
        if self.pool is None:
            if len(x) == 0:
                return torch.zeros((), device=self.device)
            size: Tensor = x.norm()  # a norm reads its tensor once and writes none, unlike the mean of a square
            violation: Tensor = (state - x).norm() / size.clamp_min(1e-6 * math.sqrt(x.numel()))
            self._follow(size.square() / x.numel())
            return violation
        sums = self.pool(torch.stack([(state - x).square().sum(), x.square().sum(), x.new_tensor(float(x.numel()))]))
        if sums[2] == 0:
            return torch.zeros((), device=self.device)
        self._follow(sums[1] / sums[2])
        return (sums[0] / sums[1].clamp_min(1e-12 * sums[2])).sqrt()

    def follow(self, x: Tensor) -> None:
        """The same without states: for the side that has none."""
        if self.pool is None:
            if len(x):
                self._follow(x.norm().square() / x.numel())
            return
        sums = self.pool(torch.stack([x.square().sum(), x.new_tensor(float(x.numel()))]))
        if sums[1] > 0:
            self._follow(sums[0] / sums[1])

    def _follow(self, now: Tensor) -> None:
        """The running mean square; its first value is taken whole. In place, for a recorded step."""
        s2 = self.mean_square
        s2.copy_(torch.where(s2 == 0, now, torch.lerp(s2, now, FOLLOW)))


@final
class Interface:
    """The cut between stage k-1 and stage k. It lives on the device of stage k."""

    def __init__(
        self,
        shape: tuple[int, ...],
        reduce: Filter,
        coupling: Coupling,
        states: Store,
        multipliers: Store | None,
        pool: Pool | None = None,
    ) -> None:
        self.cut = Cut(shape, reduce, coupling, states.device, pool)
        self.shape = shape
        self.filter = reduce
        self.coupling = coupling
        self.states = states
        self.multipliers = multipliers
        self.device = states.device
        self.elements = self.cut.elements
        self.mean_square = self.cut.mean_square
        self.filled = False

    @property
    def bytes(self) -> int:
        return self.states.bytes + (self.multipliers.bytes if self.multipliers else 0)

    def prefetch(self, ids: Tensor) -> None:
        self.states.prefetch(ids)
        if self.multipliers:
            self.multipliers.prefetch(ids)

    def gather(self, ids: Tensor) -> Pair:
        return self.kept(ids).float()

    def kept(self, ids: Tensor) -> Pair:
        """As they are stored."""
        return Pair(self.states.gather(ids), self.multipliers.gather(ids) if self.multipliers else None)

    def down(self, x: Tensor) -> Tensor:
        return self.cut.down(x)

    def up(self, state: Tensor) -> Tensor:
        return self.cut.up(state)

    def local_loss(self, x: Tensor, pair: Pair, beta: Tensor) -> Tensor:
        return self.cut.local_loss(x, pair, beta)

    @torch.no_grad()
    def update(
        self, ids: Tensor, pair: Pair, x: Tensor, before: Tensor | None, p: Tensor, after: Tensor | None, beta: Tensor
    ) -> Tensor:
        """New auxiliary variables of these samples; x and p are of those at the positions `before` and `after`.

        Gives the violation ‖λ − x‖ / ‖x‖ that the step has seen.
        """
        if before is None or len(before):
            x = self.down(x.to(self.device))
        return self.renew(ids, pair, x, before, p, after, beta)

    @torch.no_grad()
    def renew(
        self, ids: Tensor, pair: Pair, x: Tensor, before: Tensor | None, p: Tensor, after: Tensor | None, beta: Tensor
    ) -> Tensor:
        """`update` with outputs that are small already."""
        seen = pair.of(before)
        violation = self.cut.observe(seen.state, x)
        b, s2 = self.cut.stiffness(beta.to(self.device)), self.mean_square
        if self.coupling.shrink != 1:
            p = self.coupling.shrink * p
        if before is None or after is None:
            new = self.coupling.update(pair, x, p, b, s2)
        else:  # every sample is at one of the two places
            new = pair.copy()
            if len(before):
                new.put(before, self.coupling.update(seen, x, None, b, s2))
            if len(after):
                new.put(after, self.coupling.update(pair.of(after), None, p, b, s2))
        self._scatter(ids, new)
        return violation

    @torch.no_grad()
    def start(self, ids: Tensor, x: Tensor) -> Tensor:
        """Set the auxiliary variables from a pass through the whole network; x is small already.

        Gives the violation of the states that stood there before: how far the network has moved away from them.
        """
        violation = self.cut.observe(self.states.gather(ids).float(), x)
        self._scatter(ids, self.coupling.start(x))
        return violation

    def stores(self) -> list[Store]:
        return [store for store in (self.states, self.multipliers) if store is not None]

    def through(self, windows: Windows) -> Interface:
        """The same interface for recorded steps: they work on the windows of its stores."""
        twin = copy.copy(self)
        twin.states = windows.of(self.states)
        twin.multipliers = windows.of(self.multipliers) if self.multipliers else None
        return twin

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
