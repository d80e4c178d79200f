"""Processes that wait on a pipe until they are timed: a process and a core per device.

All systems of a benchmark are started once and stay; those that are not being timed sleep in a read. A gang may know
several ways to do a step (a pipeline with several numbers of micro-batches), told apart by an option.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from parlay.bench.core import Timed
from parlay.process import keep_freed_memory

START_SECONDS = 120.0  # a process that has not built its system by then never will
STEP_SECONDS = 300.0  # for a whole order, on top of what its steps take on a loaded machine
END_SECONDS = 5.0  # to end by itself
ASLEEP_SECONDS = 7200.0  # that a message may be on its way: its receiver sleeps while other systems are timed
WARM_UP = 2  # steps before the first timing of an option; one more before each timing, since caches were given away


class Worker(ABC):
    """What one process of a gang does."""

    @abstractmethod
    def step(self, option: Any) -> None:
        """One training step. It may leave to the next one what it has found left by the one before."""

    def waited(self) -> float | None:
        """Seconds spent so far in waiting for neighbours; None where nobody counts them."""
        return None

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Place:
    """Where a worker finds itself."""

    rank: int
    size: int
    scratch: Path

    def join(self) -> None:
        """A process group over gloo. Its meeting point is a file: no port, no name to resolve."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.scratch / 'meet'}",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=ASLEEP_SECONDS),
        )


Make = Callable[[Place], Worker]


@dataclass(frozen=True)
class Clocked:
    """What one process has measured of one order."""

    steps: int
    begin: float
    end: float
    cpu: float
    waited: float | None


class Gang:
    """The processes of one system."""

    def __init__(self, name: str, make: Make, size: int, threads: int = 1) -> None:
        self.name = name
        self.scratch = Path(tempfile.mkdtemp(prefix="parlay-bench-"))
        self.measured: dict[Any, list[list[Clocked]]] = {}
        """Of every option: the orders, each a list over the processes."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["parlay.bench.cpu"])  # torch is loaded once, not once per process
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, make, Place(rank, size, self.scratch), threads), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def ready(self) -> None:
        """Wait until every process has built its part."""
        self._hear(START_SECONDS)

    def time(self, steps: int, option: Any = None) -> float:
        """Seconds from the first one's start to the last one's end."""
        self._tell(("time", steps, option))
        self._hear(STEP_SECONDS)  # warmed up
        self._tell("go")
        found: list[Clocked] = self._hear(STEP_SECONDS + 10 * steps)
        self.measured.setdefault(option, []).append(found)
        return max(clock.end for clock in found) - min(clock.begin for clock in found)

    def report(self) -> list[dict[str, Any]]:
        self._tell("report")
        return self._hear(STEP_SECONDS)

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        for process in self.processes:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _tell(self, order: Any) -> None:
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(order)
            except OSError:
                raise self._lost(rank) from None

    def _hear(self, seconds: float) -> list[Any]:
        """An answer of every process. A lost one is named at once, a stuck one when the time is over."""
        answers: dict[int, Any] = {}
        until = time.monotonic() + seconds
        while len(answers) < len(self.pipes):
            open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            found = wait(list(open_pipes), max(until - time.monotonic(), 0))
            if not found:
                ranks = ", ".join(map(str, open_pipes.values()))
                raise RuntimeError(f"{self.name}: process {ranks} gave no answer for {seconds:.0f} s")
            for pipe in found:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    word, value = self.pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._lost(rank) from None
                if word == "failed":
                    raise RuntimeError(f"{self.name}: process {rank} failed: {value}")
                answers[rank] = value
        return [answers[rank] for rank in range(len(self.pipes))]

    def _lost(self, rank: int) -> RuntimeError:
        self.processes[rank].join(1)
        return RuntimeError(f"{self.name}: process {rank} ended (exit code {self.processes[rank].exitcode})")


@final
class Ganged(Timed):
    """A gang, doing its steps in one of its ways."""

    def __init__(
        self, system: str, gang: Gang, stages: int, note: str = "", option: Any = None, samples: float | None = None
    ) -> None:
        self.system, self.stages, self.note, self.samples = system, stages, note, samples
        self.gang, self.option = gang, option

    def time(self, steps: int) -> float:
        return self.gang.time(steps, self.option)

    def extra(self) -> dict[str, Any]:
        counted = self.gang.measured[self.option][1:]  # the first was the warm-up
        reports = self.gang.report()
        return {**shares(counted), **{key: [part[key] for part in reports] for key in reports[0]}}

    def close(self) -> None:
        self.gang.close()


def shares(orders: list[list[Clocked]]) -> dict[str, Any]:
    """Of every process, over all orders: its own time per step, and the shares in which it computed and waited.

    To be done before the others is to wait for them too. Stages are never quite equal, and the quicker ones must wait
    for the slowest. What even the one that waits least waits is not due to that: it is lost to the exchange.
    """
    lengths = [max(c.end for c in order) - min(c.begin for c in order) for order in orders]
    length = sum(lengths)
    if length <= 0:
        return {}
    ranks = range(len(orders[0]))
    own = [[order[rank].end - order[rank].begin for order in orders] for rank in ranks]
    steps = [order[0].steps for order in orders]
    found: dict[str, Any] = {
        "stage_ms": [1000 * statistics.median(t / n for t, n in zip(times, steps, strict=True)) for times in own],
        "cpu_share": [sum(order[rank].cpu for order in orders) / length for rank in ranks],
    }
    waits = [order[rank].waited for order in orders for rank in ranks]
    if None in waits:
        return found
    inside = [sum(order[rank].waited or 0.0 for order in orders) for rank in ranks]
    found["wait_share"] = [(inside[rank] + length - sum(own[rank])) / length for rank in ranks]
    found["wait_share_beyond_imbalance"] = min(found["wait_share"])
    return found


def cores() -> list[int]:
    """Those that this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _serve(pipe: Connection, make: Make, place: Place, threads: int) -> None:
    try:
        keep_freed_memory()
        torch.set_num_threads(threads)
        os.environ.update(OMP_NUM_THREADS=str(threads), PARLAY_TIMEOUT=str(int(ASLEEP_SECONDS)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if threads == 1 and cores():
            os.sched_setaffinity(0, {cores()[place.rank % len(cores())]})
        worker = make(place)
        pipe.send(("ready", None))
        warmed: set[Any] = set()
        while True:
            order = pipe.recv()
            if order == "end":
                break
            if order == "report":
                pipe.send(("report", worker.report()))
                continue
            _, steps, option = order
            _run(worker, option, 1 if option in warmed else WARM_UP + 1)
            warmed.add(option)
            pipe.send(("warm", None))
            pipe.recv()  # go
            pipe.send(("timed", _clock(worker, option, steps)))
        worker.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (EOFError, KeyboardInterrupt):
        return  # the one who orders is gone
    except Exception as error:
        if os.environ.get("PARLAY_DEBUG") == "1":
            traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _clock(worker: Worker, option: Any, steps: int) -> Clocked:
    waited, cpu, begin = worker.waited(), time.process_time(), time.perf_counter()
    _run(worker, option, steps)
    end, cpu_end, waited_end = time.perf_counter(), time.process_time(), worker.waited()
    gone = None if waited is None or waited_end is None else waited_end - waited
    return Clocked(steps, begin, end, cpu_end - cpu, gone)


def _run(worker: Worker, option: Any, steps: int) -> None:
    for _ in range(steps):
        worker.step(option)
