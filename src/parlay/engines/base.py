"""What a trainer asks of an engine: one step at a time, and the sums of an epoch at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parlay.data import step_seed
from parlay.evaluate import Loss

AUGMENTATION = 1 << 20  # stream of the augmentation's random numbers; the stages' streams are their indices


@dataclass(frozen=True)
class Batch:
    """One step: which samples, when, and at which rates."""

    ids: Tensor
    epoch: int
    step: int
    rate: float
    """Learning rate as a share of the initial one."""
    beta: float
    seed: int
    following: Tensor | None = None
    """The ids of the next step, known ahead: their states can be fetched while this one is computed."""

    def random(self, stream: int) -> int:
        """The seed of one stream of random numbers: a function of seed, epoch and step, so nothing needs saving."""
        return step_seed(self.seed, self.epoch, self.step, stream)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.random(AUGMENTATION))


@dataclass
class Totals:
    """Sums over the steps of an epoch, on the host."""

    samples: int = 0
    loss: list[float] = field(default_factory=list)
    violation: list[float] = field(default_factory=list)

    def add(self, samples: int, losses: list[float], violations: list[float]) -> None:
        self.samples += samples
        self.loss = _sum(self.loss, [value * samples for value in losses])
        self.violation = _sum(self.violation, [value * samples for value in violations])

    def means(self, sums: list[float]) -> list[float]:
        return [value / max(self.samples, 1) for value in sums]


class Engine(ABC):
    """Runs the stages of one network."""

    totals: Totals
    model: nn.Module

    @abstractmethod
    def serial_step(self, batch: Batch) -> None:
        """Forward and backward through the whole network, with augmentation."""

    @abstractmethod
    def parallel_step(self, batch: Batch) -> None:
        """One step of every stage on its own problem, then of every interface."""

    @abstractmethod
    def refresh(self, batches: Iterable[Batch], stop: Callable[[], bool]) -> list[float] | None:
        """Set states and multipliers by a pass over the training set; the violation of those that stood there before.

        None where there were none before, or where `stop` ended it: the interfaces then count as not filled.
        """

    @abstractmethod
    def forward(self, x: Tensor) -> Any:
        """Through the whole network, without filters."""

    @abstractmethod
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], loss: Loss | None = None) -> dict[str, float]:
        """Mean loss and, for classes, accuracy through the whole network in evaluation mode."""

    @abstractmethod
    def drain(self) -> Totals:
        """Bring `totals` up to the last step. Raises `Diverged` at the first loss that is not finite."""

    @abstractmethod
    def parts(self, with_states: bool) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint keeps, by part."""

    @abstractmethod
    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        """Take what `parts` of any number of stages gave; states only where they fit."""

    @property
    @abstractmethod
    def filled(self) -> bool:
        """Do all interfaces hold states?"""

    @property
    @abstractmethod
    def learning_rate(self) -> float | None:
        """Of the last step."""

    @property
    @abstractmethod
    def auxiliary_bytes(self) -> int:
        """What the stores hold."""

    @abstractmethod
    def close(self) -> None:
        """Give the stores back."""


def _sum(sums: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more
