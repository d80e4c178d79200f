"""Methods whose states live a few steps: a batch streams through the stages, and its answer streams back.

In a step every stage works on a batch of its own, and no stage waits for another. With `lag` L_k of stage k:

    step t, stage k     forward of batch t - k                    `features` have come from stage k-1 a step ago
                        answer to batch t - k - L_k               `adjoint`  has  come from stage k+1 a step ago

Where a method goes `upwards`, a batch enters at the last stage instead, `adjoint` is there with the batch, and
`features` are the answer.

A method makes a `Station` of every stage: what arrives goes in, what leaves comes out, and what must be kept between
the two lies in its queues. Stations know nothing of each other. Engines move the messages between steps, inside one
process or from one to the next.

All that crosses is small, where a filter is in use: DS(x) forward, and p, the gradient of the network's loss with
respect to DS(x), backward. The adjoint is per sample, as everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from parlay.data.batches import mixed_seed
from parlay.errors import InputError
from parlay.evaluate import Loss, in_float32
from parlay.filters import Filter
from parlay.stage import MakeOptimizer, Stage

Clip = Callable[[list[Tensor]], None]
ROUGHNESS = 3.0  # β of the augmented Lagrangian
TINY = 1e-12
BESIDE = "beside/"  # before the names in a checkpoint


@final
@dataclass(frozen=True)
class Visit:
    """A batch at a stage."""

    rows: int
    slot: Tensor
    """Where queues keep it, as a tensor of one number: a recorded step takes it from the device."""
    seed: int | None
    """Of the random numbers inside the network, the same whenever the batch passes; None: not seeded here."""
    targets: Tensor | None = None
    inputs: Tensor | None = None
    """What the network itself takes, for stations that ask for it."""


class Sent(NamedTuple):
    """What leaves a station at a step."""

    output: Tensor | None = None
    """DS(x), for the stage after."""
    adjoint: Tensor | None = None
    """p, for the stage before."""
    loss: Tensor | None = None
    trained: bool = False
    """Are there gradients to apply?"""


@final
@dataclass(frozen=True)
class Crossing:
    """A cut of the network as streaming methods see it: what crosses is small."""

    shape: tuple[int, ...]
    filter: Filter

    @property
    def small(self) -> tuple[int, ...]:
        return self.filter.shape(self.shape)

    def down(self, x: Tensor) -> Tensor:
        return self.filter.down(x)

    def up(self, small: Tensor) -> Tensor:
        return self.filter.up(small, self.shape)


@final
@dataclass(frozen=True)
class Site:
    """Where a station stands, and what it has to work with."""

    stage: Stage
    k: int
    stages: int
    before: Crossing | None
    after: Crossing | None
    loss: Loss
    rows: int
    """Samples of a full batch."""
    outputs: tuple[int, ...] | None
    """Shape of what the network puts out for a sample; None where that is not one tensor."""
    classes: int | None
    """How many, where the targets are classes."""
    inputs: tuple[int, ...] | None
    """Shape of what the network takes for a sample; None where that is not floating-point numbers."""
    optimizer: MakeOptimizer
    seed: int

    @property
    def last(self) -> bool:
        return self.after is None

    def network(self, build: Callable[[], nn.Sequential], optimizer: MakeOptimizer) -> Stage:
        """A small network beside the stage, with weights by the seed and an optimiser of its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed("beside", self.seed, self.k))
            module = build()
        return Stage(module.train(), optimizer, self.stage.device, self.stage.autocast)


