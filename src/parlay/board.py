"""TensorBoard, as an extra: what `records.jsonl` says of every epoch, as scalars in `tensorboard/` of the run folder.

In: the records of a run, one at a time. Out: event files, by the leading process alone. The package is asked for only
where somebody wants them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.records import Record

FOLDER = "tensorboard"
SCALARS = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "test_accuracy": "accuracy/test",
    "learning_rate": "rate/learning",
    "beta": "rate/beta",
    "seconds": "time/epoch",
}
"""Names of a record, and of what they are drawn as: those before the same slash stand side by side."""
LISTS = {"losses": ("loss of stage/{}", 0), "violation": ("violation/interface {}", 1)}
"""A scalar for each stage or interface, counted from here on."""


def check() -> None:
    """Is the package there? Asked before anything runs."""
    if find_spec("tensorboard") is None:
        raise InputError(
            "tensorboard is not installed: write pip install 'parlay-train[tensorboard]', or no --tensorboard"
        )


class Board:
    """The event files of one run, from its epoch `first` on: of an earlier try, what came after that is hidden."""

    def __init__(self, out: Path, first: int) -> None:
        self.path, self.first = out / FOLDER, first
        self._writer: Any = None

    def add(self, record: Record) -> None:
        if self._writer is None:  # at the first epoch's end: importing it takes a second
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(
                str(self.path), purge_step=self.first + 1
            )
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["epoch"] + 1)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of an epoch by name; what it has not, as the violation of a serial one, is left out."""
    for key, name in SCALARS.items():
        if record.get(key) is not None:
            yield name, record[key]
    for key, (name, first) in LISTS.items():
        for k, value in enumerate(record.get(key) or [], first):
            if value is not None:
                yield name.format(k), value
