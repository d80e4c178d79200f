"""The systems of `parlay bench --device cuda`: the same step on one GPU, serial and with its stages side by side.

Each is Parlay's own engine in one process: eager, captured as a CUDA graph, captured with compiled blocks. The fastest
of the serial ones is what the others are held against.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, final

import torch

from parlay.bench import cpu
from parlay.bench.core import LAYER_PARALLEL, SERIAL, Say, System
from parlay.bench.workers import Bench, samples_per_step
from parlay.config.recipe import Recipe
from parlay.engine.engine import Engine
from parlay.files import scratch_folder
from parlay.lanes import Lanes, lanes_of
from parlay.run.setup import set_up
from parlay.stage.compiled import CompiledBlocks

STAGES = (2, 3, 6, 9)
"""Numbers of stages that are tried, beside the one that is asked for."""
SETTLED = 6  # steps until everything is compiled and captured, once every stage has a batch
REPLAY = "replay"
GRAPH = "CUDA graph"
MIB = 1 << 20


def systems(recipe: Recipe, say: Say, whole: bool = False) -> tuple[Recipe, list[System]]:
    """The recipe with what the benchmark fixes, and all of them; the cuts of each are its own.

    Each is put together when it is timed first: the compiler's work is shown then. `whole`: serial training compiled in
    one piece too.
    """
    cpu.check(recipe)
    say("counting blocks")
    count = blocks(recipe)
    recipe = replace(recipe, device="cuda", schedule="parallel", engine="in-process")
    found = [
        EngineSystem("serial-eager", replace(serial(recipe), capture="off"), "eager", baseline=True),
        EngineSystem("serial-graph", replace(serial(recipe), compile="off"), GRAPH, baseline=True),
        EngineSystem(SERIAL, replace(serial(recipe), compile="on"), f"{GRAPH}, compiled", baseline=True),
    ]
    if whole:
        one_piece = f"{GRAPH}, compiled in one piece"
        found.append(EngineSystem("serial-whole", replace(serial(recipe), compile="on"), one_piece, True, True))
    cuts = [_cut(recipe, k) for k in sorted({*STAGES, recipe.stages}) if 1 < k <= count]
    for name, keys, note in (
        (f"{LAYER_PARALLEL}-graph", {"compile": "off"}, GRAPH),
        (LAYER_PARALLEL, {"compile": "on"}, f"{GRAPH}, compiled"),
        (REPLAY, {"compile": "on", "method": REPLAY, "options": {}}, f"{GRAPH}, compiled"),  # with its own defaults
    ):
        found += [EngineSystem(name, replace(cut, **keys), f"K = {cut.stages}, {note}") for cut in cuts]
    return recipe, list[System](found)


def serial(recipe: Recipe) -> Recipe:
    return replace(recipe, stages=1, partition="even", schedule="serial")


def blocks(recipe: Recipe) -> int:
    """Of the network."""
    return len(set_up(serial(recipe)).partition.model)


def _cut(recipe: Recipe, stages: int) -> Recipe:
    given = recipe.partition if recipe.partition in ("even", "cost") or stages == recipe.stages else "cost"
    return replace(recipe, stages=stages, partition=given)


@final
class EngineSystem(System):
    """Steps of the engine in one process, with real states where it is cut."""

    def __init__(self, system: str, recipe: Recipe, note: str, baseline: bool = False, whole: bool = False) -> None:
        """`whole`: compiled as one piece per stage. That takes minutes for a deep network."""
        self.system, self.stages, self.note, self.baseline = system, recipe.stages, note, baseline
        self.recipe, self.whole, self.steps, self.megabytes = recipe, whole, 0, 0.0
        self._held = ExitStack()
        self._lanes = Lanes()
        self.made: tuple[Bench, Engine] | None = None

    def time(self, steps: int) -> float:
        if self.made is None:
            self._start()
        return self._run(steps)

    def extra(self) -> dict[str, Any]:
        if self.made is None:
            return {}
        bench, engine = self.made
        # states grow with the data, queues do not
        share = len(bench.feed) / bench.setup.facts.train_size if engine.own.method.keeps else 1.0
        return {
            "cuts": list(bench.setup.partition.cuts),
            "method": self.recipe.method,
            "memory_mib": self.megabytes,
            "auxiliary_mib_of_data_set": engine.auxiliary_bytes / share / MIB,
        }

    def close(self) -> None:
        self.made = None
        self._held.close()

    def _start(self) -> None:
        before = _reserved()
        bench = Bench.of(self.recipe)
        engine = bench.engine(self._held.enter_context(scratch_folder()))
        self._held.callback(engine.close)
        if self.whole:
            for stage in engine.own.stages:
                stage.speed_up(CompiledBlocks(stage.module, whole=True))
        self.made, self._lanes = (bench, engine), lanes_of(bench.trainer.device)
        method, k = bench.trainer.method, self.stages
        if k > 1:
            self.samples = samples_per_step(self.recipe)
        filling = max(method.entry(n, k) + method.lag(n, k) for n in range(k))
        self._run(filling + SETTLED)
        self.megabytes = (_reserved() - before) / MIB

    def _run(self, steps: int) -> float:
        """Seconds. Nothing is waited for between the steps, as in training."""
        assert self.made is not None
        bench, engine = self.made
        step = engine.parallel_step if self.stages > 1 else engine.serial_step
        self._lanes.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step(bench.batch(self.steps))
            self.steps += 1
        engine.drain()
        self._lanes.synchronize()
        return time.perf_counter() - began


def _reserved() -> int:
    """Bytes that PyTorch holds on the GPU: tensors, and what a captured step works in."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
