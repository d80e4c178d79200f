"""Runs at the same time, each a `parlay train` in a process of its own: small networks leave most of a GPU idle.

Their accuracies are those of runs made one by one; their seconds are no timings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from parlay.compare import OVER, Planned, begun, is_over, status_of
from parlay.process import LAUNCHER, Interrupt
from parlay.run.progress import Progress
from parlay_paper.queue import Budget

LOOK = 0.5  # seconds between two looks at the processes
TELL = 60.0  # seconds between two lines about those that go on
GRACE = 600.0  # seconds for the processes to write their checkpoints after an interrupt


@final
@dataclass
class Concurrent:
    """The runs that are left, and those at work: no more at once than there is room and time for."""

    left: list[Planned]
    at_once: int
    room: int | None
    """Bytes for all together; None where nobody counts."""
    needs: Mapping[Path, int]
    """Bytes of each, by its folder."""
    budget: Budget | None = None
    running: list[tuple[Planned, subprocess.Popen[bytes]]] = field(default_factory=list)

    def next(self) -> Planned | None:
        """The first run that fits beside those at work; too large a run is made alone.

        On a GPU the second run waits until the first has an epoch behind it: all then find its compiled code in the
        cache.
        """
        running = [one for one, _ in self.running]
        if len(running) >= self.at_once:
            return None
        if self.room is not None and len(running) == 1 and epochs_done(running[0]) == 0:
            return None
        taken = sum(self.needs[one.folder] for one in running)
        for one in self.left:
            roomy = self.room is None or not running or taken + self.needs[one.folder] <= self.room
            if roomy and (self.budget is None or self.budget.fits(one, running)):
                return one
        return None

    def start(self) -> None:
        while (one := self.next()) is not None:
            self.left.remove(one)
            self.running.append((one, _start(one, self.at_once)))

    def ended(self) -> list[tuple[Planned, str]]:
        """Those that have ended since, with the last thing that each has said."""
        over = [pair for pair in self.running if pair[1].poll() is not None]
        self.running = [pair for pair in self.running if pair not in over]
        return [(one, _said(one) or f"exit code {process.returncode}") for one, process in over]

    def stop(self) -> None:
        """Each writes a checkpoint at its next step; the same command goes on from there."""
        for _, process in self.running:
            process.terminate()
        until = time.monotonic() + GRACE
        for _, process in self.running:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def text(self) -> str:
        return ", ".join(f"{one.folder.name} {epochs_done(one)}/{one.recipe.epochs}" for one, _ in self.running)


def carry_out(
    planned: Sequence[Planned],
    at_once: int,
    room: int | None,
    memory: Callable[[Planned], int],
    progress: Progress,
    budget: Budget | None = None,
) -> str:
    """Make the runs that are missing, so many at once and no more than fit into `room` bytes together.

    Within a budget, only those that it has time for; those at work when it is over stop with a checkpoint.
    Gives the status of the whole, as `compare.carry_out` does: finished, interrupted or failed.
    """
    asked = [one for one in planned if not is_over(one)]
    if len(asked) < len(planned):
        progress.line(f"{len(planned) - len(asked)} of {len(planned)} runs are done already")
    concurrent = Concurrent(list(asked), at_once, room, {one.folder: memory(one) for one in asked}, budget)
    over, failed, last_line, seen = 0, False, time.monotonic(), sum(map(epochs_done, asked))
    progress.begin(sum(one.recipe.epochs for one in asked), seen)
    with Interrupt() as interrupt:
        try:
            while not (interrupt.requested() or (budget is not None and budget.over())):
                concurrent.start()
                if not concurrent.running:
                    break
                time.sleep(LOOK)
                for one, said in concurrent.ended():
                    over += 1
                    failed = failed or status_of(one.folder) not in OVER
                    progress.line(f"{over} of {len(asked)} runs: {one.title}: {said}")
                    if budget is not None:
                        budget.queue.note(one, said)
                while seen < sum(map(epochs_done, asked)):
                    progress.step(concurrent.text())
                    seen += 1
                if concurrent.running and time.monotonic() - last_line > TELL:
                    last_line = time.monotonic()
                    progress.line(concurrent.text())
            if interrupt.requested():
                return "interrupted"
        finally:
            concurrent.stop()
            progress.end()
    return "failed" if failed else "finished"


def epochs_done(one: Planned) -> int:
    path = one.folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _start(one: Planned, at_once: int) -> subprocess.Popen[bytes]:
    """From a recipe file; recipe and log lie beside the run folder."""
    one.folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = _file(one, ".toml")
    recipe.write_text(one.recipe.toml())
    words = ["train", "--recipe", str(recipe), "--out", str(one.folder), *(["--resume"] if begun(one) else [])]
    threads = str(max((os.cpu_count() or 1) // at_once, 1))
    with _file(one, ".log").open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "parlay.cli", *words],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": threads, **os.environ, LAUNCHER: str(os.getpid())},  # it ends with this one
            start_new_session=True,  # Ctrl-C is for this process, which then asks them to stop
        )


def _said(one: Planned) -> str:
    lines = _file(one, ".log").read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("parlay: ") if lines else ""


def _file(one: Planned, end: str) -> Path:
    return one.folder.with_name(one.folder.name + end)
