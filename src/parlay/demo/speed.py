"""How fast two stages are on two cores of this machine, beside other ways to use two cores.

A core stands for a device, with a process on it: serial training on one, two stages of layer-parallel training, the
best pipeline of `torch.distributed.pipelining`, data parallelism. One process with two threads is timed too, since it
is what a person on one machine has without any of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from parlay.bench.core import (
    DATA_PARALLEL,
    LAYER_PARALLEL,
    MARGIN,
    SERIAL,
    Problem,
    Result,
    System,
    as_json,
    interleaved,
    quartiles,
)
from parlay.bench.processes import cores
from parlay.config.recipe import Recipe
from parlay.run.progress import Progress, clock

RECIPE = Recipe(dataset="cifar10", model="resnet20", method="al", stages=2, partition="cost", batch_size=64)
"""Of ResNet-20 in the shape of CIFAR-10, whose steps take a tenth of a second: the digits' are too short to be cut.

Batches of 64 lie between those of 32, where two stages gain more beside data parallelism, and of 128, where less.
"""
SECONDS = 10.0
STEPS = 2  # of one timing; a step before it warms up
ROUNDS = (3, 15)
UNSTEADY = 0.15  # between the quartiles of a speed-up: more than this is told
THREADS = "serial-two-threads"
PIPELINE = "pipeline"
QUOTA = Path("/sys/fs/cgroup/cpu.max")

# the simplest first: of ways that are equally fast, the first one is the one to take
NAMES = {SERIAL: "one core", DATA_PARALLEL: "data parallel", PIPELINE: "the pipeline", LAYER_PARALLEL: "two stages"}


def why_not() -> str | None:
    """Why there is nothing to time, in a sentence; None where two cores are there."""
    count, share = _count(), _quota()
    if count >= 2 and share >= 2:
        return None
    what = "one core" if count < 2 else f"{share:g} cores' worth of time"
    return f"No speed is timed: stages that work at the same time need two cores, and this process may use {what}."


def _count() -> int:
    return len(cores()) or os.cpu_count() or 1


def _quota() -> float:
    """How many cores' time a container may use; infinite where nobody has set that."""
    try:
        quota, period = QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


def measure(progress: Progress, command: str) -> dict[str, Any]:
    """The times, as `parlay bench --json` has them; `says` is what came out."""
    from parlay import bench
    from parlay.bench import cpu
    from parlay.run.records import environment

    load = os.getloadavg()[0]
    progress.line("Timing on two cores: starting the processes")
    recipe = cpu.resolved(RECIPE)
    try:
        with _systems(recipe) as (pipelines, others):
            progress.begin(len(pipelines), 0)
            tried = {}
            for pipeline in pipelines:
                progress.step(f"trying {pipeline.system} ({pipeline.note})")
                tried[pipeline] = pipeline.time(1)
            best = min(pipelines, key=lambda pipeline: tried[pipeline])
            systems = [*others[:-1], best, others[-1]]
            rounds = _rounds(sum(system.time(1) for system in others) + tried[best], progress, len(systems))
            rows = interleaved(systems, Problem(recipe.model, recipe.batch_size), rounds, STEPS, progress.step)
    finally:
        progress.end()
    words = {f"{one.system}, {one.note}": 1000 * seconds for one, seconds in tried.items()}
    rows = [replace(row, extra={**row.extra, "tried_step_ms": words}) if is_pipeline(row) else row for row in rows]
    about = {**environment(bench.devices(recipe)), "processor": bench.processor(), "load_before": load}
    more = {"rounds": rounds, "steps": STEPS, "cuts": recipe.partition, "spread": "quartiles"}
    return as_json(rows, about, command, **more, says=says(rows, load))


@contextmanager
def _systems(recipe: Recipe) -> Iterator[tuple[list[System], list[System]]]:
    """The pipelines, of which the best one counts, and the other systems, all of them started and asleep."""
    from parlay.bench import cpu, workers
    from parlay.bench.processes import BenchWorker, Pool, PoolSystem, Seat

    wanted: dict[str, tuple[Callable[[Recipe, Seat], BenchWorker], int, int]] = {
        SERIAL: (workers.WholeNetwork, 1, 1),
        THREADS: (workers.WholeNetwork, 1, 2),
        LAYER_PARALLEL: (workers.LayerParallel, 2, 1),
        PIPELINE: (workers.Pipelined, 2, 1),
        DATA_PARALLEL: (workers.WholeNetwork, 2, 1),
    }
    notes = {SERIAL: "one core", THREADS: "2 threads", LAYER_PARALLEL: "al", DATA_PARALLEL: "DDP, 2 replicas"}
    pools: dict[str, Pool] = {}
    try:
        for name, (worker, size, threads) in wanted.items():
            pools[name] = Pool(name, partial(worker, recipe), size, threads)
        for pool in pools.values():
            pool.ready()
        pipelines: list[System] = [
            PoolSystem(schedule, pools[PIPELINE], 2, f"M = {m}", (schedule, m))
            for schedule in workers.SCHEDULES
            for m in cpu.MICRO_BATCHES
        ]
        yield pipelines, [PoolSystem(name, pools[name], wanted[name][1], note) for name, note in notes.items()]
    finally:
        for pool in pools.values():
            pool.close()


