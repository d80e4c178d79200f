"""What a projection is made of: stages timed in isolation, and the speed of a link between two devices."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import final

import torch
from torch import nn

from parlay import Trainer, models, partition
from parlay.batch import Batch
from parlay.bench.core import System
from parlay.bench.cuda import SETTLED
from parlay.bench.processes import Pool
from parlay.bench.workers import BATCHES, MESSAGE, MESSAGES, RATE, LinkTest, samples_per_step
from parlay.config.recipe import Recipe
from parlay.data import Split
from parlay.data.feed import Feed
from parlay.engine.engine import Engine
from parlay.lanes import lanes_of
from parlay.run.progress import Silent
from parlay.run.setup import make_trainer, set_up
from parlay.stage.precision import chosen_device, mixed_precision

COPIED = 64 << 20  # bytes, to measure a link


@final
class Isolated(System):
    """A stage with its local loss on fixed states: a network of one stage to the engine, captured and compiled as any.

    The gradient of its input, the adjoint, is not computed: one of the dozens of convolutions in it.
    """

    def __init__(self, recipe: Recipe, stage: int) -> None:
        self.system, self.stages, self.note = "stage", 1, f"{stage + 1} of {recipe.stages}"
        self.recipe, self.k, self.device = recipe, stage, chosen_device(recipe.device)
        self.rows = math.ceil(samples_per_step(recipe))
        self.steps = 0
        self._engine: Engine | None = None

    def time(self, steps: int) -> float:
        if self._engine is None:
            self._engine = self._made()
            self._run(self._engine, SETTLED)
        return self._run(self._engine, steps)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def _made(self) -> Engine:
        setup = set_up(self.recipe)
        options, device = make_trainer(setup, None, Silent()).engine_options, self.device
        last = self.k == self.recipe.stages - 1
        module = setup.partition.stages[self.k].to(device)
        shapes = [setup.facts.shape, *setup.partition.shapes]
        inputs = torch.randn(BATCHES * self.rows, *shapes[self.k])
        if self.k > 0 and options.autocast is not None:  # as the stage before puts it out
            inputs = inputs.to(options.autocast)
        with mixed_precision(self.recipe.precision, device):
            cut = partition(module, 1, inputs[: self.rows].to(device))
        trainer = Trainer(
            cut,
            options.loss if last else nn.MSELoss(),
            schedule="serial",
            optimizer=options.optimizer,
            batch_size=self.rows,
            device=device,
            precision=self.recipe.precision,
            compile=device.type == "cuda",
            engine="in-process",
            progress=Silent(),
        )
        if not last:
            targets = torch.randn(len(inputs), *shapes[self.k + 1])
        elif models.is_vae(self.recipe.model):
            targets = torch.randn(len(inputs), *setup.facts.shape)
        else:
            targets = torch.randint(0, setup.facts.classes, (len(inputs),))
        return trainer.engine(Feed(Split(inputs, targets)).placed(device, device), Path(tempfile.gettempdir()))

    def _run(self, engine: Engine, steps: int) -> float:
        lanes_of(self.device).synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            ids = torch.arange(self.rows) + self.rows * (self.steps % BATCHES)
            engine.serial_step(Batch(ids, 0, self.steps, RATE, self.recipe.seed))
            self.steps += 1
        engine.drain()
        lanes_of(self.device).synchronize()
        return time.perf_counter() - began


def link_speed(kind: str) -> float:
    """Bytes a second, one way: between two GPUs; from one through the host's memory, where there is only one; between
    two processes on a CPU."""
    if kind == "cpu":
        pool = Pool("link", LinkTest, 2)
        try:
            pool.ready()
            pool.time(1)
            return max(MESSAGES * MESSAGE / pool.time(1) for _ in range(3))
        finally:
            pool.close()
    here = torch.empty(COPIED, dtype=torch.uint8, device="cuda:0")
    several, lanes = torch.cuda.device_count() > 1, lanes_of(here.device)
    there = torch.empty_like(here, device="cuda:1") if several else torch.empty(COPIED, dtype=torch.uint8).pin_memory()

    def seconds() -> float:
        lanes.synchronize()
        began = time.perf_counter()
        there.copy_(here, non_blocking=True)
        lanes.synchronize()
        if not several:  # out of one device and into the next
            here.copy_(there, non_blocking=True)
            lanes.synchronize()
        return time.perf_counter() - began

    return COPIED / min(seconds() for _ in range(5))
