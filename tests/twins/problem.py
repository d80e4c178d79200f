"""What the twins share: the network in K stages, the steps of an epoch, serial training, DS and US."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.data.batches import batches, step_seed

AUGMENTATION = 1 << 20  # its stream of random numbers; stage k has stream k


class Step(NamedTuple):
    epoch: int
    number: int
    ids: Tensor
    rate: float
    """Of the weights, as a share of the initial one: a cosine."""


class Problem:
    """Train `stages` on `data` over `phases`: a letter per epoch, P for parallel and S for serial."""

    def __init__(
        self,
        stages: list[nn.Sequential],
        data: tuple[Tensor, Tensor],
        phases: str,
        *,
        batch_size: int,
        seed: int,
        downsample: int = 1,
        augment: Any = None,
        clip: float | None = None,
        lr: float = 0.1,
        **sgd: float,
    ) -> None:
        self.f = [stage.train().to(memory_format=torch.channels_last) for stage in stages]
        self.K = len(stages)
        self.y, self.targets = data
        self.phases, self.batch_size, self.seed = phases, batch_size, seed
        self.r, self.augment, self.clip = downsample, augment, clip
        self.lr, self.rest = lr, sgd
        self.sgd = [self.optimizer(f) for f in self.f]
        self.pending = [0] * self.K

    def optimizer(self, module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), self.lr, **self.rest)

    def steps(self, epoch: int) -> Iterator[Step]:
        """Every sample once; the last batch may be smaller."""
        parts = batches(len(self.y), self.batch_size, self.seed, epoch)
        for number, ids in enumerate(parts):
            progress = (epoch + number / len(parts)) / len(self.phases)
            yield Step(epoch, number, ids, 0.5 * (1 + math.cos(math.pi * progress)))

    def parallel_phases(self) -> Iterator[list[int]]:
        """Trains the serial epochs, and gives the epochs of each parallel phase between them."""
        for phase, epochs in itertools.groupby(range(len(self.phases)), key=self.phases.__getitem__):
            if phase == "P":
                yield list(epochs)
            else:
                for epoch in epochs:
                    self.serial(epoch)

    def serial(self, epoch: int) -> None:
        for step in self.steps(epoch):
            x = self.images(step, augmented=True)
            for k in range(self.K):
                x = self.forward(k, x, step)
            self.φ(x, step.ids).backward()
            self.clipped([w for f in self.f for w in f.parameters()])
            for k in range(self.K):
                self.step(k, step.rate)

    def images(self, step: Step, augmented: bool) -> Tensor:
        x = self.y[step.ids]
        if augmented and self.augment is not None:
            random = torch.Generator().manual_seed(step_seed(self.seed, step.epoch, step.number, AUGMENTATION))
            x = self.augment.apply(x, self.augment.draw(len(x), random))
        return x

    def forward(self, k: int, x: Tensor, step: Step, W: dict[str, Tensor] | None = None) -> Tensor:
        """x of stage k; random numbers are the same whenever the batch passes. W: other weights than those of now."""
        torch.manual_seed(step_seed(self.seed, step.epoch, step.number, k))
        return torch.func.functional_call(self.f[k], W or {}, nhwc(x))

    def φ(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(x, self.targets[ids])

    def ahead(self, k: int, steps: float, rate: float) -> dict[str, Tensor]:
        """W − steps · η v: where momentum alone would take the weights. A clone lies in memory as its weight does."""
        v = {w: state["momentum_buffer"] for w, state in self.sgd[k].state.items()}
        moving = [(name, w) for name, w in self.f[k].named_parameters() if w in v]
        return {name: w.detach().clone().add_(-steps * (self.lr * rate) * v[w]) for name, w in moving}

    def update(self, k: int, rate: float, M: int = 1) -> None:
        """v ← m v + g, W ← W − η v. M gradients make one update by their mean, at M times the rate."""
        self.pending[k] += 1
        if self.pending[k] == M:
            self.apply(k, rate)

    def apply(self, k: int, rate: float) -> None:
        """What has been added up; weights without a gradient stay as they are."""
        M, self.pending[k] = self.pending[k], 0
        for w in self.f[k].parameters():
            if w.grad is not None and M > 1:
                w.grad *= 1 / M
        self.clipped(self.f[k].parameters())
        self.step(k, M * rate)

    def clipped(self, weights: Iterable[Tensor]) -> None:
        """The norm of their gradients together is at most `clip`."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(weights, self.clip)

    def step(self, k: int, rate: float) -> None:
        self.sgd[k].param_groups[0]["lr"] = self.lr * rate
        self.sgd[k].step()
        self.sgd[k].zero_grad()

    def DS(self, x: Tensor) -> Tensor:
        """The mean over cells of r × r pixels; cells at the rim may be smaller."""
        return F.avg_pool2d(x, self.r, ceil_mode=True) if self.r > 1 else x

    def US(self, Λ: Tensor, full: torch.Size | None) -> Tensor:
        """Each element over its cell, cropped to the full shape; None: of the images, which are whole."""
        if self.r == 1 or full is None:
            return Λ
        return nhwc(F.interpolate(Λ, scale_factor=self.r)[..., : full[2], : full[3]])

    @torch.no_grad()
    def initial_guess(self, epoch: int) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, torch.Size]]:
        """States by a pass through the whole network, filters included: λ, s² and full shapes, by k = 1..K-1."""
        λ, s2, full = {}, {}, {}
        for step in self.steps(epoch):
            x = self.images(step, augmented=False)
            for k in range(1, self.K):
                x = self.forward(k - 1, x, step)
                full[k] = x.shape
                x = self.DS(x)
                if k not in λ:
                    λ[k] = torch.zeros(len(self.y), *x.shape[1:])
                λ[k][step.ids] = x
                s2[k] = follow(s2.get(k), x)
                x = self.US(x, full[k])
        return λ, s2, full


def nhwc(x: Tensor) -> Tensor:
    """Feature maps lie channels last in memory: the order in which sums round."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def follow(s2: Tensor | None, x: Tensor) -> Tensor:
    """s²: the running mean square of what crosses a cut."""
    now = x.norm().square() / x.numel()
    return now if s2 is None else torch.lerp(s2, now, 0.1)
