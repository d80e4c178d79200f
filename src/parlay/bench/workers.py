"""What the processes of each system do in a step. All have the same network, data, optimiser, loss and layout.

Batches come from a few synthetic ones in turn, of the data set's shape. They are disjoint, as those of an epoch are, so
a step always knows the samples of the next ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from parlay.batch import Batch, Pass
from parlay.bench.processes import BenchWorker, Seat
from parlay.config.recipe import Recipe
from parlay.data import Split
from parlay.data.feed import Feed
from parlay.engine.engine import Engine
from parlay.engine.options import Options
from parlay.engine.pipeline import Pipeline
from parlay.run.progress import Silent
from parlay.run.setup import Setup, make_method, make_trainer, set_up
from parlay.run.trainer import Trainer
from parlay.stage.stage import Stage

BATCHES = 8
RATE = 1e-4  # of the initial learning rate: some hundred steps on a few batches of noise would diverge at the full one
SCHEDULES = {"pipeline-1f1b": Schedule1F1B, "pipeline-gpipe": ScheduleGPipe}
CPU = torch.device("cpu")
MESSAGE, MESSAGES = 8 << 20, 8  # bytes, as the states of ResNet-20 at batch 128; and how many in a step


@dataclass(frozen=True)
class Bench:
    """A recipe whose cuts are known, put together in the process that works on it."""

    setup: Setup
    trainer: Trainer
    feed: Feed

    @classmethod
    def of(cls, recipe: Recipe, engine: str = "in-process") -> Bench:
        setup = set_up(replace(recipe, engine=engine))
        trainer = make_trainer(setup, None, Silent())
        feed = Feed(synthetic(setup), trainer.prepare, reconstruct=trainer.reconstruct)
        return cls(setup, trainer, feed.placed(trainer.device, trainer.device))

    @property
    def options(self) -> Options:
        return self.trainer.engine_options

    def engine(self, scratch: Path) -> Engine:
        """With states, where the method keeps some."""
        engine = self.trainer.engine(self.feed, scratch)
        engine.refresh(map(self.batch, range(BATCHES)), lambda: False)
        return engine

    def ids(self, step: int) -> Tensor:
        """The samples of a step, as many of either half of the data, as in training."""
        size = self.setup.recipe.batch_size
        return torch.arange(size) + size * (step % BATCHES)

    def batch(self, step: int) -> Batch:
        weight, following = self.trainer.method.weight(0, 1) or 0.0, (self.ids(step + 1), self.ids(step + 2))
        return Batch(self.ids(step), 0, step, RATE, self.setup.recipe.seed, weight, following)

    def stage(self, module: nn.Sequential) -> Stage:
        return Stage(module.train(), self.options.optimizer, CPU, None)


def samples_per_step(recipe: Recipe) -> float:
    """That each stage trains on: the batch, or half of it where neighbours take turns."""
    method = make_method(recipe)
    return recipe.batch_size * (method.computed if method else 1.0)


def synthetic(setup: Setup) -> Split:
    """Noise in the shape of the data set: time does not depend on what the images show."""
    facts, samples = setup.facts, BATCHES * setup.recipe.batch_size
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, *facts.shape), dtype=torch.uint8, generator=random)
    return Split(images, torch.randint(0, facts.classes, (samples,), generator=random))


@final
class WholeNetwork(BenchWorker):
    """Serial training; in several processes DistributedDataParallel, each with its share of the batch.

    A replica normalises over its own share, and keeps its own statistics (nothing is sent for them).
    """

    def __init__(self, recipe: Recipe, seat: Seat) -> None:
        self.bench, self.seat = Bench.of(recipe), seat
        self.stage = self.bench.stage(self.bench.setup.partition.model)
        self.forward: Callable[[Tensor], Tensor] = self.stage.forward
        if seat.size > 1:
            seat.join()
            with warnings.catch_warnings():  # torch 2.13 has a new name for it, which 2.11 does not know
                warnings.simplefilter("ignore", FutureWarning)
                module = self.stage.module
                self.forward = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)

    def step(self, n: int, option: Any) -> None:  # noqa: ARG002
        ids = self.bench.ids(n).tensor_split(self.seat.size)[self.seat.rank]
        inputs, targets = self.bench.feed.batch(ids)
        x = self.forward(inputs.contiguous(memory_format=torch.channels_last))
        self.bench.options.loss(x, targets).backward()  # type: ignore[no-untyped-call]
        self.stage.apply()


@final
class IsolatedStage(BenchWorker):
    """A stage of a stored method between links that nobody renews: its states are fixed. The method's bound."""

    def __init__(self, recipe: Recipe, seat: Seat) -> None:
        self.bench = Bench.of(replace(recipe, store="device"))  # the other processes have the same folder
        self.engine = self.bench.engine(seat.scratch)
        own = self.engine.own
        self.worker, self.clip = own.workers[seat.rank], own.clip
        first = self.bench.batch(0)
        self.places = first.ids
        self.positions = own.method.share(first.ids, 0, seat.rank)
        for link in own.links:
            link.set_weight(first.weight)
            link.gather(self._pass(first))
        self.worker.begin(RATE)

    def step(self, n: int, option: Any) -> None:  # noqa: ARG002
        p = self._pass(self.bench.batch(n))
        self.worker.forward(p)
        self.worker.loss(p)
        self.worker.backward(p)
        self.worker.update(self.clip)

    def close(self) -> None:
        self.engine.close()

    def _pass(self, batch: Batch) -> Pass:
        rows = len(self.places if self.positions is None else self.positions)
        return Pass(batch, batch.step, batch.ids, self.places, self.positions, rows)


