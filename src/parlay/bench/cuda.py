"""The systems of `parlay bench --device cuda`: the same step on one GPU, serial and with its stages side by side.

Each is Parlay's own in-process engine: eager, recorded as a CUDA graph, recorded with compiled blocks. The fastest of
the serial ones is what the others are held against.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from parlay import models
from parlay.bench.core import LAYER_PARALLEL, SERIAL, Say, Timed
from parlay.bench.workers import BATCHES, Bench, samples_per_step
from parlay.coupling import Streaming
from parlay.engines.compiled import CompiledBlocks
from parlay.engines.in_process import InProcess
from parlay.errors import InputError
from parlay.recipe import Recipe
from parlay.run.setup import method_keys

STAGES = (2, 3, 6, 9)
"""Numbers of stages that are tried, beside the one that is asked for."""
SETTLED = 6  # steps until everything is compiled and recorded, once every stage has a batch
REPLAY = "replay"
ONE_PIECE = "CUDA graph, compiled in one piece"
MIB = 1 << 20


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with what the benchmark fixes. The cuts are another matter for each number of stages."""
    if models.is_vae(recipe.model):
        raise InputError(f"bench times classifiers, and {recipe.model} is none: write --model resnet20 or another one")
    if recipe.method == "serial":
        raise InputError("bench times serial training beside the others anyway: write --method al or penalty")
    return replace(recipe, device="cuda", schedule="parallel", engine="in-process")


def systems(recipe: Recipe, partition: str, say: Say, whole: bool = False) -> list[Timed]:  # noqa: ARG001
    """All of them. Each is put together when it is timed first: the compiler's work is told then.

    `whole`: serial training compiled in one piece too. With ResNet-110 on an H200 it was as fast as block by block.
    """
    say("counting blocks")
    blocks = len(Bench.of(_serial(recipe)).setup.partition.model)
    counts = sorted({k for k in (*STAGES, recipe.stages) if 1 < k <= blocks})
    serial = _serial(recipe)
    return [
        Engined("serial-eager", replace(serial, capture="off"), "eager", baseline=True),
        Engined("serial-graph", replace(serial, compile="off"), "CUDA graph", baseline=True),
        Engined(SERIAL, replace(serial, compile="on"), "CUDA graph, compiled", baseline=True),
        *([Engined("serial-whole", replace(serial, compile="on"), ONE_PIECE, baseline=True, whole=True)] * whole),
        *(Engined(f"{LAYER_PARALLEL}-graph", _cut(recipe, k, "off"), f"K = {k}, CUDA graph") for k in counts),
        *(Engined(LAYER_PARALLEL, _cut(recipe, k, "on"), f"K = {k}, CUDA graph, compiled") for k in counts),
        *(Engined(REPLAY, _replayed(recipe, k), f"K = {k}, CUDA graph, compiled") for k in counts),
    ]


def _serial(recipe: Recipe) -> Recipe:
    return replace(recipe, stages=1, partition="even", schedule="serial")


def _cut(recipe: Recipe, stages: int, compiled: str) -> Recipe:
    given = recipe.partition if recipe.partition in ("even", "cost") or stages == recipe.stages else "cost"
    return replace(recipe, stages=stages, partition=given, compile=compiled)


def _replayed(recipe: Recipe, stages: int) -> Recipe:
    """The same work by replay, with its own defaults."""
    keys: dict[str, Any] = dict.fromkeys(method_keys(recipe.method))
    return replace(_cut(recipe, stages, "on"), **keys, method=REPLAY)


@final
class Engined(Timed):
    """Steps of the in-process engine, with real states where it is cut."""

    def __init__(self, system: str, recipe: Recipe, note: str, baseline: bool = False, whole: bool = False) -> None:
        """`whole`: compiled as one piece per stage. That takes minutes for a deep network."""
        self.system, self.stages, self.note, self.baseline = system, recipe.stages, note, baseline
        self.recipe = recipe
        self.whole = whole
        self.steps = 0
        self.megabytes = 0.0
        self._engine: InProcess | None = None
        self._bench: Bench | None = None

    def time(self, steps: int) -> float:
        if self._engine is None:
            self._start()
        return self._run(steps)

    def extra(self) -> dict[str, Any]:
        engine = self._engine
        if engine is None or self._bench is None:
            return {}
        share = len(self._bench.feed) / self._bench.setup.facts.train_size if engine.interfaces else 1.0
        kept = engine.auxiliary_bytes / share  # queues do not grow with the data
        return {
            "cuts": list(self._bench.setup.partition.cuts),
            "method": self.recipe.method,
            "memory_mib": self.megabytes,
            "auxiliary_mib_of_data_set": kept / MIB,
        }

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._bench = None

    def _start(self) -> None:
        before = _reserved()
        self._bench = Bench.of(self.recipe)
        trainer = self._bench.trainer
        feed = self._bench.feed.placed(trainer.devices[0], trainer.devices[-1])
        engine = trainer.engine(feed, Path(tempfile.gettempdir()))
        assert isinstance(engine, InProcess)
        if self.whole:
            for stage in engine.stages:
                stage.speed_up(CompiledBlocks(stage.module, whole=True))
        self._engine = engine
        if self.stages > 1:
            self.samples = samples_per_step(self.recipe)
        if engine.interfaces:
            engine.refresh((self._bench.batch(step) for step in range(BATCHES)), lambda: False)
        method = self._bench.setup.method
        filling = method.staleness(self.stages) + self.stages if isinstance(method, Streaming) else 0
        self._run(filling + SETTLED)
        self.megabytes = (_reserved() - before) / MIB

    def _run(self, steps: int) -> float:
        """Seconds. Nothing is waited for between the steps, as in training."""
        assert self._engine is not None
        assert self._bench is not None
        step = self._engine.parallel_step if self.stages > 1 else self._engine.serial_step
        _synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step(self._bench.batch(self.steps))
            self.steps += 1
        self._engine.drain()
        _synchronize()
        return time.perf_counter() - began


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reserved() -> int:
    """Bytes that PyTorch holds on the GPU: tensors, and what a recorded step works in."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