def _rounds(pace: float, progress: Progress, systems: int) -> int:
    """As many as fit into the seconds, and an odd number: a median is then one of them."""
    least, most = ROUNDS
    a_round = pace * (STEPS + 1)
    rounds = min(max(int(SECONDS / a_round), least), most)
    rounds -= 1 - rounds % 2
    progress.line(f"Timing on two cores: {rounds} rounds, about {clock(rounds * a_round + 2 * pace)}")
    progress.begin((rounds + 1) * systems, 0)
    return rounds


def is_pipeline(row: Result) -> bool:
    return row.system.startswith(PIPELINE)


@dataclass(frozen=True)
class Timings:
    """The rows by what they are, the simplest first."""

    rows: dict[str, Result]
    threads: Result

    @classmethod
    def of(cls, rows: Sequence[Result]) -> Timings:
        named = {PIPELINE if is_pipeline(row) else row.system: row for row in rows}
        return cls({name: named[name] for name in NAMES}, named[THREADS])

    @property
    def fastest(self) -> str:
        return min(self.rows, key=lambda name: self.rows[name].step_ms)

    def level(self) -> list[str]:
        """Those as fast as the fastest one, as far as the rounds can tell; the simplest first."""
        best = self.rows[self.fastest]
        return [name for name, row in self.rows.items() if not is_slower(row, best)]

    def widest(self) -> tuple[str, float, float]:
        """Whose speed-up varies most over the rounds, and its quartiles."""
        found = [(name, *quartiles(row.speedups)[::2]) for name, row in self.rows.items()]
        return max(found, key=lambda one: one[2] - one[1])


def is_slower(row: Result, than: Result) -> bool:
    """By more than the margin, and in three rounds of four."""
    ratios = sorted(a / b for a, b in zip(row.seconds, than.seconds, strict=True))
    return median(ratios) > 1 + MARGIN and ratios[len(ratios) // 4] > 1


def says(rows: Sequence[Result], load: float = 0.0) -> list[str]:
    """What came out, whoever wins: the line that counts first."""
    found = Timings.of(rows)
    ours, piped, data = (_gain(found.rows[name]) for name in (LAYER_PARALLEL, PIPELINE, DATA_PARALLEL))
    name, low, high = found.widest()
    unsteady = high - low > UNSTEADY
    verdict = _verdict(found, unsteady)
    told = [
        f"Two stages on two cores: {ours} times one core; pipeline {piped}, data parallel {data}: {verdict}.",
        _threads(found),
    ]
    if unsteady:
        told.append(
            f"These figures are unsteady: in the middle half of the rounds, {NAMES[name]} had {low:.2f} to {high:.2f} "
            f"(load average {load:.1f} before), so time again on an idle machine."
        )
    elif load > max(_count(), 2):
        told.append(f"Other programs were at work (load average {load:.1f} before), so time again on an idle machine.")
    return told


def _verdict(found: Timings, unsteady: bool) -> str:
    level = found.level()
    first, alone = level[0], level == [found.fastest]
    if unsteady:
        return "the rounds differ too much to name the fastest"
    if first == LAYER_PARALLEL:
        return "two stages are the fastest here"
    if first == SERIAL:
        return "nothing is faster than one core here, so train serially"
    where = " where the network fits" if first == DATA_PARALLEL else ""
    how = "the fastest here" if alone else "as fast as any here"
    return f"{NAMES[first]} is {how}, so take it{where}"


def _threads(found: Timings) -> str:
    best = found.rows[found.fastest]
    text = f"One process with two threads: {_gain(found.threads)}"
    if is_slower(best, found.threads):
        return f"{text}, the fastest of all on these cores. Separate devices have no such choice."
    return f"{text}. Separate devices have no such choice."


def _gain(row: Result) -> str:
    return "–" if row.speedup is None else f"{row.speedup:.2f}"
