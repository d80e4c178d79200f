"""A stage at work. In a step it makes the parts below, each for the batch that the clock gives it.

    forward    the link before ─► blocks ─► the link after
    loss       from the link after; of the last stage the network's own
    backward   gradients into the weights, the adjoint into the link before
    update     clip, optimiser

Workers know nothing of each other. What a worker keeps from a forward pass to a backward pass some steps later lies in
slots of its own, as what a link keeps lies in those of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor, nn

from parlay.batch import Batch, Pass
from parlay.data.batches import mixed_seed
from parlay.data.feed import Feed
from parlay.lanes import Lanes
from parlay.link.link import Link
from parlay.stage.optimiser import MakeOptimizer
from parlay.stage.precision import in_full
from parlay.stage.stage import Stage

Loss = Callable[..., Tensor]
REPLICA = 1 << 12  # between the streams of random numbers of two replicas; those of the stages are their indices
SIDE = "beside/"  # of the side network: before its names in a checkpoint, and in its seed


@dataclass(frozen=True)
class Place:
    """Where a worker stands, and what it has to work with."""

    stage: Stage
    k: int
    stages: int
    before: Link | None
    after: Link | None
    feed: Feed
    loss: Loss
    rows: int
    """Samples of a full batch."""
    outputs: tuple[int, ...] | None
    """Shape of what the network puts out for a sample; None where that is not one tensor."""
    inputs: tuple[int, ...] | None
    """Shape of what the network takes for a sample; None where that is not floating-point numbers."""
    optimizer: MakeOptimizer
    seed: int
    lanes: Lanes
    fixed: bool = False
    """Must memory stay in its place, because a captured step uses it?"""

    @property
    def last(self) -> bool:
        return self.k == self.stages - 1

    @property
    def classes(self) -> int | None:
        """How many, where the targets are classes."""
        targets = self.feed.split.targets
        one = self.outputs is not None and len(self.outputs) == 1
        if self.outputs is None or not one or self.feed.reconstruct or targets.is_floating_point():
            return None
        return self.outputs[0]

    def network(self, build: Callable[[], nn.Sequential], optimizer: MakeOptimizer) -> Stage:
        """A side network: trained with the stage, left behind at the end. Its weights follow from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed("beside", self.seed, self.k))
            module = build()
        if self.stage.precision is torch.float64:
            module = module.double()
        return Stage(module.train(), optimizer, self.stage.device, self.stage.autocast)


