"""What the processes of each system do in a step. All have the same network, data, optimiser, loss and layout.

Batches come from a few synthetic ones in turn, of the data set's shape. They are disjoint, as those of an epoch are, so
a step always knows the samples of the next one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from parlay.bench.gang import Place, Worker
from parlay.coupling import Coupling, Pair
from parlay.data import Split
from parlay.data.feed import Feed
from parlay.engines.base import Batch
from parlay.engines.distributed import Distributed
from parlay.errors import InputError
from parlay.filters import downsample
from parlay.interface import Interface
from parlay.recipe import Recipe
from parlay.run.progress import Silent
from parlay.run.setup import Setup, make_method, make_trainer, set_up
from parlay.stage import Stage
from parlay.stores import DeviceStore
from parlay.trainer import Trainer

BATCHES = 8
RATE = 1e-4  # of the initial learning rate: some hundred steps on a few batches of noise would diverge at the full one
SCHEDULES = {"pipeline-1f1b": Schedule1F1B, "pipeline-gpipe": ScheduleGPipe}
CPU = torch.device("cpu")


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
        return cls(setup, trainer, Feed(synthetic(setup), trainer.prepare, reconstruct=trainer.reconstruct))

    @property
    def coupling(self) -> Coupling:
        method = self.trainer.method
        if not isinstance(method, Coupling):
            raise InputError("the bench times methods that keep states: write method al or penalty")
        return method

    def ids(self, step: int) -> Tensor:
        """The samples of a step, as many of either half of the data, as in training."""
        size = self.setup.recipe.batch_size
        return torch.arange(size) + size * (step % BATCHES)

    def batch(self, step: int) -> Batch:
        method = self.trainer.method
        beta = method.beta_at(0, 1) if isinstance(method, Coupling) else 0.0
        return Batch(self.ids(step), 0, step, RATE, beta, self.setup.recipe.seed, following=self.ids(step + 1))

    def stage(self, module: nn.Sequential) -> Stage:
        return Stage(module, self.trainer.optimizer, CPU, None)


def samples_per_step(recipe: Recipe) -> float:
    """That each stage trains on: the batch, or half of it where neighbours take turns."""
    method = make_method(recipe)
    return recipe.batch_size * (method.portion if isinstance(method, Coupling) else 1.0)


def synthetic(setup: Setup) -> Split:
    """Noise in the shape of the data set: time does not depend on what the images show."""
    facts, samples = setup.facts, BATCHES * setup.recipe.batch_size
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, *facts.shape), dtype=torch.uint8, generator=random)
    return Split(images, torch.randint(0, facts.classes, (samples,), generator=random))


@final
class Serial(Worker):
    """The whole network in one process."""

    def __init__(self, recipe: Recipe, place: Place) -> None:  # noqa: ARG002
        self.bench = Bench.of(recipe)
        self.stage = self.bench.stage(self.bench.setup.partition.model.train())
        self.steps = 0

    def step(self, option: Any) -> None:  # noqa: ARG002
        inputs, targets = self.bench.feed.batch(self.bench.ids(self.steps))
        self.bench.trainer.loss(self.stage.forward(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.stage.apply()
        self.steps += 1


@final
class Alone(Worker):
    """A stage with its local loss and nobody to talk to: its states and multipliers are fixed. The method's bound."""

    def __init__(self, recipe: Recipe, place: Place) -> None:
        self.bench = Bench.of(recipe)
        cut, k = self.bench.setup.partition, place.rank
        self.stage = self.bench.stage(cut.stages[k].train())
        self.turn = self.bench.coupling.turn(self.bench.ids(0), 0, k)
        self.beta = torch.tensor(self.bench.coupling.beta_at(0, 1))
        self.before = _interface(self.bench, k - 1) if k > 0 else None
        self.after = _interface(self.bench, k) if k < len(cut) - 1 else None
        self.steps = 0

    def step(self, option: Any) -> None:  # noqa: ARG002
        ids = self.bench.ids(self.steps)
        inputs, targets = self.bench.feed.batch(ids if self.turn is None else ids[self.turn])
        if self.before is not None:
            interface, pair = self.before
            inputs = interface.up(pair.of(self.turn).state.detach().requires_grad_())
        x = self.stage.forward(inputs)
        if self.after is not None:
            interface, pair = self.after
            loss = interface.local_loss(x, pair.of(self.turn), self.beta)
        else:
            loss = self.bench.trainer.loss(x, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.stage.apply()
        self.steps += 1


def _interface(bench: Bench, n: int) -> tuple[Interface, Pair]:
    """The n-th interface for one batch, and what it holds."""
    recipe, method, shape = bench.setup.recipe, bench.coupling, bench.setup.partition.shapes[n]
    reduce = downsample(recipe.downsample)
    states, multipliers = (
        DeviceStore(recipe.batch_size, reduce.shape(shape), torch.float32, CPU) for _ in ("states", "multipliers")
    )
    interface = Interface(shape, reduce, method, states, multipliers if method.keeps_multipliers else None)
    interface.start(bench.ids(0), torch.randn(recipe.batch_size, *states.shape))
    return interface, interface.gather(bench.ids(0))


@final
class Layers(Worker):
    """A stage of layer-parallel training: Parlay's own distributed engine, with real states or real messages."""

    def __init__(self, recipe: Recipe, place: Place) -> None:
        place.join()
        self.bench = Bench.of(recipe, "distributed")
        engine = self.bench.trainer.engine(self.bench.feed, place.scratch)
        assert isinstance(engine, Distributed)
        self.engine = engine
        self.engine.refresh((self.bench.batch(step) for step in range(BATCHES)), lambda: False)
        self.steps = 0

    def step(self, option: Any) -> None:  # noqa: ARG002
        self.engine.parallel_step(self.bench.batch(self.steps))
        self.steps += 1

    def waited(self) -> float:
        return self.engine.waited

    def close(self) -> None:
        self.engine.drain()
        self.engine.close()


class _Hop(nn.Module):
    """A stage of a pipeline. Feature maps travel as (batch, height, width, channels): contiguous, as gloo wants them,
    and without a conversion of what is channels last inside."""

    def __init__(self, module: nn.Module, first: bool, last: bool) -> None:
        super().__init__()
        self.module, self.first, self.last = module, first, last

    def forward(self, x: Tensor) -> Tensor:
        if not self.first and x.dim() == 4:
            x = x.permute(0, 3, 1, 2)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        y: Tensor = self.module(x)
        return travelling(y) if not self.last else y


def travelling(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1).contiguous() if y.dim() == 4 else y.contiguous()


@final
class Pipeline(Worker):
    """A stage of torch.distributed.pipelining. The option is a schedule and its number of micro-batches.

    Batch norm normalises over micro-batches there.
    """

    def __init__(self, recipe: Recipe, place: Place) -> None:
        place.join()
        self.bench, self.place = Bench.of(recipe), place
        cut, k = self.bench.setup.partition, place.rank
        self.first, self.last = k == 0, k == len(cut) - 1
        self.stage = self.bench.stage(cut.stages[k].train())
        self.hop = _Hop(self.stage.module, self.first, self.last)
        self.schedules: dict[Any, Any] = {}
        self.steps = 0

    def step(self, option: Any) -> None:
        if option not in self.schedules:
            self.schedules[option] = self._schedule(*option)
        inputs, targets = self.bench.feed.batch(self.bench.ids(self.steps))
        given = (inputs,) if self.first else ()
        wanted = {"target": targets, "losses": []} if self.last else {}
        self.schedules[option].step(*given, return_outputs=False, **wanted)
        self.stage.apply()
        self.steps += 1

    def _schedule(self, name: str, micro_batches: int) -> Any:
        size = self.bench.setup.recipe.batch_size // micro_batches
        example = self.bench.feed.batch(torch.arange(size))[0]
        inputs = [example]
        hops = [
            _Hop(module, k == 0, k == self.place.size - 1) for k, module in enumerate(self.bench.setup.partition.stages)
        ]
        with torch.no_grad():
            for hop in hops:
                inputs.append(hop.eval()(inputs[-1]))
        self.hop.train()
        x, y = (value.requires_grad_(value.is_floating_point()) for value in inputs[self.place.rank :][:2])
        if self.first:
            x = x.detach()
        stage = PipelineStage(self.hop, self.place.rank, self.place.size, CPU, input_args=(x,), output_args=(y,))
        return SCHEDULES[name](stage, micro_batches, loss_fn=self.bench.trainer.loss)


@final
class Replica(Worker):
    """The whole network on a share of the batch: DistributedDataParallel.

    Each replica normalises over its own share, and keeps its own statistics (nothing is sent for them)."""

    def __init__(self, recipe: Recipe, place: Place) -> None:
        place.join()
        self.bench, self.place = Bench.of(recipe), place
        self.stage = self.bench.stage(self.bench.setup.partition.model.train())
        with warnings.catch_warnings():  # torch 2.13 has a new name for it, which 2.11 does not know
            warnings.simplefilter("ignore", FutureWarning)
            self.replica = DistributedDataParallel(
                self.stage.module, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        self.steps = 0

    def step(self, option: Any) -> None:  # noqa: ARG002
        ids = self.bench.ids(self.steps).tensor_split(self.place.size)[self.place.rank]
        inputs, targets = self.bench.feed.batch(ids)
        x = self.replica(inputs.contiguous(memory_format=torch.channels_last))
        self.bench.trainer.loss(x, targets).backward()  # type: ignore[no-untyped-call]
        self.stage.apply()
        self.steps += 1