@final
class Ring:
    """A queue of batches in one tensor of (slots, rows, ...), indexed by tensors, so that a recorded step can use it.

    It is made at the first batch, whose shape and type it takes. Feature maps lie channels last, as stages want them.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self.slots, self.rows = slots, rows
        self.kept: Tensor | None = None

    def put(self, visit: Visit, x: Tensor) -> None:
        x = _channels_last(x.detach())
        if self.kept is None:
            self.kept = x.new_zeros(self.slots, self.rows, *x.shape[1:])
        self.kept[:, : visit.rows].index_copy_(0, visit.slot, x.unsqueeze(0))

    def take(self, visit: Visit) -> Tensor:
        """A copy."""
        assert self.kept is not None
        return _channels_first(self.kept[:, : visit.rows].index_select(0, visit.slot)[0])

    @property
    def bytes(self) -> int:
        return self.kept.nbytes if self.kept is not None else 0


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.dim() == 4 else x


class Station(ABC):
    """One stage at work: forward, answer, update. It lives on the device of its stage."""

    needs_targets: ClassVar[bool] = False
    """Also before the last stage?"""
    needs_inputs: ClassVar[bool] = False
    """The network's own, with every visit?"""

    def __init__(self, site: Site, accumulate: int = 1) -> None:
        self.site = site
        self.stage = site.stage
        self.accumulate = accumulate
        self.pending = 0
        """Gradients that have been added up and not been applied yet."""
        self.quick = False
        self.beside: Stage | None = None
        """A small network that is trained with the stage and left behind at the end."""
        self.rings: dict[str, Ring] = {}
        self._rate: Tensor | float = 1.0

    def begin(self, rate: Tensor | float, quick: bool = False) -> None:
        """A step begins, at this share of the initial learning rate. `quick`: compiled code is made for its shapes."""
        self._rate = rate
        self.quick = quick
        self.stage.set_rate(rate)
        if self.beside is not None:
            self.beside.set_rate(rate)

    @abstractmethod
    def step(self, forth: Visit | None, features: Tensor | None, back: Visit | None, adjoint: Tensor | None) -> Sent:
        """One batch forward and the answer to another one, both at the weights of now. None: there is none."""

    def update(self, clip: Clip) -> None:
        """Apply the step's gradients, or keep them for later where several are added up."""
        self.pending += 1
        if self.pending >= self.accumulate:
            self.settle(clip)

    def settle(self, clip: Clip) -> None:
        """Apply the mean of the gradients added up, at as many times the rate."""
        if self.pending == 0:
            return
        gradients = self.gradients()
        if self.pending > 1:
            torch._foreach_mul_(gradients, 1 / self.pending)
            self.stage.set_rate(self._rate * self.pending)
        clip(gradients)
        self.apply()
        self.pending = 0

    def parts(self) -> list[Stage]:
        """All that is trained here."""
        return [part for part in (self.stage, self.beside) if part is not None]

    def gradients(self) -> list[Tensor]:
        return [gradient for part in self.parts() for gradient in part.gradients()]

    def apply(self) -> None:
        for part in self.parts():
            if part.gradients():  # of a station with two parts one may have had nothing to do
                part.apply()

    def forget(self) -> None:
        """Gradients are of no use any more."""
        self.pending = 0
        for part in self.parts():
            part.forget_gradients()

    def pass_through(self, x: Tensor, seed: int | None, instead: Mapping[str, Tensor] | None = None) -> Tensor:
        """Through the blocks; `instead`: other tensors in the place of weights and buffers, by their names."""
        if seed is not None:
            torch.manual_seed(seed)
        return self.stage.forward(x, self.quick, instead)

    def state(self, features: Tensor) -> Tensor:
        """What has arrived, as a leaf whose gradient is the adjoint; the first stage's input has none."""
        features = features.to(self.stage.device)
        return features if self.site.before is None else features.detach().requires_grad_()

    def up(self, state: Tensor) -> Tensor:
        return state if self.site.before is None else self.site.before.up(state)

    def down(self, x: Tensor) -> Tensor:
        return x if self.site.after is None else self.site.after.down(x)

    def at_once(self, forth: Visit, features: Tensor, factor: float = 1.0) -> Sent:
        """The last stage: forward, the network's loss and backward. Nothing is old here."""
        state = self.state(features)
        x = self.pass_through(self.up(state), forth.seed)
        loss = self.site.loss(in_float32(x), forth.targets)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return Sent(None, answer(state, forth.rows, factor), loss.detach(), trained=True)

    def learned(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the station in any case: weights of its own."""
        return {BESIDE + name: value for name, value in self.beside.tensors().items()} if self.beside else {}

    def load_learned(self, kept: Mapping[str, Tensor]) -> bool:
        """Take it back; False, and nothing taken, where it is of another network."""
        if self.beside is None:
            return True
        found = {name.removeprefix(BESIDE): value for name, value in kept.items() if name.startswith(BESIDE)}
        wanted = self.beside.module.state_dict()
        if {f"weights/{n}": w.shape for n, w in wanted.items()} != {
            n: w.shape for n, w in found.items() if n.startswith("weights/")
        }:
            return False
        self.beside.load(found)
        return True

    def queued(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of a station with batches on their way."""
        kept = {f"queue/{name}": ring.kept for name, ring in self.rings.items() if ring.kept is not None}
        if self.pending:
            self.stage.gradients()  # those of copies in low precision become those of the weights
            kept |= {f"gradient/{name}": w.grad for name, w in self.stage.parameters.items() if w.grad is not None}
        return kept | {"mark": self._mark(), "pending": torch.tensor(self.pending)}

    def fits(self, kept: Mapping[str, Tensor]) -> bool:
        """Is it what `queued` gave for the same blocks, method and batch size?"""
        return "mark" in kept and int(kept["mark"]) == int(self._mark())

    def load_queued(self, kept: Mapping[str, Tensor]) -> None:
        """Take back what fits."""
        self.pending = int(kept["pending"])
        for name, ring in self.rings.items():
            found = kept.get(f"queue/{name}")
            ring.kept = found.to(self.stage.device, copy=True) if found is not None else None
        for name, weight in self.stage.parameters.items():
            found = kept.get(f"gradient/{name}")
            weight.grad = torch.empty_like(weight).copy_(found) if found is not None else None

    def _mark(self) -> Tensor:
        """A number that tells the same queues of the same blocks from others."""
        queues = (f"{name}:{ring.slots}x{ring.rows}" for name, ring in self.rings.items())
        numbers = map(str, (self.accumulate, self.site.k, self.site.stages, self.site.rows))
        crossings = (str(cut.small) for cut in (self.site.before, self.site.after) if cut is not None)
        parts = type(self).__name__, *numbers, *self.stage.parameters, *queues, *crossings
        return torch.tensor(int.from_bytes(blake2b("|".join(parts).encode(), digest_size=7).digest(), "big"))

    @property
    def bytes(self) -> int:
        """What it keeps beside the stage."""
        return sum(ring.bytes for ring in self.rings.values()) + sum(v.nbytes for v in self.learned().values())


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies under the same names, by one kernel for all of a type: a deep network has hundreds of small ones."""
    found = dict(tensors)
    copies = {name: torch.empty_like(value) for name, value in found.items()}
    for kind in dict.fromkeys(value.dtype for value in found.values()):
        names = [name for name, value in found.items() if value.dtype == kind]
        torch._foreach_copy_([copies[name] for name in names], [found[name] for name in names])
    return copies


def backward(x: Tensor, gradient: Tensor, more: Tensor | None) -> None:
    """From the gradient of an output, and from another loss of the same pass where there is one."""
    if not x.requires_grad:  # a first stage may have nothing to train
        return
    gradient = gradient.to(x.dtype)
    if more is None:
        torch.autograd.backward(x, gradient)
    else:
        torch.autograd.backward([x, more], [gradient, torch.ones_like(more)])


def answer(state: Tensor, rows: int, factor: float = 1.0) -> Tensor | None:
    """The adjoint of a state per sample: losses are means, so a sample's share of the gradient is one in `rows`."""
    return state.grad.float() * (rows * factor) if state.grad is not None else None


def adam(lr: float) -> MakeOptimizer:
    """For a network beside a stage, whose problem is not that of the stages."""

    def make(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kept = list(weights)
        on_gpu = kept[0].is_cuda
        return torch.optim.Adam(kept, lr=lr, capturable=on_gpu, fused=on_gpu or None)

    return make


@dataclass(frozen=True)
class Streaming(ABC):
    """A method whose states live a few steps. One file per method."""

    upwards: ClassVar[bool] = False
    """Does a batch enter at the last stage? Then adjoints travel with it and features come as the answers."""

    fresh_inputs: ClassVar[bool] = True
    """Inputs are augmented in every epoch: no state outlives its batch."""

    def share(self, ids: Tensor, epoch: int, k: int) -> Tensor | None:  # noqa: ARG002
        """Every stage computes all samples of its batch."""
        return None

    def weight(self, epoch: int, epochs: int) -> float | None:  # noqa: ARG002
        """There is no penalty."""
        return None

    @abstractmethod
    def lag(self, k: int, stages: int) -> int:
        """Steps from the forward pass of a batch at stage k until its answer is used there."""

    @abstractmethod
    def delay(self, k: int, stages: int) -> int:
        """Steps by which the signal that stage k trains on is late."""

    @abstractmethod
    def station(self, site: Site) -> Station:
        """A stage at work."""

    def returned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape, per sample, of what goes back over an interface where states have this one."""
        return shape

    def kept(self, k: int, stages: int) -> tuple[int, int]:  # noqa: ARG002
        """Batches of inputs and of outputs that the queues of stage k hold; what else is kept is not counted."""
        return 0, 0

    def work(self, k: int, stages: int) -> float:  # noqa: ARG002
        """Of a step of stage k, in units of its forward and backward pass."""
        return 1.0

    def pace(self, k: int, stages: int, epoch: float) -> float:  # noqa: ARG002
        """A factor on the learning rate of stage k, at a moment in epochs."""
        return 1.0

    @property
    def recordable(self) -> bool:
        """Does every step do the same, so that a CUDA graph of one can be replayed?"""
        return True

    def staleness(self, stages: int) -> int:
        """Of the stage that waits longest, in steps."""
        return max(self.delay(k, stages) for k in range(stages))


@dataclass(frozen=True)
class Late(Streaming):
    """A method that trains on adjoints of the whole network, 2(K-1-k) steps late, with what makes up for that."""

    shrink: float = 1.0
    """Factor on an adjoint that crosses an interface (Zhuang et al., FDG): early stages have old signals."""
    predict: float = 0.0
    """Share of the delay by which the forward pass looks ahead along the momentum of SGD (Chen et al., SpecTrain)."""
    compensate: float = 0.0
    """Share of its delay that the momentum of SGD makes up for (spike compensation; Kosson et al. 2021).

    A late gradient then does at once what it would have done by now (`Stage.apply`).
    """
    accumulate: int = 1
    """Gradients of so many batches make one update, at as many times the learning rate (ADL; PETRA).

    In updates, the delay is that much shorter.
    """
    detail: float = 0.0
    """Weight of what DS leaves out, ‖x − US(DS(x))‖²; 1 is that of the augmented Lagrangian (`coupling/base.py`).

    Stages train on what crosses and are used on what does not, so the difference should stay small. But on images of
    8 x 8 pixels it is ruinous: replay of digits, K = 3, r = 2, 10 epochs, two seeds: 97.2 and 96.9 % with 0, 70.3 and
    23.6 % with 1 (the augmented Lagrangian, one seed: 93.9 and 15.3 %). Not measured on larger ones yet.
    """
    slow_start: float = 0.0
    """Epochs until a stage has its full learning rate; at first it is divided by the delay (Yang et al., PipeMare)."""

    def __post_init__(self) -> None:
        if not 0 < self.shrink < float("inf"):
            raise InputError(f"shrink is {self.shrink}: write a number greater than 0")
        if not 0 <= self.detail < float("inf"):
            raise InputError(f"detail is {self.detail}: write a number of at least 0")
        if not 0 <= self.predict < float("inf"):
            raise InputError(f"predict is {self.predict}: write a number of at least 0, as in 0.5")
        if not 0 <= self.compensate < float("inf"):
            raise InputError(f"compensate is {self.compensate}: write a number of at least 0, as in 1")
        if self.accumulate < 1:
            raise InputError(f"accumulate is {self.accumulate}: write a number of batches of at least 1")
        if not 0 <= self.slow_start < float("inf"):
            raise InputError(f"slow-start is {self.slow_start}: write a number of epochs of at least 0")

    def lag(self, k: int, stages: int) -> int:
        return 2 * (stages - 1 - k)

    def delay(self, k: int, stages: int) -> int:
        return self.lag(k, stages)

    def pace(self, k: int, stages: int, epoch: float) -> float:
        """PipeMare's first technique: τ_k to the power of −(1 − epoch / slow_start), τ_k the delay in updates."""
        if epoch >= self.slow_start:
            return 1.0
        late = max(1.0, self.delay(k, stages) / self.accumulate)
        return float(late ** -(1 - epoch / self.slow_start))

    @property
    def recordable(self) -> bool:
        return self.accumulate == 1


class LateStation(Station):
    """What the stations of such methods share: where they look ahead to, and how they make up for lost time."""

    def __init__(self, site: Site, method: Late) -> None:
        super().__init__(site, method.accumulate)
        self.method = method
        self.lag = method.lag(site.k, site.stages)
        self._ahead = method.predict * self.lag
        if self._ahead > 0 and not site.stage.has_momentum:
            raise InputError(
                "predict looks ahead along the momentum of SGD, and this optimiser has none: "
                "write predict 0, or take SGD with momentum"
            )
        self._late = method.compensate * self.lag / method.accumulate
        if self._late > 0 and not site.stage.has_plain_momentum:
            raise InputError(
                "compensate changes the plain momentum of SGD, and this optimiser has none: "
                "write compensate 0, or take SGD with momentum"
            )

    def apply(self) -> None:
        if self.stage.gradients():
            self.stage.apply(self._late)

    def predicted(self) -> dict[str, Tensor]:
        """w − predict · delay · lr · momentum: where the weights will be, about, when the answer comes."""
        return self.stage.ahead(self._ahead) if self._ahead > 0 else {}

    def roughness(self, x: Tensor, small: Tensor) -> Tensor | None:
        """What a full-size output loses by DS, relative to its size; None where nothing is lost or counted."""
        after = self.site.after
        if after is None or self.method.detail == 0 or small.shape == x.shape:
            return None
        lost = (x - after.up(small)).float().square().mean()
        return self.method.detail * ROUGHNESS * lost / x.detach().float().square().mean().clamp_min(TINY)
