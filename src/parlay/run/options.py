"""What a run is told: the part of a trainer that is left once the engine stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from parlay.config.rates import Rate
from parlay.config.schedule import Schedule
from parlay.engine.evaluate import Loss
from parlay.errors import InputError
from parlay.methods.method import Method
from parlay.partitioning import Partition
from parlay.run import board
from parlay.run.board import Board
from parlay.run.progress import Progress
from parlay.run.records import Record


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
    device: torch.device
    downsample: int
    out: Path | None
    tensorboard: bool
    judge_every: int
    checkpoint_every: int
    checkpoint_states: bool
    progress: Progress
    about: Mapping[str, Any]
    recipe: str | None

    def __post_init__(self) -> None:
        if self.judge_every < 1:
            raise InputError(f"judge-every is {self.judge_every}: write a number of at least 1")
        if self.tensorboard and self.out is None:
            raise InputError("tensorboard needs a run folder: give `out`")
        if self.tensorboard:
            board.check()

    @property
    def stages(self) -> int:
        return len(self.partition)

    def callbacks(self) -> list[Callback]:
        return [Board(self.out)] if self.tensorboard and self.out is not None else []
