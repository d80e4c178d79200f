"""Decoupled greedy learning (DGL; Belilovsky et al. 2020, arXiv 1901.08164): every stage has a classifier of its own.

Stage k minimises the network's loss of what a small head makes of its output. Outputs stream on; no adjoint comes back,
so nothing is late. The heads are trained with their stages and left behind at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from parlay.batch import Pass
from parlay.errors import InputError
from parlay.link.link import LinkEnd
from parlay.link.queue import QueueLink
from parlay.methods.streamed import Streamed
from parlay.stage.precision import in_full
from parlay.stage.worker import Place, Worker

COARSE, COARSER = 4, 2  # sides of the maps in a head: on few pixels it costs next to nothing (the paper's MLP-SR)


@dataclass(frozen=True)
class Local(Streamed):
    """An auxiliary classifier per stage."""

    def lag(self, k: int, stages: int) -> int:  # noqa: ARG002
        return 0

    def link(self, end: LinkEnd) -> QueueLink:
        return QueueLink(end, 0, adjoints=False)

    def worker(self, place: Place) -> Worker:
        return LocalWorker(place)


@final
class LocalWorker(Worker):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if place.outputs is None:
            raise InputError("method local needs a network that puts out one tensor: write method replay")
        outputs = place.outputs
        if place.after is not None:
            shape = place.after.end.shape
            self.side = place.network(lambda: head(shape, outputs), place.optimizer)

    def input(self, p: Pass) -> tuple[Tensor | None, Tensor]:
        """No adjoint is asked for, so the state is no leaf."""
        _, x = super().input(p)
        return None, x.detach()

    def loss(self, p: Pass) -> Tensor:
        judged = self._x if self.side is None else self.side.forward(self._x)
        self._loss = self.place.loss(in_full(judged), self.targets(p))
        return self._loss.detach()

    def answer(self, p: Pass) -> None:  # noqa: ARG002
        """There is none: nothing goes back."""
        self.trained = True


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
