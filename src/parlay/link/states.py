"""A link that keeps a state for every sample, for an epoch; with a multiplier, where the method has one.

The stores lie where stage k is. Stage k-1 needs state and multiplier of a batch when it has put out its own x: over two
processes they travel DOWN up to two steps ahead, which is safe because the batches of an epoch are disjoint. DS(x)
travels UP, and the link is renewed when it is there, up to two steps late. Both ends follow the size of the features
s² by themselves, from the same outputs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor

from parlay.batch import Pass
from parlay.link.link import Direction, Link, LinkEnd, Message
from parlay.stores import Store
from parlay.stores.window import Windows

T = TypeVar("T")

FOLLOW = 0.1  # of the running mean square: it follows a change of the features within some ten steps
NOTHING = torch.empty(0)


class Pair(NamedTuple):
    """State λ and multiplier κ of some samples."""

    state: Tensor
    multiplier: Tensor | None

    def of(self, positions: Tensor | None) -> Pair:
        """Those at these positions; None: all."""
        if positions is None:
            return self
        return Pair(self.state[positions], None if self.multiplier is None else self.multiplier[positions])

    def copy(self) -> Pair:
        return Pair(self.state.clone(), None if self.multiplier is None else self.multiplier.clone())

    def put(self, positions: Tensor, new: Pair) -> None:
        """Replace those at these positions."""
        self.state.index_copy_(0, positions, new.state)
        if self.multiplier is not None and new.multiplier is not None:
            self.multiplier.index_copy_(0, positions, new.multiplier)

    def float(self) -> Pair:
        return Pair(self.state.float(), None if self.multiplier is None else self.multiplier.float())


class Rule(Protocol):
    """What a link asks of its method. b is the stiffness of the penalty b ‖λ − x‖², s² the mean square of x."""

    @property
    def keeps_multipliers(self) -> bool: ...

    def detail_of(self, small: tuple[int, ...]) -> float:
        """Weight of ‖x − US(DS(x))‖² where samples of this shape are kept."""
        ...

    def stiffness(self, weight: Tensor, elements: int, s2: Tensor) -> Tensor: ...

    def start(self, x: Tensor) -> Pair:
        """For outputs x of a pass through the whole network."""
        ...

    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        """What stage k-1 minimises: a mean over the samples."""
        ...

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        """From outputs x and adjoints p; None where that stage has not computed these samples."""
        ...


def penalty(x: Tensor, state: Tensor, b: Tensor) -> Tensor:
    """b ‖λ − x‖², mean over the samples."""
    return b * (x - state).square().sum() / len(x)


class Late(NamedTuple):
    """A batch whose states are renewed when the outputs of stage k-1 have come."""

    pair: Pair
    adjoint: Tensor
    before: Pass
    after: Pass


@final
class StateLink(Link):
    starts: ClassVar[bool] = True

    def __init__(self, end: LinkEnd, rule: Rule) -> None:
        super().__init__(end)
        self.rule = rule
        self.elements = math.prod(self.small)
        self.detail = rule.detail_of(self.small) if self.small != end.shape else 0.0
        self.weight = torch.zeros((), device=end.device)
        """β of this epoch."""
        self._weight_now = 0.0
        self.s2 = torch.zeros((), device=end.device)
        """Running mean square of an element of the features."""
        self.filled = False
        self.states: Store | None = None
        self.multipliers: Store | None = None
        if end.upper:
            assert end.store is not None
            self.states = end.store("states")
            self.multipliers = end.store("multipliers") if rule.keeps_multipliers else None
        self._windows: Windows | None = None
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._ahead: dict[int, Pair] = {}
        """Of batches that enter soon, as they are stored."""
        self._signals: dict[int, Pair] = {}
        """The same at the other end, of the samples that stage k-1 computes."""
        self._pair = Pair(NOTHING, None)
        self._output = self._adjoint = NOTHING
        self._outputs: dict[int, Tensor] = {}
        self._late: deque[Late] = deque()

    # Captured steps

    def through(self, windows: Windows) -> None:
        """Stores in host memory: captured steps work on windows of them."""
        self._windows = windows

    def speed_up(self, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """A dozen small kernels each become one or two."""
        parts = self._gather, self._down, self._objective, self._renew
        self._compiled = {part.__name__: compiled(part) for part in parts}

    def slow_down(self) -> None:
        self._compiled = {}

    # A step

    def set_weight(self, weight: float) -> None:
        if weight != self._weight_now:
            self._weight_now = weight
            self.weight.fill_(weight)

    def prefetch(self, places: Tensor) -> None:
        for store in self.stores():
            store.prefetch(places)

    def gather(self, both: Pass) -> bool:
        if self.states is None:
            return False
        ahead = self._ahead.pop(both.batch.step, None)
        if ahead is not None:
            self._pair = ahead.float()
        else:
            self._pair = self._run(both, self._gather, both.places, both.compiled and self._windows is not None)
        return True

    def put_output(self, p: Pass, x: Tensor) -> Tensor:
        small: Tensor = self._run(p, self._down, x) if self.small != self.end.shape else x
        self._output = small.detach()
        if not self.end.upper:
            self._output = self._output.to(self.end.store_dtype)
        return small

    def input(self, p: Pass, precision: torch.dtype | None) -> tuple[Tensor, Tensor]:
        state = self._pair.of(p.positions).state.detach().requires_grad_()
        return state, self.up(state.to(precision or state.dtype))

    def loss(self, p: Pass, x: Tensor, small: Tensor) -> Tensor:
        pair = self._pair.of(p.positions) if self.states is not None else self._signals.pop(p.batch.step)
        loss: Tensor = self._run(p, self._objective, x, small, pair, self.weight)
        return loss

    def put_adjoint(self, p: Pass, gradient: Tensor | None) -> None:
        # the loss is a mean over the samples, the adjoint per sample
        self._adjoint = (
            gradient * p.whole if gradient is not None else torch.zeros_like(self._pair.of(p.positions).state)
        )

    @torch.no_grad()
    def renew(self, before: Pass | None, after: Pass | None) -> list[Tensor]:
        if before is None or after is None:
            return []
        if self.states is None:
            if before.whole:
                self._follow_own(self._output.float())
            return []
        pair, nothing = self._pair, self._pair.state[:0]
        adjoint = self._adjoint if after.rows else nothing
        if self.end.lower:
            x = self._output if before.rows else nothing
            args = after.places, pair, x, adjoint, before.positions, after.positions, self.weight
            return [self._run(after, self._renew, *args, after.compiled and self._windows is not None)]
        self._late.append(Late(pair, adjoint, before, after))
        return self.settle()

    @torch.no_grad()
    def settle(self) -> list[Tensor]:
        violations: list[Tensor] = []
        while self._late and (self._late[0].before.rows == 0 or self._late[0].before.batch.step in self._outputs):
            pair, adjoint, before, after = self._late.popleft()
            x = self._outputs.pop(before.batch.step).float() if before.rows else pair.state[:0]
            violations.append(
                self._renew(after.places, pair, x, adjoint, before.positions, after.positions, self.weight)
            )
        return violations

    def _run(self, p: Pass, part: Callable[..., T], *args: object) -> T:
        found: T = (self._compiled.get(part.__name__, part) if p.compiled else part)(*args)
        return found

    def _stores(self, windows: bool) -> tuple[Store, Store | None]:
        assert self.states is not None
        if not windows or self._windows is None:
            return self.states, self.multipliers
        return self._windows.of(self.states), self._windows.of(self.multipliers) if self.multipliers else None

    def _gather(self, places: Tensor, windows: bool = False) -> Pair:
        return self._stored(places, windows).float()

    def _stored(self, places: Tensor, windows: bool = False) -> Pair:
        states, multipliers = self._stores(windows)
        return Pair(states.gather(places), multipliers.gather(places) if multipliers else None)

    def _down(self, x: Tensor) -> Tensor:
        return self.down(x.float())

    def _objective(self, x: Tensor, small: Tensor, pair: Pair, weight: Tensor) -> Tensor:
        b = self.rule.stiffness(weight, self.elements, self.s2)
        loss = self.rule.objective(small.float(), pair, b)
        if self.detail == 0:
            return loss
        share = self.elements / math.prod(self.end.shape)  # b is for the small tensor: per element it is the same for x
        return loss + self.detail * penalty(x.float(), self.up(small), b * share)

    def _renew(
        self,
        places: Tensor,
        pair: Pair,
        x: Tensor,
        p: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        weight: Tensor,
        windows: bool = False,
    ) -> Tensor:
        """New auxiliary variables; x and p are of the samples at the positions `before` and `after`."""
        x = x.float()
        seen = pair.of(before)
        violation = self._observe(seen.state, x)
        b, rule = self.rule.stiffness(weight, self.elements, self.s2), self.rule
        if before is None or after is None:
            new = rule.update(pair, x, p, b, self.s2)
        else:  # every sample is at one of the two places
            new = pair.copy()
            if len(before):
                new.put(before, rule.update(seen, x, None, b, self.s2))
            if len(after):
                new.put(after, rule.update(pair.of(after), None, p, b, self.s2))
        self._scatter(places, new, windows)
        return violation

    def _scatter(self, places: Tensor, pair: Pair, windows: bool = False) -> None:
        states, multipliers = self._stores(windows)
        states.scatter(places, pair.state)
        if multipliers and pair.multiplier is not None:
            multipliers.scatter(places, pair.multiplier)

    def _observe(self, state: Tensor, x: Tensor) -> Tensor:
        """Follow the outputs x. Gives the violation ‖λ − x‖ / ‖x‖ of the states."""
        if self.end.pool is None:
            if len(x) == 0:
                return torch.zeros((), device=self.end.device)
            size: Tensor = x.norm()  # a norm reads its tensor once and writes none, unlike the mean of a square
            violation: Tensor = (state - x).norm() / size.clamp_min(1e-6 * math.sqrt(x.numel()))
            self._follow(size.square() / x.numel())
            return violation
        sums = torch.stack([(state - x).square().sum(), x.square().sum(), x.new_tensor(float(x.numel()))])
        sums = self.end.pool(sums)
        if sums[2] == 0:
            return torch.zeros((), device=self.end.device)
        self._follow(sums[1] / sums[2])
        return (sums[0] / sums[1].clamp_min(1e-12 * sums[2])).sqrt()

    def _follow_own(self, x: Tensor) -> None:
        """The same without states, at the end that has none."""
        if self.end.pool is None:
            if len(x):
                self._follow(x.norm().square() / x.numel())
            return
        sums = self.end.pool(torch.stack([x.square().sum(), x.new_tensor(float(x.numel()))]))
        if sums[1] > 0:
            self._follow(sums[0] / sums[1])

    def _follow(self, now: Tensor) -> None:
        """The first value is taken whole. In place, for a captured step."""
        self.s2.copy_(torch.where(self.s2 == 0, now, torch.lerp(self.s2, now, FOLLOW)))

    # Filling it

    def reset(self) -> None:
        self.filled = False
        self.s2.zero_()

    @torch.no_grad()
    def start(self, p: Pass, small: Tensor) -> Tensor | None:
        if self.states is None:
            self._follow_own(small)
            return None
        violation = self._observe(self.states.gather(p.places).float(), small)
        self._scatter(p.places, self.rule.start(small))
        return violation

    # Between two processes

    def outgoing(self, way: Direction, p: Pass | None) -> list[Tensor]:
        if p is None or p.rows == 0 or (way is Direction.UP) != self.end.lower:
            return []
        if way is Direction.UP:
            return [self._output]
        self._ahead[p.batch.step] = stored = self._stored(p.places)
        return [part for part in stored.of(p.positions) if part is not None]

    def incoming(self, way: Direction, p: Pass | None) -> list[Message]:
        if p is None or p.rows == 0:
            return []
        message = Message((p.rows, *self.small), self.end.store_dtype)
        return [message] * (2 if way is Direction.DOWN and self.rule.keeps_multipliers else 1)

    def arrive(self, way: Direction, p: Pass, tensors: list[Tensor]) -> None:
        if way is Direction.UP:
            self._outputs[p.batch.step] = tensors[0]
        else:
            self._signals[p.batch.step] = Pair(tensors[0], tensors[1] if len(tensors) > 1 else None).float()

    # Checkpoints

    def tensors(self) -> dict[str, Tensor]:
        assert self.states is not None
        kept = {"states": self.states.tensor(), "mean_square": self.s2}
        return kept | ({"multipliers": self.multipliers.tensor()} if self.multipliers else {})

    def load(self, kept: Mapping[str, Tensor]) -> bool:
        if self.states is None:
            if "mean_square" in kept:
                self.s2.copy_(kept["mean_square"])
            return "mean_square" in kept
        wanted = self.tensors()
        if {n: (t.shape, t.dtype) for n, t in kept.items()} != {n: (t.shape, t.dtype) for n, t in wanted.items()}:
            return False
        self.states.load(kept["states"])
        if self.multipliers:
            self.multipliers.load(kept["multipliers"])
        self.s2.copy_(kept["mean_square"])
        return True

    def stores(self) -> list[Store]:
        return [store for store in (self.states, self.multipliers) if store is not None]

    @property
    def bytes(self) -> int:
        return sum(store.bytes for store in self.stores())

    def close(self) -> None:
        for store in self.stores():
            store.close()
