"""Runs at the same time, each a `parlay train` in a process of its own: small networks leave most of a GPU idle.

Their accuracies are those of runs made one by one; their seconds are no timings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from parlay.compare import OVER, Planned, begun, is_over, status_of
from parlay.interrupt import Interrupt
from parlay.launch import worker
from parlay.progress import Progress
from parlay_paper.queue import Budget

LOOK = 0.5  # seconds between two looks at the processes
TELL = 60.0  # seconds between two lines about those that go on
GRACE = 600.0  # seconds for the processes to write their checkpoints after an interrupt


@final
@dataclass
class _Going:
    """A process at work."""

    one: Planned
    process: subprocess.Popen[bytes]

    @property
    def epochs(self) -> int:
        return epochs_done(self.one)


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
    left = [one for one in planned if not is_over(one)]
    if len(left) < len(planned):
        progress.line(f"{len(planned) - len(left)} of {len(planned)} runs are done already")
    needs = {one.folder: memory(one) for one in left}
    asked, over, failed, told = tuple(left), 0, False, time.monotonic()
    seen = sum(map(epochs_done, asked))
    progress.begin(sum(one.recipe.epochs for one in asked), seen)
    going: list[_Going] = []
    with Interrupt() as interrupt:
        try:
            while not (interrupt.requested() or (budget is not None and budget.over())):
                while (n := _next(left, going, at_once, room, needs, budget)) is not None:
                    going.append(_start(left.pop(n), at_once))
                if not going:
                    break
                time.sleep(LOOK)
                for ended in [one for one in going if one.process.poll() is not None]:
                    going.remove(ended)
                    over += 1
                    failed = failed or status_of(ended.one.folder) not in OVER
                    progress.line(f"{over} of {len(asked)} runs: {ended.one.title}: {_outcome(ended)}")
                    if budget is not None:
                        budget.queue.note(ended.one, _outcome(ended))
                while seen < sum(map(epochs_done, asked)):
                    progress.step(_text(going))
                    seen += 1
                if going and time.monotonic() - told > TELL:
                    told = time.monotonic()
                    progress.line(_text(going))
            if interrupt.requested():
                return "interrupted"
        finally:
            _stop(going)
            progress.end()
    return "failed" if failed else "finished"


def epochs_done(one: Planned) -> int:
    path = one.folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _next(
    left: Sequence[Planned],
    going: Sequence[_Going],
    at_once: int,
    room: int | None,
    needs: Mapping[Path, int],
    budget: Budget | None = None,
) -> int | None:
    """The first run that fits beside those at work, into the memory and the budget; too large a run is made alone.

    On a GPU the second run waits until the first has an epoch behind it: all then find its compiled code in the cache.
    """
    if not left or len(going) >= at_once:
        return None
    if room is not None and len(going) == 1 and going[0].epochs == 0:
        return None
    taken, beside = sum(needs[one.one.folder] for one in going), [one.one for one in going]
    for n, one in enumerate(left):
        roomy = room is None or not going or taken + needs[one.folder] <= room
        if roomy and (budget is None or budget.fits(one, beside)):
            return n
    return None


def _start(one: Planned, at_once: int) -> _Going:
    """From a recipe file; recipe and log lie beside the run folder."""
    one.folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = one.folder.with_name(one.folder.name + ".toml")
    recipe.write_text(one.recipe.toml())
    words = ["train", "--recipe", str(recipe), "--out", str(one.folder), *(["--resume"] if begun(one) else [])]
    threads = str(max((os.cpu_count() or 1) // at_once, 1))
    with _log(one).open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "parlay.cli", *words],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": threads, **os.environ, worker.LAUNCHER: str(os.getpid())},  # it ends with this one
            start_new_session=True,  # Ctrl-C is for this process, which then asks them to stop
        )
    return _Going(one, process)


def _stop(going: Sequence[_Going]) -> None:
    """Each writes a checkpoint at its next step; the same command goes on from there."""
    for one in going:
        one.process.terminate()
    until = time.monotonic() + GRACE
    for one in going:
        try:
            one.process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def _text(going: Sequence[_Going]) -> str:
    return ", ".join(f"{one.one.folder.name} {one.epochs}/{one.one.recipe.epochs}" for one in going)


def _log(one: Planned) -> Path:
    return one.folder.with_name(one.folder.name + ".log")


def _outcome(ended: _Going) -> str:
    """The last thing that it has said."""
    lines = _log(ended.one).read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("parlay: ") if lines else f"exit code {ended.process.returncode}"
