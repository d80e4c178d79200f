"""Processes from one fork server, which has loaded torch: those of a benchmark, of a plan and of the tests.

A pool is started once and waits until it is timed, with a process and a core per device. It may know several ways to do
a step (a pipeline with several numbers of micro-batches), told apart by an option.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from parlay.bench.core import System
from parlay.errors import InputError
from parlay.files import scratch_folder
from parlay.process import keep_freed_memory

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["parlay.bench.cpu"])
START_SECONDS = 120.0  # a process that has not built its system by then never will
STEP_SECONDS = 300.0  # for a whole order, on top of what its steps take on a loaded machine
END_SECONDS = 5.0  # to end by itself
ASLEEP_SECONDS = 7200.0  # that a message may be on its way: its receiver sleeps while other systems are timed
WARM_UP = 2  # steps before the first timing of an option; one more before each timing, since caches were given away


class BenchWorker(ABC):
    """What one process of a pool does."""

    steps = 0

    @abstractmethod
    def step(self, n: int, option: Any) -> None:
        """The n-th training step. It may leave to the next one what it has found left by the one before."""

    def run(self, steps: int, option: Any) -> None:
        for _ in range(steps):
            self.step(self.steps, option)
            self.steps += 1

    def waited(self) -> float | None:
        """Seconds spent so far in waiting for neighbours; None where nobody counts them."""
        return None

    def close(self) -> None:
        return


class Seat(NamedTuple):
    """Where a worker finds itself."""

    rank: int
    size: int
    scratch: Path

    def join(self) -> None:
        """A process group over gloo. Its meeting point is a file: no port, no name to resolve."""
        meet, patience = f"file://{self.scratch / 'meet'}", timedelta(seconds=ASLEEP_SECONDS)
        dist.init_process_group("gloo", init_method=meet, rank=self.rank, world_size=self.size, timeout=patience)


class Timing(NamedTuple):
    """What one process has measured of one order."""

    steps: int
    begin: float
    end: float
    cpu: float
    waited: float | None


class Children:
    """Processes that each do `target(pipe, *args)` with args of their own, and answer with (value, error)."""

    def __init__(self, name: str, target: Callable[..., None], args: Iterable[tuple[Any, ...]]) -> None:
        self.name = name
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for own in args:
            ours, theirs = SERVER.Pipe()
            self.processes.append(SERVER.Process(target=target, args=(theirs, *own), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def tell(self, order: Any) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # who has gone is named when no answer comes
                pipe.send(order)

    def hear(self, seconds: float) -> list[Any]:
        """An answer of every process. A lost one is named at once, a stuck one when the time is over."""
        silent: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        answers, until = dict[int, Any](), time.monotonic() + seconds
        while silent:
            found = wait(list(silent), max(until - time.monotonic(), 0))
            if not found:
                ranks = ", ".join(map(str, silent.values()))
                raise RuntimeError(f"{self.name}: process {ranks} gave no answer for {seconds:.0f} s")
            for pipe in found:
                rank = silent.pop(pipe)
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            answer, error = self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
            raise RuntimeError(f"{self.name}: process {rank} ended (exit code {code})") from None
        if isinstance(error, InputError):
            raise error
        if error:
            raise RuntimeError(f"{self.name}: process {rank} failed: {error}")
        return answer

    def close(self) -> None:
        """Ask them to end, and end those that do not."""
        self.tell(None)
        for process in self.processes:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


@final
class Pool(Children):
    """The processes of one system."""

    def __init__(self, name: str, make: Callable[[Seat], BenchWorker], size: int, threads: int = 1) -> None:
        self.measured: dict[Any, list[list[Timing]]] = {}
        """Of every option: the orders, each a list over the processes."""
        self._held = contextlib.ExitStack()
        self.scratch = self._held.enter_context(scratch_folder())
        super().__init__(name, _serve, [(make, Seat(rank, size, self.scratch), threads) for rank in range(size)])

    def ready(self) -> None:
        """Wait until every process has built its part."""
        self.hear(START_SECONDS)

    def time(self, steps: int, option: Any = None) -> float:
        """Seconds from the first one's start to the last one's end."""
        self.tell((steps, option))
        self.hear(STEP_SECONDS)  # warmed up
        self.tell("go")
        found: list[Timing] = self.hear(STEP_SECONDS + 10 * steps)
        self.measured.setdefault(option, []).append(found)
        return _length(found)

    def close(self) -> None:
        super().close()
        self._held.close()


@final
@dataclass(eq=False)
class PoolSystem(System):
    """A pool, doing its steps in one of its ways."""

    system: str
    pool: Pool
    stages: int
    note: str = ""
    option: Any = None
    samples: float | None = None

    def time(self, steps: int) -> float:
        return self.pool.time(steps, self.option)

    def extra(self) -> dict[str, Any]:
        return shares(self.pool.measured[self.option][1:])  # the first was the warm-up

    def close(self) -> None:
        self.pool.close()


def shares(orders: list[list[Timing]]) -> dict[str, Any]:
    """Of every process, over all orders: its own time per step, and the shares in which it computed and waited.

    To be done before the others is to wait for them too. Stages are never quite equal, and the quicker ones must wait
    for the slowest. What even the one that waits least waits is not due to that: it is lost to the exchange.
    """
    length = sum(map(_length, orders))
    if length <= 0:
        return {}
    by_rank = list(zip(*orders, strict=True))
    found: dict[str, Any] = {
        "stage_ms": [1000 * statistics.median((t.end - t.begin) / t.steps for t in own) for own in by_rank],
        "cpu_share": [sum(t.cpu for t in own) / length for own in by_rank],
    }
    if all(t.waited is not None for own in by_rank for t in own):
        working = [sum(t.end - t.begin - (t.waited or 0.0) for t in own) for own in by_rank]
        found["wait_share"] = [1 - seconds / length for seconds in working]
        found["wait_share_beyond_imbalance"] = min(found["wait_share"])
    return found


def _length(order: list[Timing]) -> float:
    return max(one.end for one in order) - min(one.begin for one in order)


def cores() -> list[int]:
    """Those that this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _serve(pipe: Connection, make: Callable[[Seat], BenchWorker], seat: Seat, threads: int) -> None:
    try:
        keep_freed_memory()
        torch.set_num_threads(threads)
        os.environ.update(OMP_NUM_THREADS=str(threads), PARLAY_TIMEOUT=str(int(ASLEEP_SECONDS)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if threads == 1 and cores():
            os.sched_setaffinity(0, {cores()[seat.rank % len(cores())]})
        worker, warmed = make(seat), set[Any]()
        pipe.send((None, None))  # ready
        while (order := pipe.recv()) is not None:
            steps, option = order
            worker.run(1 if option in warmed else WARM_UP + 1, option)
            warmed.add(option)
            pipe.send((None, None))  # warmed up
            if pipe.recv() is None:
                break
            pipe.send((_timed(worker, steps, option), None))
        worker.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (EOFError, KeyboardInterrupt):
        return  # the one who orders is gone
    except Exception as error:
        if os.environ.get("PARLAY_DEBUG") == "1":
            traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send((None, error if isinstance(error, InputError) else f"{type(error).__name__}: {error}"))


def _timed(worker: BenchWorker, steps: int, option: Any) -> Timing:
    waited, cpu, begin = worker.waited(), time.process_time(), time.perf_counter()
    worker.run(steps, option)
    end, cpu_end, waited_end = time.perf_counter(), time.process_time(), worker.waited()
    gone = None if waited is None or waited_end is None else waited_end - waited
    return Timing(steps, begin, end, cpu_end - cpu, gone)
