"""What a person sees while a run goes on: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO, final

from parlay.run.records import Record, counted


class Progress:
    """Told of every step and epoch. By itself it shows nothing."""

    def begin(self, steps: int, done: int) -> None:
        """A run of so many steps begins, or goes on."""

    def step(self, text: str) -> None:
        """A step is done."""

    def epoch(self, record: Record, epochs: int) -> None:
        """An epoch is done."""

    def line(self, text: str) -> None:
        """Something to tell."""

    def end(self) -> None:
        """The run is over, however it ended."""


@final
class Silent(Progress):
    """For runs that nobody watches."""


@final
class Lines(Progress):
    """One line per epoch, with the time left."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.steps = self.done = self.first = 0
        self.began = time.monotonic()

    def begin(self, steps: int, done: int) -> None:
        self.steps, self.done, self.first, self.began = steps, done, done, time.monotonic()

    def step(self, text: str) -> None:  # noqa: ARG002
        self.done += 1

    def epoch(self, record: Record, epochs: int) -> None:
        pace = (time.monotonic() - self.began) / max(self.done - self.first, 1)
        self.line(f"{describe(record, epochs)}  {clock(pace * (self.steps - self.done))} left")

    def line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


@final
class Bar(Progress):
    """A bar with the time left; every epoch leaves its line above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self.console = Console(stderr=True, highlight=False)
        self.bar = RichProgress(TextColumn("{task.description}"), *columns, console=self.console, transient=True)
        self.task = self.bar.add_task("")

    def begin(self, steps: int, done: int) -> None:
        self.bar.update(self.task, total=steps, completed=done)
        self.bar.start()

    def step(self, text: str) -> None:
        self.bar.update(self.task, advance=1, description=text)

    def epoch(self, record: Record, epochs: int) -> None:
        self.line(describe(record, epochs))

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def end(self) -> None:
        self.bar.stop()


def for_terminal(stream: TextIO | None = None) -> Progress:
    stream = stream or sys.stderr
    return Bar() if stream.isatty() else Lines(stream)


def describe(record: Record, epochs: int) -> str:
    """An epoch in one line."""
    width = len(counted(epochs - 1, epochs))
    which = f"{counted(record['epoch'], epochs):<{width}}"
    parts = [f"{which}  {record['phase']:<8}"]
    if record["train_loss"] is not None:
        parts.append(f"train loss {record['train_loss']:.3f}")
    if record.get("test_accuracy") is not None:
        parts.append(f"test {record['test_accuracy']:.2f} %")
    elif record.get("test_loss") is not None:
        parts.append(f"test loss {record['test_loss']:.4f}")
    if record.get("violation"):
        parts.append("violation " + " ".join(f"{v:.2f}" for v in record["violation"]))
    parts.append(f"{record['seconds']:.1f} s")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
