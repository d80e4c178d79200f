"""TensorBoard, as an extra: what `records.jsonl` says of every epoch, as scalars in the folder `tensorboard/`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.run.records import Record

FOLDER = "tensorboard"
SCALARS = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "test_accuracy": "accuracy/test",
    "learning_rate": "rate/learning",
    "beta": "rate/beta",
    "seconds": "time/epoch",
}
"""What a key of a record is drawn as: those before the same slash stand side by side."""
LISTS = {"losses": ("loss of stage/{}", 0), "violation": ("violation/interface {}", 1)}
"""A scalar for each stage or interface, counted from here on."""


def check() -> None:
    """Is the package there? Asked before anything runs."""
    if find_spec("tensorboard") is None:
        raise InputError(
            "tensorboard is not installed: write pip install 'parlay-train[tensorboard]', or no --tensorboard"
        )


class Board:
    """A callback that writes the event files of one run."""

    def __init__(self, out: Path) -> None:
        self._path, self._first = out / FOLDER, 0
        self._writer: Any = None

    def begin(self, epoch: int) -> None:
        """Of an earlier try, what came from this epoch on is hidden."""
        self._first = epoch

    def epoch(self, record: Record) -> None:
        if self._writer is None:  # at the first epoch's end: importing it takes a second
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            self._writer = writer(str(self._path), purge_step=self._first + 1)
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["epoch"] + 1)
        self._writer.flush()

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of an epoch by name; what it has not, as the violation of a serial one, is left out."""
    found = {name: record.get(key) for key, name in SCALARS.items()}
    for key, (name, first) in LISTS.items():
        found |= {name.format(k): value for k, value in enumerate(record.get(key) or [], first)}
    return ((name, value) for name, value in found.items() if value is not None)
