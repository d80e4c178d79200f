"""Auxiliary-variable networks (AuxNet; Sun et al. 2021, arXiv 2112.05387): a small network generates each state.

The state of stage k is g_k(u), made from the network's own input u, so that no stage waits for features, nothing is
kept per sample, and u may be augmented. Each stage has the local loss of the penalty method, and g_k learns to
reproduce the updated state. That much is in the paper's abstract; the rest of this page is our choice.

A batch enters at the last stage and goes up, a stage a step:

    step t, stage k     λ = g_k(u), x = f_k(λ); the target of x has come from stage k+1, where it was λ − p / (2b)
                        the stage's own p makes the target of the stage before
                        x goes to the stage after, where g_{k+1} learns x − p / (2b) in the next step

So a batch makes one pass there and back in every stage, and the signal of stage k is K-1-k steps old, half of replay's.
The gradient of a stage is p + 2b (x − λ): what the stages behind ask for, and a pull into what g can generate. With
an exact g it is backpropagation's.

Three choices keep runs from going astray (results/streaming):

- p is taken where λ is, and not at x, so nothing in it answers to how large x is. What would only make a channel of x
  larger or smaller is left out of the gradient, unless g is exact (`HELD`).
- g begins with nothing, and a stage cannot learn from inputs that have nothing to do with what it will be given. So its
  gradient, and the target that it sends, weigh as much as the running correlation c of g and x.
- g learns the updated state, and not x. Targets are not cut to a trust region: they are never inputs.

What is sent upwards is c (2bλ − p) and 2bc of every sample, and how much of the size is held: the stage before needs
no more, and both have the same b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from parlay.batch import Pass
from parlay.config.keys import option
from parlay.errors import InputError
from parlay.link.link import LinkEnd
from parlay.link.queue import QueueLink, Slots
from parlay.methods.streamed import TINY, Streamed
from parlay.stage.precision import in_full
from parlay.stage.worker import Place, Worker
from parlay_paper.methods.side import FOLLOW, adam

HELD = 0.01  # share that g leaves unexplained from which on it has no say in how large outputs are
HIDDEN = 2  # convolutions before the last one, or more where the image must be halved more often
LAG = 2  # up in the next step, and down in the one after


@final
@dataclass(frozen=True)
class AuxNet(Streamed):
    """Generated states."""

    guesses: ClassVar[bool] = True

    beta: float = option(1.0, "weight of the penalty, relative to the features", form="B", above=0, most=1e12)
    generator_lr: float = option(1e-2, "of the generators' Adam", form="LR", above=0, most=1e30)
    """States move as fast as the network learns, and g has to follow: in first trials 0.003 was too slow."""

    def entry(self, k: int, stages: int) -> int:
        return stages - 1 - k

    def lag(self, k: int, stages: int) -> int:  # noqa: ARG002
        return LAG if k > 0 else 0

    def delay(self, stages: int) -> int:
        return stages - 1

    def link(self, end: LinkEnd) -> QueueLink:
        return QueueLink(end, 0, signal=(math.prod(end.filter.shape(end.shape)) + 2,))

    def worker(self, place: Place) -> Worker:
        return GeneratingWorker(place, self)

    def queued(self, k: int, stages: int) -> tuple[int, int]:
        """Displacements, which have the shape of the inputs."""
        lag = self.lag(k, stages)
        return (lag + 1 if lag else 0), 0


@final
class GeneratingWorker(Worker):
    wants_inputs: ClassVar[bool] = True

    def __init__(self, place: Place, method: AuxNet) -> None:
        super().__init__(place)
        self.beta = method.beta
        self.error = torch.ones((), device=place.stage.device)
        """What g leaves unexplained of x, as a share of the spread over the samples."""
        self._gradient = torch.empty(0)
        self._kept = {name: Slots(LAG + 1, place.rows, place.fixed) for name in ("inputs", "displacements")}
        if place.before is None:
            return
        if place.inputs is None:
            raise InputError("method auxnet generates states from inputs that are numbers: write method replay")
        self.slot_counts = (LAG + 1,)
        inputs, state = place.inputs, place.before.small
        self.side = place.network(lambda: generator(inputs, state), adam(method.generator_lr))

    def learn(self, p: Pass) -> None:
        """The state as it is updated by what the stage before has made of the same batch, relative to its size."""
        if self.side is None:
            return
        assert isinstance(self.before, QueueLink)
        x = self.before.outputs.take(p).float()
        generated = self.side.forward(self._kept["inputs"].take(p)).float()
        missed = generated - (x - self._kept["displacements"].take(p))
        (missed.square().sum() / x.square().sum().clamp_min(TINY)).backward()  # type: ignore[no-untyped-call]
        unexplained, spread = (generated.detach() - x).square().sum(), (x - x.mean(0)).square().sum()
        self.error.lerp_((unexplained / spread.clamp_min(TINY)).clamp_max(1.0), FOLLOW)
        self.trained = True

    def input(self, p: Pass) -> tuple[Tensor | None, Tensor]:
        """λ = g(u), as a leaf whose gradient is the adjoint; the first stage's input is u itself."""
        inputs = self.place.feed.batch(p.samples, p.changes)[0].to(self.stage.device)
        if self.before is None:
            return None, inputs
        self._kept["inputs"].put(p, inputs)
        state = self.generated(inputs).requires_grad_()
        return state, self.before.up(state.to(self.stage.precision or state.dtype))

    @torch.no_grad()
    def generated(self, inputs: Tensor) -> Tensor:
        assert self.side is not None
        return self.side.forward(inputs).float()

    def correlation(self) -> Tensor:
        """c of g and x; the first stage's input is what it is."""
        return (1 - self.error).sqrt() if self.side is not None else torch.ones_like(self.error)

    def loss(self, p: Pass) -> Tensor:
        """The network's, or the pull towards the target that has come."""
        if self.after is None:
            loss = self.place.loss(in_full(self._x), self.targets(p))
            self._loss = self.correlation() * loss
            return loss.detach()
        assert isinstance(self.after, QueueLink)
        gradient, value = pulled(self._small.detach(), self.after.adjoint(p))
        self._gradient = self.correlation() * gradient / p.rows
        return value

    def backward(self, p: Pass) -> None:
        if self.after is None and self._loss.requires_grad:  # not where a first stage has nothing to train
            self._loss.backward()  # type: ignore[no-untyped-call]
        if self.after is not None and self._small.requires_grad:
            torch.autograd.backward(self._small, self._gradient.to(self._small.dtype))
        if self._state is not None:
            self._send_target(p, self._state)
        self.trained = True
        self._state, self._x, self._small = None, torch.empty(0), torch.empty(0)

    def _send_target(self, p: Pass, state: Tensor) -> None:
        """For the output of the stage before; the gradient was taken with the factor c."""
        assert isinstance(self.before, QueueLink)
        adjoint = state.grad.float() * p.rows if state.grad is not None else torch.zeros_like(state)
        state, c = state.detach(), self.correlation()
        stiffness = self.beta / (state[0].numel() * state.square().mean()).clamp_min(TINY)
        self._kept["displacements"].put(p, adjoint / (2 * stiffness))
        weight, held = 2 * c * stiffness, ((1 - c.square()) / HELD).clamp_max(1.0)
        last = torch.stack([weight, held]).expand(p.rows, 2)
        self.before.send_back(p, torch.cat([(weight * state - adjoint).flatten(1), last], 1))

    # Checkpoints

    def learned(self) -> dict[str, Tensor]:
        return super().learned() | ({"error": self.error} if self.side is not None else {})

    def load_learned(self, kept: Mapping[str, Tensor]) -> bool:
        if not super().load_learned(kept):
            return False
        if self.side is not None:
            self.error.copy_(kept["error"])
        return True

    def tensors(self) -> dict[str, Tensor]:
        found = super().tensors()
        for name, slots in self._kept.items():
            found |= slots.tensors(name)
        return found

    def load(self, kept: Mapping[str, Tensor]) -> None:
        super().load(kept)
        for name, slots in self._kept.items():
            slots.load(name, kept, self.stage.device)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(slots.bytes for slots in self._kept.values())


