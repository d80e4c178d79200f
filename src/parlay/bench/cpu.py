"""The systems of `parlay bench --device cpu`: a process and a core per device, gloo between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from parlay import models
from parlay.bench import workers
from parlay.bench.core import LAYER_PARALLEL, SERIAL, Say, Timed
from parlay.bench.gang import Gang, Ganged, Place, Worker, cores
from parlay.errors import InputError
from parlay.memory import keep_freed_memory
from parlay.recipe import Recipe
from parlay.run.setup import method_keys, set_up

MICRO_BATCHES = (2, 4, 8)
"""Of the pipelines. All are timed, and the fastest one counts."""
STREAMS = {"replay": "second forward pass", "delayed": "kept activations"}
"""Streaming methods that are timed, and what each pays for an adjoint that comes late."""


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with what the benchmark fixes, and with its cuts: measured once, on one core, for all processes."""
    if models.is_vae(recipe.model):
        raise InputError(f"bench times classifiers, and {recipe.model} is none: write --model resnet20 or another one")
    recipe = replace(recipe, device="cpu", precision="float32", schedule="parallel", engine="auto")
    if recipe.method == "serial":
        raise InputError("bench times serial training beside the others anyway: write --method al or penalty")
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


def systems(recipe: Recipe, partition: str, say: Say) -> list[Timed]:
    """All of them, started and asleep. The recipe is a resolved one; `partition` is how it was asked to be cut."""
    k, all_threads = recipe.stages, len(cores()) or os.cpu_count() or 1
    streams = {method: _streaming(recipe, method, partition) for method in STREAMS}
    smaller = replace(recipe, downsample=2)
    wanted: list[tuple[str, Callable[[Recipe, Place], Worker], Recipe, int, int]] = [
        (SERIAL, workers.Serial, recipe, 1, 1),
        ("serial-all-threads", workers.Serial, recipe, 1, all_threads),
        (LAYER_PARALLEL, workers.Layers, recipe, k, 1),
        *([("layer-parallel-ds", workers.Layers, smaller, k, 1)] if recipe.downsample == 1 else []),
        *((method, workers.Layers, of, k, 1) for method, of in streams.items()),
        ("stages-alone", workers.Alone, recipe, k, 1),
        ("pipeline", workers.Pipeline, recipe, k, 1),
        ("data-parallel", workers.Replica, recipe, k, 1),
    ]
    gangs: dict[str, Gang] = {}
    try:
        for name, worker, of, size, threads in wanted:
            if name == "pipeline" and not _options(recipe):
                say(f"no pipeline is timed: batch-size {recipe.batch_size} has no part for each of {k} stages")
                continue
            say(f"starting {name}")
            gangs[name] = Gang(name, partial(worker, of), size, threads)
            gangs[name].ready()
    except BaseException:
        for gang in gangs.values():
            gang.close()
        raise
    timed = {name: streams.get(name, recipe) for name in gangs}
    return [system for name, gang in gangs.items() for system in _timed(name, gang, timed[name], all_threads)]


def _streaming(recipe: Recipe, method: str, partition: str) -> Recipe:
    """The same work by a streaming method, with its own defaults and cut by its own costs."""
    keys: dict[str, Any] = dict.fromkeys(method_keys(recipe.method))
    with one_core():
        return set_up(replace(recipe, **keys, method=method, partition=partition)).recipe


def _timed(name: str, gang: Gang, recipe: Recipe, all_threads: int) -> list[Timed]:
    k = recipe.stages
    if name == "pipeline":
        return [Ganged(word, gang, k, f"M = {m}", (word, m)) for word, m in _options(recipe)]
    if name == SERIAL:
        return [Ganged(name, gang, 1, "one core")]
    if name == "serial-all-threads":
        return [Ganged(name, gang, 1, f"{all_threads} threads")]
    r = {LAYER_PARALLEL: recipe.downsample, "layer-parallel-ds": 2}.get(name, 1)
    note = {"stages-alone": "no exchange: the bound", "data-parallel": f"DDP, {k} replicas"}
    note |= {method: f"{what}, cut at {recipe.partition}" for method, what in STREAMS.items()}
    samples = None if name == "data-parallel" else workers.samples_per_step(recipe)
    return [Ganged(name, gang, k, note.get(name, f"r = {r}"), samples=samples)]


def _options(recipe: Recipe) -> list[tuple[str, int]]:
    """Schedules and numbers of micro-batches that this batch and this number of stages allow."""
    possible = [m for m in MICRO_BATCHES if recipe.batch_size % m == 0 and m >= recipe.stages]
    return [(name, m) for name in workers.SCHEDULES for m in possible if recipe.batch_size // m > 1]
