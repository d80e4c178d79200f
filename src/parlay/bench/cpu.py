"""The systems of `parlay bench --device cpu`: a process and a core per device, gloo between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from parlay import models
from parlay.bench import workers
from parlay.bench.core import DATA_PARALLEL, LAYER_PARALLEL, SERIAL, Say, System
from parlay.bench.processes import BenchWorker, Pool, PoolSystem, Seat, cores
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.process import keep_freed_memory
from parlay.run.setup import set_up

MICRO_BATCHES = (2, 4, 8)
"""Of the pipelines. All are timed, and the fastest one counts."""
STREAMED = {"replay": "second forward pass", "delayed": "kept activations"}
"""Streamed methods that are timed, and what each pays for an adjoint that comes late."""
Work = Callable[[Recipe, Seat], BenchWorker]


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with what the benchmark fixes, and with its cuts: measured once, on one core, for all processes."""
    check(recipe)
    return _cut(replace(recipe, device="cpu", precision="float32", schedule="parallel", engine="auto"))


def check(recipe: Recipe) -> None:
    """Is it a network that the benchmark can time?"""
    if models.is_vae(recipe.model):
        raise InputError(f"bench times classifiers, and {recipe.model} is none: write --model resnet20 or another one")
    if recipe.method == "serial":
        raise InputError("bench times serial training beside the others anyway: write --method al or penalty")


def _cut(recipe: Recipe) -> Recipe:
    with one_core():
        return set_up(recipe).recipe


@contextmanager
def one_core() -> Iterator[None]:
    """Measure as the processes of the benchmark run: one thread, and memory that is kept."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def systems(asked: Recipe, say: Say, whole: bool = False) -> tuple[Recipe, list[System]]:
    """The resolved recipe, and all of them: started and asleep."""
    if whole:
        raise InputError("nothing is compiled on cpu: leave --whole out, or write --device cuda")
    recipe, found = resolved(asked), list[System]()
    k, threads = recipe.stages, len(cores()) or os.cpu_count() or 1
    with ExitStack() as started:

        def add(name: str, work: Work, note: str, of: Recipe = recipe, size: int = k, threads: int = 1) -> None:
            say(f"starting {name}")
            pool = Pool(name, partial(work, of), size, threads)
            started.callback(pool.close)
            pool.ready()
            trained = workers.samples_per_step(of) if work in (workers.LayerParallel, workers.IsolatedStage) else None
            ways = pipelines(of) if work is workers.Pipelined else [(name, note, None)]
            found.extend(PoolSystem(system, pool, size, words, option, trained) for system, words, option in ways)

        add(SERIAL, workers.WholeNetwork, "one core", size=1)
        add("serial-all-threads", workers.WholeNetwork, f"{threads} threads", size=1, threads=threads)
        add(LAYER_PARALLEL, workers.LayerParallel, f"r = {recipe.downsample}")
        if recipe.downsample == 1:
            add(f"{LAYER_PARALLEL}-ds", workers.LayerParallel, "r = 2", replace(recipe, downsample=2))
        for method, what in STREAMED.items():
            own = _cut(replace(recipe, options={}, method=method, partition=asked.partition))
            add(method, workers.LayerParallel, f"{what}, cut at {own.partition}", own)
        add("stages-alone", workers.IsolatedStage, "no exchange: the bound")
        if pipelines(recipe):
            add("pipeline", workers.Pipelined, "")
        else:
            say(f"no pipeline is timed: batch-size {recipe.batch_size} has no part for each of {k} stages")
        add(DATA_PARALLEL, workers.WholeNetwork, f"DDP, {k} replicas")
        started.pop_all()
    return recipe, found


def pipelines(recipe: Recipe) -> list[tuple[str, str, tuple[str, int]]]:
    """System, note and option of those that this batch and this number of stages allow."""
    size = recipe.batch_size
    possible = [m for m in MICRO_BATCHES if size % m == 0 and recipe.stages <= m < size]
    return [(name, f"M = {m}", (name, m)) for name in workers.SCHEDULES for m in possible]
