"""Decoupled greedy learning (DGL; Belilovsky et al. 2020, arXiv 1901.08164): every stage has a classifier of its own.

Stage k minimises the network's loss of what a small head makes of its output. Outputs stream on; no adjoint crosses, so
nothing waits for an answer and nothing is late. The heads are trained with their stages and left behind at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from parlay.coupling.streaming import Sent, Site, Station, Streaming, Visit
from parlay.errors import InputError
from parlay.evaluate import in_float32

COARSE, COARSER = 4, 2  # sides of the maps in a head: on few pixels it costs next to nothing (the paper's MLP-SR)


@final
@dataclass(frozen=True)
class Local(Streaming):
    """An auxiliary classifier per stage."""

    def lag(self, k: int, stages: int) -> int:  # noqa: ARG002
        return 0

    def delay(self, k: int, stages: int) -> int:  # noqa: ARG002
        return 0

    def station(self, site: Site) -> Station:
        return Alone(site)


@final
class Alone(Station):
    needs_targets: ClassVar[bool] = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if site.outputs is None:
            raise InputError("method local needs a network that puts out one tensor: write method replay")
        outputs = site.outputs
        if site.after is not None:
            shape = site.after.shape
            self.beside = site.network(lambda: head(shape, outputs), site.optimizer)

    def step(self, forth: Visit | None, features: Tensor | None, back: Visit | None, adjoint: Tensor | None) -> Sent:  # noqa: ARG002
        if forth is None or features is None:
            return Sent()
        x = self.pass_through(self.up(features.to(self.stage.device)), forth.seed)
        judged = x if self.beside is None else self.beside.forward(x)
        loss = self.site.loss(in_float32(judged), forth.targets)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        output = None if self.site.last else self.down(x.detach())
        return Sent(output, None, loss.detach(), trained=True)


class MeanOverTokens(nn.Module):
    """(n, ..., features) to (n, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(1) if x.dim() > 2 else x


def head(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Sequential:
    """From a stage's output, per sample of this shape, to the network's. Normalised sample by sample: no statistics."""
    last: list[nn.Module] = [nn.Unflatten(1, outputs)] if len(outputs) != 1 else []
    if len(shape) != 3:
        return nn.Sequential(MeanOverTokens(), nn.LayerNorm(shape[-1]), nn.Linear(shape[-1], math.prod(outputs)), *last)
    channels, *sides = shape
    coarse, coarser = (tuple(min(most, side) for side in sides) for most in (COARSE, COARSER))
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(coarse),
        nn.GroupNorm(1, channels),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(coarser),
        nn.Flatten(),
        nn.Linear(channels * math.prod(coarser), math.prod(outputs)),
        *last,
    )
