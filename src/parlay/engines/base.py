"""What a trainer asks of an engine: one step at a time, and the sums of an epoch at its end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parlay.data import step_seed
from parlay.engines.crew import Alone, Crew
from parlay.errors import Diverged
from parlay.evaluate import Loss
from parlay.timeline import Span

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
    time: float = 0.0
    """When it is, in epochs and fractions of one."""

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
    counts: list[float] = field(default_factory=list)
    """Samples of each loss, where stages are at different batches."""

    def add(self, samples: int, losses: list[float], violations: list[float]) -> None:
        self.samples += samples
        self.loss = _sum(self.loss, [value * samples for value in losses])
        self.violation = _sum(self.violation, [value * samples for value in violations])

    def add_apart(self, samples: list[int], losses: list[float]) -> None:
        """Losses of different batches, each with its number of samples."""
        self.loss = _sum(self.loss, [value * n for value, n in zip(losses, samples, strict=True)])
        self.counts = _sum(self.counts, [float(n) for n in samples])

    def losses(self) -> list[float]:
        """Means over the samples."""
        if not self.counts:
            return self.means(self.loss)
        return [value / max(n, 1.0) for value, n in zip(self.loss, self.counts, strict=True)]

    def means(self, sums: list[float]) -> list[float]:
        return [value / max(self.samples, 1) for value in sums]


class Engine(ABC):
    """Runs the stages of one network."""

    totals: Totals
    model: nn.Module
    crew: Crew = Alone()
    """The processes that run this engine together, each with a part of the stages."""

    def cosines(self, batch: Batch) -> list[float] | None:  # noqa: ARG002
        """Of the angles between the parallel and the true gradient on a batch: of all weights, then of each stage's.

        Nothing is changed by it. None where an engine cannot tell.
        """
        return None

    def agreed(self, stop: bool) -> bool:
        """Asked before every step: does the loop end here? The same answer in all processes, maybe some steps late."""
        return stop

    def probe(self, x: Tensor) -> Any:
        """Forward through the whole network in this process alone, before training: does this input pass?"""
        return self.forward(x)

    @abstractmethod
    def assemble(self) -> None:
        """Give `model`, on the CPU by now, the weights of all stages in all processes."""

    @property
    @abstractmethod
    def here(self) -> range:
        """The stages that this process trains."""

    def spans(self) -> list[Span]:
        """Who did what when, of all processes, as far as it was recorded. All processes call it together."""
        return []

    @property
    def waited(self) -> float:
        """Seconds that this process has waited for others."""
        return 0.0

    def waits(self) -> list[float]:
        """The same of all processes, which call it together; empty where there is only one."""
        return []

    def facts(self) -> dict[str, Any]:
        """What a run's summary says about its engine."""
        return {"engine": "in-process", "processes": 1}

    @abstractmethod
    def serial_step(self, batch: Batch) -> None:
        """Forward and backward through the whole network, with augmentation."""

    @abstractmethod
    def parallel_step(self, batch: Batch) -> None:
        """One step of every stage on its own problem, then of every interface."""

    def finish(self) -> None:  # noqa: B027
        """Train on the batches that are still on their way, when a parallel phase ends."""

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
    def load(self, parts: Mapping[str, dict[str, Tensor]]) -> None:
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


def raise_if_not_finite(batch: Batch | Sequence[Batch | None], losses: list[float], stages: int) -> None:
    """`batch` is that of all losses, or one for each."""
    batches = [batch] * len(losses) if isinstance(batch, Batch) else batch
    for k, (its, loss) in enumerate(zip(batches, losses, strict=True)):
        if not math.isfinite(loss):
            whose = f"stage {k} of {stages}" if len(losses) == stages else "the network"  # a serial step has one loss
            if its is None:  # no answer has come yet
                raise Diverged(f"the loss of {whose} is {loss} in the first steps of a parallel phase")
            ids = ", ".join(map(str, its.ids[:4].tolist())) + (", ..." if len(its.ids) > 4 else "")
            when = f"epoch {its.epoch + 1}, step {its.step + 1}"  # as people count
            raise Diverged(f"the loss of {whose} is {loss} in {when} (samples {ids})")


def clip_gradients(gradients: list[Tensor], largest: float, norm: Tensor | None = None) -> None:
    """Scale them down where their norm, or the given one that they are a part of, is above the largest."""
    if not gradients:
        return
    norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
    scale = (largest / (norm + 1e-6)).clamp_max(1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))


def stage_tensors(parts: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the stages of any cut have kept, in one dictionary: the names are global."""
    return {name: value for part in parts if part.startswith("stage-") for name, value in parts[part].items()}