def pulled(x: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient per sample, and value, of w/2 ‖x − λ*‖². The message has wλ* and w of every sample, and `held`: the
    share that the gradient is without of what would only make channels larger or smaller.
    """
    x = x.float()
    weight, held = (column.view(-1, *[1] * (x.dim() - 1)) for column in message[:, -2:].unbind(1))
    gradient = weight * x - message[:, :-2].view(x.shape)
    value = (gradient.square() / (2 * weight).clamp_min(TINY)).sum() / len(x)
    over = (0, *range(2, x.dim()))
    growth = (gradient * x).sum(over, keepdim=True) / x.square().sum(over, keepdim=True).clamp_min(TINY)
    return gradient - held * growth * x, value


class Norm(nn.BatchNorm2d):
    """Batch norm, without running statistics, because g is not used but in training; a single value stays as it is."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.numel() > x.shape[1] else x


def generator(inputs: tuple[int, ...], state: tuple[int, ...]) -> nn.Sequential:
    """From inputs to states of these shapes per sample: a few convolutions; linear layers for what is not a map."""
    if len(inputs) != 3 or len(state) != 3:
        size = math.prod(state)
        layers = nn.Flatten(), nn.Linear(math.prod(inputs), size), nn.ReLU(), nn.Linear(size, size)
        return nn.Sequential(*layers, nn.Unflatten(1, state))
    channels, sides = inputs[0], inputs[1:]
    halvings = max(0, min(side // small for side, small in zip(sides, state[1:], strict=True)).bit_length() - 1)
    fitting = tuple(small << halvings for small in state[1:])
    found: list[nn.Module] = [nn.AdaptiveAvgPool2d(fitting)] if fitting != sides else []
    for n in range(max(HIDDEN, halvings)):
        found += [nn.Conv2d(channels, state[0], 3, 2 if n < halvings else 1, 1, bias=False), Norm(state[0]), nn.ReLU()]
        channels = state[0]
    return nn.Sequential(*found, nn.Conv2d(channels, state[0], 3, padding=1))
