"""What a run is told: the part of a trainer that is left once the engine stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from parlay.coupling import Method
from parlay.evaluate import Loss
from parlay.partitioning import Partition
from parlay.rates import Rate
from parlay.run.board import Board
from parlay.run.progress import Progress
from parlay.run.records import Record
from parlay.schedule import Schedule


class Callback(Protocol):
    """Told of every epoch, in the leading process alone."""

    def begin(self, epoch: int) -> None: ...

    def epoch(self, record: Record) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """By the names that the trainer has for them, where they are explained."""

    partition: Partition
    method: Method
    schedule: Schedule
    rate: Rate
    batch_size: int
    seed: int
    test_loss: Loss
    devices: Sequence[torch.device]
    downsample: int
    out: Path | None
    tensorboard: bool
    judge_every: int
    checkpoint_every: int
    checkpoint_states: bool
    progress: Progress
    about: Mapping[str, Any]
    recipe: str | None

    @property
    def stages(self) -> int:
        return len(self.partition)

    def callbacks(self) -> list[Callback]:
        return [Board(self.out)] if self.tensorboard and self.out is not None else []