class Worker:
    """Forward, loss and backward on the same batch, as stages do that have no lag."""

    wants_inputs: ClassVar[bool] = False
    """The network's own, also behind the first stage?"""
    accumulate = 1
    """Batches whose gradients make one update."""
    slot_counts: tuple[int, ...] = ()
    """Of the batches on their way that it has slots for."""

    def __init__(self, place: Place) -> None:
        self.place, self.stage, self.k = place, place.stage, place.k
        self.before, self.after = place.before, place.after
        self.side: Stage | None = None
        """A side network."""
        self.pending = 0
        """Gradients that have been added up and not been applied yet."""
        self.trained = False
        """Has this step made gradients?"""
        self._rate: Tensor | float = 1.0
        self.sources = [place.lanes.source() for _ in range(2)]
        """Of the forward and of the backward pass of a step: a batch draws the same numbers in both."""
        self._state: Tensor | None = None
        self._x: Tensor = torch.empty(0)
        self._small: Tensor = torch.empty(0)
        self._loss: Tensor = torch.empty(0)

    # The parts of a step

    def seed(self, forward: Batch | None, backward: Batch | None, replica: int = 0) -> None:
        """Random numbers inside the network depend on the batch, the stage and the replica alone."""
        for source, batch in zip(self.sources, (forward, backward), strict=True):
            if batch is not None:
                source.seed(batch.random(self.k + REPLICA * replica))

    def learn(self, p: Pass) -> None:
        """Of methods that guess: before the stage trains, learn from what has come back for an earlier batch."""

    def forward(self, p: Pass) -> None:
        self._state, x = self.input(p)
        self._x = self.run(x, p)
        if self.after is not None:
            self._small = self.after.put_output(p, self._x)

    def loss(self, p: Pass) -> Tensor:
        if p.rows == 0:  # the other replicas have all of the batch
            self._loss = nothing(self._x)
        elif self.after is not None:
            self._loss = self.after.loss(p, self._x, self._small)
        else:
            self._loss = self.place.loss(in_full(self._x), self.targets(p))
        if p.whole != p.rows:
            self._loss = self._loss * p.share
        return self._loss.detach()

    def backward(self, p: Pass) -> None:
        if self._loss.requires_grad:  # not where a first stage has nothing to train
            self._loss.backward()  # type: ignore[no-untyped-call]
        self.answer(p)

    def answer(self, p: Pass) -> None:
        """The adjoint, into the link before."""
        self.trained = True
        if self.before is not None:
            assert self._state is not None
            self.before.put_adjoint(p, self._state.grad)
        self._state = None
        self._x = self._small = self._loss = torch.empty(0)

    def update(self, clip: Callable[[list[Tensor]], None]) -> None:
        """Apply the step's gradients, or keep them for later where several are added up."""
        if not self.trained:
            return
        self.trained = False
        self.pending += 1
        if self.pending >= self.accumulate:
            self.settle(clip)

    def settle(self, clip: Callable[[list[Tensor]], None]) -> None:
        """Apply the mean of the gradients added up, at as many times the rate."""
        if self.pending == 0:
            return
        gradients = [gradient for part in self.parts() for gradient in part.gradients()]
        if self.pending > 1:
            torch._foreach_mul_(gradients, 1 / self.pending)
            self.set_rate(self._rate * self.pending)
        clip(gradients)
        for part in self.parts():
            if part.gradients():  # no gradient, no update: not even weight decay
                part.apply()
        self.pending = 0

    def set_rate(self, rate: Tensor | float) -> None:
        """Of the next updates, as a share of the initial one."""
        for part in self.parts():
            part.optimiser.set_rate(rate)

    def begin(self, rate: Tensor | float) -> None:
        self._rate = rate
        self.set_rate(rate)

    # What the parts are made of

    def input(self, p: Pass) -> tuple[Tensor | None, Tensor]:
        """The state as a leaf, None for the first stage, and what the blocks take."""
        if self.before is None:
            return None, self.place.feed.batch(p.samples, p.changes)[0]
        return self.before.input(p, self.stage.precision)

    def targets(self, p: Pass) -> Tensor:
        return self.place.feed.targets(p.samples, p.changes)

    def run(self, x: Tensor, p: Pass, weights: Mapping[str, Tensor] | None = None, again: bool = False) -> Tensor:
        """Through the blocks. `again`: in the backward pass."""
        with self.sources[again]:
            return self.stage.forward(x, p.compiled, weights)

    def parts(self) -> list[Stage]:
        """All that is trained here."""
        return [part for part in (self.stage, self.side) if part is not None]

    def forget(self) -> None:
        """Gradients are of no use any more."""
        self.pending, self.trained = 0, False
        for part in self.parts():
            part.forget_gradients()

    # Checkpoints

    def learned(self) -> dict[str, Tensor]:
        """What is kept in any case: weights of the worker's own."""
        return {SIDE + name: value for name, value in self.side.tensors().items()} if self.side else {}

    def load_learned(self, kept: Mapping[str, Tensor]) -> bool:
        """Take it back; False, and nothing taken, where it is of another network."""
        if self.side is None:
            return True
        found = {name.removeprefix(SIDE): value for name, value in kept.items() if name.startswith(SIDE)}
        wanted = {f"weights/{n}": w.shape for n, w in self.side.module.state_dict().items()}
        if wanted != {n: w.shape for n, w in found.items() if n.startswith("weights/")}:
            return False
        self.side.load(found)
        return True

    def tensors(self) -> dict[str, Tensor]:
        """What is kept with batches on their way."""
        if not self.pending:
            return {}
        self.stage.gradients()  # those of copies in low precision become those of the weights
        return {f"gradient/{name}": w.grad for name, w in self.stage.parameters.items() if w.grad is not None} | {
            "pending": torch.tensor(self.pending)
        }

    def load(self, kept: Mapping[str, Tensor]) -> None:
        self.pending = int(kept.get("pending", torch.tensor(0)))
        for name, weight in self.stage.parameters.items():
            found = kept.get(f"gradient/{name}")
            weight.grad = torch.empty_like(weight).copy_(found) if found is not None else None

    def mark(self) -> Tensor:
        """A number that tells the same blocks, method, batch size and precision from others."""
        numbers = map(str, (self.accumulate, self.k, self.place.stages, self.place.rows, self.stage.precision))
        links = (str(link.small) for link in (self.before, self.after) if link is not None)
        parts = type(self).__name__, *numbers, *self.stage.parameters, *links
        return torch.tensor(int.from_bytes(blake2b("|".join(parts).encode(), digest_size=7).digest(), "big"))

    @property
    def bytes(self) -> int:
        """What it keeps beside the stage."""
        return sum(value.nbytes for value in self.learned().values())


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies under the same names, by one kernel for all of a type: a deep network has hundreds of small ones."""
    found = dict(tensors)
    copies = {name: torch.empty_like(value) for name, value in found.items()}
    for dtype in dict.fromkeys(value.dtype for value in found.values()):
        names = [name for name, value in found.items() if value.dtype == dtype]
        torch._foreach_copy_([copies[name] for name in names], [found[name] for name in names])
    return copies


def nothing(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The loss of no samples: zero, with a gradient."""
    parts = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([part.float().sum() * 0 for part in parts]).sum()
