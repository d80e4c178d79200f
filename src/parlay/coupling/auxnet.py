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

In the choices below, numbers are test accuracies on the digits: ResNet-8, K = 3, batches of 32, 8 epochs, schedule
parallel, seeds 1 and 2; "shifted" is with crops of one pixel, r = 2 with downsampling. Serial training has 98.3 and
98.9 %, shifted 98.6 and 98.3 %; this method 98.3 and 99.2 %, r = 2 95.0 and 90.8 %. The other numbers are of the
version before, in which nothing held the size of outputs: 97.8 and 98.3 %, shifted 96.7 and 97.8 %, r = 2 94.4 and
94.4 %.

- p is taken where λ is, and not at x, so nothing in it answers to how large x is, and the pull goes to λ, which is
  smaller than x, since g explains only a part. With ResNet-20 on 10,000 images of CIFAR-10 (K = 2, batches of 64, rate
  0.05) the root mean square of x fell from 1.6 to 0.03 in 200 steps at β = 1 and rose to 13 at β = 0.03 (displacements
  cut to 0.3 and 0.1 of λ in these two); of seven such runs four diverged, and three were stopped astray. So what would
  only make a channel of x larger or smaller is left out of the gradient, unless g is exact (`HELD`): then the root mean
  square stayed at 3.7.
- A stage cannot learn from inputs that have nothing to do with what it will be given, and g begins with nothing. So
  the gradient of a stage, and the target that it sends, weigh as much as the running correlation c of g and x. Without
  it, and with g learning x, both runs diverged.
- g learns the updated state. In the version before, when it learned x instead, which is what the whole network will
  feed the stage, accuracy was 97.8 and 97.8 %, shifted 93.9 and 95.0 %, r = 2 92.5 and 81.1 %.
- Targets are not cut to a trust region: unlike joint states of the penalty method they are never inputs.
- What is sent upwards is c (2bλ − p) and 2bc of every sample, and how much of the size is held: the stage before needs
  no more, and both have the same b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from parlay.coupling.streaming import TINY, Ring, Sent, Site, Station, Streaming, Visit, adam, answer, backward
from parlay.errors import InputError
from parlay.evaluate import in_float32

FOLLOW = 0.1  # of the running error
HELD = 0.01  # share that g leaves unexplained from which on it has no say in how large outputs are
HIDDEN = 2  # convolutions before the last one, or more where the image must be halved more often


@final
@dataclass(frozen=True)
class AuxNet(Streaming):
    """Generated states."""

    upwards: ClassVar[bool] = True

    beta: float = 1.0
    """Weight of the penalty, relative to the features. 0.3: 98.9 and 99.2 %, shifted 94.7 and 95.0 %, r = 2 92.5 and
    92.8 %. 3: diverged or far behind, all six.
    """
    generator_lr: float = 1e-2
    """Of Adam. States move as fast as the network learns, and g has to follow: in first trials 0.003 was too slow."""

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("generator-lr", self.generator_lr)):
            if not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}: write a number greater than 0")

    def lag(self, k: int, stages: int) -> int:  # noqa: ARG002
        """Up in the next step, and down in the one after."""
        return 2 if k > 0 else 0

    def delay(self, k: int, stages: int) -> int:
        return stages - 1 - k

    def kept(self, k: int, stages: int) -> tuple[int, int]:
        """Displacements, which have the shape of the inputs."""
        lag = self.lag(k, stages)
        return (lag + 1 if lag else 0), 0

    def returned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(shape) + 2,)

    def station(self, site: Site) -> Station:
        return Generating(site, self)


@final
class Generating(Station):
    needs_inputs: ClassVar[bool] = True

    def __init__(self, site: Site, method: AuxNet) -> None:
        super().__init__(site)
        self.beta = method.beta
        self.error = torch.ones((), device=site.stage.device)
        """What g leaves unexplained of x, as a share of the spread over the samples."""
        if site.before is None:
            return
        if site.inputs is None:
            raise InputError("method auxnet generates states from inputs that are numbers: write method replay")
        inputs, state = site.inputs, site.before.small
        self.beside = site.network(lambda: generator(inputs, state), adam(method.generator_lr))
        slots = method.lag(site.k, site.stages) + 1
        self.rings = {name: Ring(slots, site.rows) for name in ("inputs", "displacements")}

    def step(self, forth: Visit | None, features: Tensor | None, back: Visit | None, adjoint: Tensor | None) -> Sent:
        learned = back is not None and features is not None
        if back is not None and features is not None:
            self._learn(back, features)
        return self._train(forth, adjoint) if forth is not None else Sent(trained=learned)

    def _train(self, forth: Visit, message: Tensor | None) -> Sent:
        """Forward from the state as generated, backward from the network's loss or from the target of the output."""
        assert forth.inputs is not None
        inputs = forth.inputs.to(self.stage.device)
        state, c = self.generated(inputs), self.correlation()
        fed = self.up(self.stage.lowered(state)) if self.beside is not None else inputs
        whole = self.pass_through(fed, forth.seed)
        output = None
        if self.site.last:
            loss = self.site.loss(in_float32(whole), forth.targets)
            if loss.requires_grad:
                (c * loss).backward()  # type: ignore[no-untyped-call]
        else:
            assert message is not None
            x = self.down(whole)
            output = x.detach()
            gradient, loss = pulled(output, message.to(x.device))
            backward(x, c * gradient / forth.rows, None)
        if self.beside is None:
            return Sent(output, None, loss.detach(), trained=True)
        p = answer(state, forth.rows)  # the gradient was taken with the factor c
        p, state = torch.zeros_like(state) if p is None else p, state.detach()
        stiffness = self.beta / (state[0].numel() * state.square().mean()).clamp_min(TINY)
        self.rings["inputs"].put(forth, inputs)
        self.rings["displacements"].put(forth, p / (2 * stiffness))
        weight, held = 2 * c * stiffness, ((1 - c.square()) / HELD).clamp_max(1.0)
        last = torch.stack([weight, held]).expand(forth.rows, 2)
        target = torch.cat([(weight * state - p).flatten(1), last], 1)
        return Sent(output, target, loss.detach(), trained=True)

    def _learn(self, back: Visit, features: Tensor) -> None:
        """The state as it is updated by what the stage before has made of the same batch, relative to its size."""
        assert self.beside is not None
        x = features.to(self.stage.device).float()
        generated = self.beside.forward(self.rings["inputs"].take(back)).float()
        missed = generated - (x - self.rings["displacements"].take(back))
        (missed.square().sum() / x.square().sum().clamp_min(TINY)).backward()  # type: ignore[no-untyped-call]
        unexplained, spread = (generated.detach() - x).square().sum(), (x - x.mean(0)).square().sum()
        self.error.lerp_((unexplained / spread.clamp_min(TINY)).clamp_max(1.0), FOLLOW)

    def generated(self, inputs: Tensor) -> Tensor:
        """λ = g(u), as a leaf whose gradient is the adjoint; the first stage's input is u itself."""
        if self.beside is None:
            return inputs
        with torch.no_grad():
            state = self.beside.forward(inputs).float()
        return state.requires_grad_()

    def correlation(self) -> Tensor:
        """c of g and x; the first stage's input is what it is."""
        return (1 - self.error).sqrt() if self.beside is not None else torch.ones_like(self.error)

    def learned(self) -> dict[str, Tensor]:
        return super().learned() | ({"error": self.error} if self.beside is not None else {})

    def load_learned(self, kept: Mapping[str, Tensor]) -> bool:
        if not super().load_learned(kept):
            return False
        if self.beside is not None:
            self.error.copy_(kept["error"])
        return True


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