@final
class LayerParallel(BenchWorker):
    """A stage of layer-parallel training: Parlay's own engine among processes, with real states or real messages."""

    def __init__(self, recipe: Recipe, seat: Seat) -> None:
        seat.join()
        self.bench = Bench.of(recipe, "distributed")
        self.engine = self.bench.engine(seat.scratch)

    def step(self, n: int, option: Any) -> None:  # noqa: ARG002
        self.engine.parallel_step(self.bench.batch(n))

    def waited(self) -> float:
        return self.engine.waited

    def close(self) -> None:
        self.engine.drain()
        self.engine.close()


@final
class Pipelined(BenchWorker):
    """A stage of torch.distributed.pipelining. The option is a schedule and its number of micro-batches.

    Batch norm normalises over micro-batches there.
    """

    def __init__(self, recipe: Recipe, seat: Seat) -> None:
        seat.join()
        self.bench, self.seat = Bench.of(recipe), seat
        self.stage = self.bench.stage(self.bench.setup.partition.stages[seat.rank])
        self.pipelines: dict[Any, Pipeline] = {}

    def step(self, n: int, option: Any) -> None:
        if option not in self.pipelines:
            self.pipelines[option] = self._pipeline(*option)
        self.pipelines[option].step(*self.bench.feed.batch(self.bench.ids(n)))
        self.stage.apply()

    def _pipeline(self, name: str, parts: int) -> Pipeline:
        passed = [self.bench.feed.batch(torch.arange(self.bench.setup.recipe.batch_size // parts))[0]]
        with torch.no_grad():
            for module in self.bench.setup.partition.stages:
                passed.append(module.eval()(passed[-1]))
        self.stage.module.train()
        rank, loss = self.seat.rank, self.bench.options.loss
        ends = passed[rank], passed[rank + 1]
        return Pipeline([self.stage], rank, self.seat.size, None, parts, loss, *ends, SCHEDULES[name])


@final
class LinkTest(BenchWorker):
    """Sends, or receives, a batch of messages."""

    def __init__(self, seat: Seat) -> None:
        seat.join()
        self.peer, self.message = 1 - seat.rank, torch.zeros(MESSAGE, dtype=torch.uint8)

    def step(self, n: int, option: Any) -> None:  # noqa: ARG002
        post: Callable[..., Any] = dist.recv if self.peer == 0 else dist.send
        for _ in range(MESSAGES):
            post(self.message, self.peer)
