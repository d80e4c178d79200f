"""Two processes with one thread each, which make run after run: importing torch takes as long as a run on the digits.

In: jobs and a folder. Out: a run folder per job, with `cost.json` beside the records: processor and wall seconds of the
run, commit, processor. A folder appears under its name only when its run has ended, so what is there is whole.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from home_rows import Job
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from parlay.errors import InputError

WORKERS = 2
UNFINISHED = ".partial"
KEPT = {".toml", ".json", ".jsonl"}


def make(todo: Sequence[Job], out: Path, data_dir: Path, say: "Shown") -> None:
    """Make the runs that are not there yet, in this order."""
    out.mkdir(parents=True, exist_ok=True)
    for rest in out.glob(f"*{UNFINISHED}"):
        shutil.rmtree(rest)
    waiting = [job for job in todo if not (out / job.name / "cost.json").exists()]
    if not waiting:
        return
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # of the workers, before they import torch
    context, facts = get_context("spawn"), about()
    workers, busy = [], dict[Connection, Job]()
    try:
        with say.counting(waiting):
            for _ in range(min(WORKERS, len(waiting))):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, out, data_dir, facts), daemon=True)
                heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its workers
                process.start()
                signal.signal(signal.SIGINT, heard)
                theirs.close()
                workers.append(process)
                busy[ours] = waiting.pop(0)
                ours.send(busy[ours])
            while busy:
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    job = busy.pop(pipe)
                    say.ended(job, _answer(pipe, job))
                    if waiting:
                        busy[pipe] = waiting.pop(0)
                        pipe.send(busy[pipe])
                    else:
                        pipe.close()
    except BaseException:
        for process in workers:
            process.kill()
        raise
    finally:
        for process in workers:
            process.join()


def _answer(pipe: Connection, job: Job) -> dict[str, Any]:
    try:
        told: dict[str, Any] | InputError = pipe.recv()
    except EOFError:
        raise SystemExit(f"a worker ended in {job.name}: run the same command again to go on") from None
    if isinstance(told, InputError):
        raise told
    return told


def _work(pipe: Connection, out: Path, data_dir: Path, facts: dict[str, str]) -> None:
    import torch

    from parlay.process import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            job = pipe.recv()
            try:
                pipe.send(train(job, out, data_dir, facts))
            except InputError as wrong:  # a damaged file of data, say
                pipe.send(wrong)


def train(job: Job, out: Path, data_dir: Path, facts: dict[str, str]) -> dict[str, Any]:
    """One run, from reading its data to its folder. No weights are kept."""
    from parlay import Recipe
    from parlay.run import setup as run
    from parlay.run.progress import Silent

    partial = out / f"{job.name}{UNFINISHED}"
    cpu, wall = time.process_time(), time.perf_counter()
    result = run.train(Recipe(**job.keys(data_dir)), partial, resume=False, progress=Silent())
    if result.status == "interrupted":
        raise KeyboardInterrupt
    shutil.rmtree(partial / "checkpoints", ignore_errors=True)
    for file in partial.iterdir():
        if file.suffix not in KEPT:
            file.unlink()
    cost = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall, **facts}
    (partial / "cost.json").write_text(json.dumps(cost, indent=2) + "\n")
    partial.replace(out / job.name)
    return {"status": result.status, "accuracy": result.summary["test_accuracy"], **cost}


def about() -> dict[str, str]:
    """What a run cannot know of itself: the commit that it is made with, and the processor's name."""
    from parlay.bench import processor

    told = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        commit = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {"commit": commit, "processor": processor()}


def console() -> Console:
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)


class Shown:
    """What a person sees of the queue: a bar with the time left on a terminal, a line per run elsewhere."""

    def __init__(self) -> None:
        self.console = console()
        self.done = self.runs = 0
        self.spent = self.total = 0.0
        self.began = time.monotonic()

    @contextlib.contextmanager
    def counting(self, waiting: Sequence[Job]) -> Iterator[None]:
        self.runs, self.total, self.began = len(waiting), sum(job.cost for job in waiting), time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar.add_task(f"{self.runs} runs", total=self.total)
        with self.bar:
            yield

    def ended(self, job: Job, told: dict[str, Any]) -> None:
        self.done += 1
        self.spent += job.cost
        left = (time.monotonic() - self.began) * (self.total - self.spent) / self.spent
        score = "" if told["accuracy"] is None else f"{told['accuracy']:6.2f} %"
        word = "" if told["status"] == "finished" else f"  {told['status']}"
        rest = f"{self.done} of {self.runs}, {left / 60:.0f} min left"
        self.console.print(f"{job.name:<34} {score}  {told['wall_seconds']:5.1f} s{word}  ({rest})", markup=False)
        self.bar.update(self.bar.task_ids[0], completed=self.spent)
