"""Training in Python: the stages of any network, any data of (input, target) pairs, any loss.

stages, loss, method, schedule ─► Trainer.fit(train, test) ─► Result, with an ordinary model again
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from parlay import evaluate, stores
from parlay.coupling import AugmentedLagrangian, Coupling, Method, Streaming
from parlay.coupling.streaming import Crossing, Site, Station
from parlay.data import Augmentation, as_split
from parlay.data.feed import Feed, Prepare
from parlay.engines.base import Engine
from parlay.engines.in_process import InProcess
from parlay.engines.shares import owned
from parlay.engines.world import World, started
from parlay.errors import InputError
from parlay.files import FolderLock
from parlay.filters import downsample as make_filter
from parlay.interface import Cut, Interface, Pool
from parlay.interrupt import Interrupt
from parlay.partitioning import Partition
from parlay.rates import Rate
from parlay.run import board
from parlay.run.loop import Run
from parlay.run.options import RunOptions
from parlay.run.outcome import Result
from parlay.run.progress import Progress, Silent, for_terminal
from parlay.schedule import Schedule
from parlay.stage import MakeOptimizer, Stage

COMPILED_FROM = 20_000  # steps: in a prototype compiling took a minute and saved 3 to 4 ms of each (ResNet-110, H200)


def sgd(weights: Any) -> torch.optim.Optimizer:
    """The paper's optimiser: SGD, rate 0.1, momentum 0.9; weight decay as is usual for these networks."""
    kept = list(weights)
    return torch.optim.SGD(kept, lr=0.1, momentum=0.9, weight_decay=5e-4, fused=kept[0].is_cuda or None)


class Trainer:
    """Trains the stages of a partition by one method and schedule."""

    def __init__(
        self,
        stages: Partition,
        loss: evaluate.Loss,
        method: Method | None = None,
        schedule: str | Schedule = "alternate:4:1",
        *,
        optimizer: MakeOptimizer = sgd,
        rate: Rate | None = None,
        clip: float | None = None,
        downsample: int = 1,
        store: str = "auto",
        store_dtype: str = "float32",
        batch_size: int = 128,
        seed: int = 0,
        device: str | Sequence[str | torch.device] = "auto",
        precision: str = "auto",
        capture: bool = True,
        compile: bool | None = None,
        engine: str = "auto",
        replicas: int = 1,
        serial_phase: str = "auto",
        micro_batches: int = 0,
        timeline: int = 0,
        prepare: Prepare | None = None,
        augment: Augmentation | None = None,
        reconstruct: bool = False,
        test_loss: evaluate.Loss | None = None,
        out: str | Path | None = None,
        tensorboard: bool = False,
        judge_every: int = 1,
        checkpoint_every: int = 1,
        checkpoint_states: bool = True,
        progress: Progress | None = None,
        about: Mapping[str, Any] | None = None,
        recipe: str | None = None,
    ) -> None:
        """The method is `AugmentedLagrangian()` where none is given; the loss is a mean over the samples.

        `optimizer` makes a stage's optimiser of its weights. `prepare` and `augment` stand between the data and the
        network; the latter works in serial phases, and with streaming methods in all. `reconstruct`: the target of a
        sample is the sample itself.
        `capture`: record steps as CUDA graphs where possible. `compile`: compile what is recorded; None: where it pays.
        `engine`: "distributed" trains one stage in this process and leaves the others to those that torchrun has
        started beside it; "auto" does so where there are some. `replicas`, `serial_phase`, `micro_batches` and
        `timeline` are for that engine. `out` is the run folder, None for none; `tensorboard` writes scalars there,
        `about` goes into its summary, and `recipe` is the text of its `recipe.toml`. Without `checkpoint_states` its
        checkpoints are as small as those of serial training, and a run that goes on from one sets its states anew.
        The whole network is judged after every `judge_every`th epoch and the last; for an adaptive schedule after all.
        """
        if not isinstance(stages, Partition):
            raise InputError(f"stages is a {type(stages).__name__}: write parlay.partition(model, K, example=inputs)")
        if method is not None and not isinstance(method, Method):
            raise InputError(f"method is {method!r}: write an object, as in parlay.AugmentedLagrangian()")
        if batch_size < 1:
            raise InputError(f"batch-size is {batch_size}: write a number of at least 1")
        if judge_every < 1:
            raise InputError(f"judge-every is {judge_every}: write a number of at least 1")
        if store_dtype not in stores.DTYPES:
            raise InputError(f"unknown store-dtype '{store_dtype}': write one of {', '.join(stores.DTYPES)}")
        self.partition = stages
        self.loss = loss
        self.method: Method = method or AugmentedLagrangian()
        self.schedule = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        self.optimizer = optimizer
        self.rate = rate or Rate()
        self.clip = clip
        self.downsample = downsample
        self.store = store
        self.store_dtype = store_dtype
        self.batch_size = batch_size
        self.seed = seed
        self.world = _world(engine, len(stages), replicas)
        if self.world is not None:
            if not isinstance(device, str):
                raise InputError("each process has a device of its own: write device='auto', 'cpu' or 'cuda'")
            device = [self.world.device(device)] * len(stages)
        self.serial_phase = serial_phase
        self.micro_batches = micro_batches
        self.timeline = timeline
        self.devices = spread(device, len(stages))
        self.autocast = _autocast(precision, self.devices)
        self.capture = capture
        self.compile = compile
        self.prepare = prepare
        self.augment = augment
        self.reconstruct = reconstruct
        self.test_loss = test_loss or loss
        self.out = Path(out) if out is not None else None
        self.tensorboard = tensorboard
        if tensorboard:
            board.check()
            if out is None:
                raise InputError("tensorboard needs a run folder: give `out`")
        self.judge_every = judge_every
        self.checkpoint_every = checkpoint_every
        self.checkpoint_states = checkpoint_states
        leads = self.world is None or self.world.leads
        self.progress = (progress or for_terminal()) if leads else Silent()
        self.about = dict(about or {})
        self.recipe = recipe

    def fit(self, train: Any, test: Any = None, epochs: int = 30, resume: bool = False) -> Result:
        """Train on data of (input, target) pairs. With `resume`, go on from the newest checkpoint of the run folder."""
        if epochs < 1:
            raise InputError(f"epochs is {epochs}: write a number of at least 1")
        if resume and self.out is None:
            raise InputError("resume needs a run folder: give `out`")
        feed = self._feed(train, self.augment)
        judge = self._feed(test, None) if test is not None else None
        # the random numbers of a step are seeded by its number; the caller's own stream is left as it was
        with (
            self._joined(),
            self._folder() as folder,
            torch.random.fork_rng(devices=_gpus(self.devices)),
            Interrupt() as interrupt,
        ):
            engine = self.engine(feed, folder, epochs * -(-len(feed) // self.batch_size))
            try:
                return Run(self._options(), engine, feed, judge, epochs, interrupt.requested).go(resume)
            finally:
                engine.close()
                self.progress.end()

    def _options(self) -> RunOptions:
        return RunOptions(**{key.name: getattr(self, key.name) for key in fields(RunOptions)})

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Among the other processes, where there are some."""
        if self.world is None:
            yield
            return
        try:
            self.world.open(self.devices[0])
            yield
        finally:
            self.world.close()

    def _feed(self, data: Any, augment: Augmentation | None) -> Feed:
        feed = Feed(as_split(data), self.prepare, augment, self.reconstruct)
        if self.world is None:
            return feed.placed(self.devices[0], self.devices[-1])
        first, last = self.world.stage == 0, self.world.stage == self.world.stages - 1
        host, own = torch.device("cpu"), self.devices[self.world.stage]
        return feed.placed(own if first else host, own if last else host)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """The run folder, for this process alone; without one, a passing place for what does not fit into memory."""
        if self.out is None:
            scratch = Path(tempfile.mkdtemp(prefix="parlay-"))
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return
        if self.world is None:
            with FolderLock(self.out):
                yield self.out
            return
        with _shared_folder(self.out, self.world):
            yield self.out

    def engine(self, feed: Feed, folder: Path, steps: int = 0) -> Engine:
        """What runs the steps, without a run around it; `folder` is for stores that lie in files.

        `steps` is how many there will be: code is compiled for many.
        """
        if self.world is not None:
            return self._distributed(self.world, feed, folder)
        return self._in_process(feed, folder, steps)

    def _in_process(self, feed: Feed, folder: Path, steps: int) -> InProcess:
        cut = zip(self.partition.stages, self.devices, strict=True)
        stages = [Stage(module, self.optimizer, device, self.autocast) for module, device in cut]
        interfaces = self._interfaces(feed, folder)
        stations = None
        if isinstance(self.method, Streaming):
            stations = self._stations(self.method, dict(enumerate(stages)), feed)
        why_not = self._why_not_captured(stages)
        if why_not and self.capture and self.devices[0].type == "cuda":
            self.progress.line(f"steps are not recorded as CUDA graphs: {why_not}")
        return InProcess(
            self.partition.model,
            stages,
            interfaces,
            self.method,
            self.loss,
            feed,
            stations=stations,
            clip=self.clip,
            batch_size=min(self.batch_size, len(feed)),
            capture=self.capture and not why_not,
            compile=not why_not and (steps >= COMPILED_FROM if self.compile is None else self.compile),
            say=self.progress.line,
        )

    def _distributed(self, world: World, feed: Feed, folder: Path) -> Engine:
        from parlay.engines.distributed import Distributed  # not where everything is in this process

        if isinstance(self.method, Streaming) and world.replicas > 1:
            raise InputError(f"{type(self.method).__name__} takes no replicas: write replicas 1, or another method")
        world.open(self.devices[0])
        modules, k, needed = self.partition.stages, world.stage, 0
        pool = world.pooled if world.replicas > 1 else None
        own: list[Interface] = []
        stations: list[Station] = []
        behind = None
        stage = Stage(modules[k], self.optimizer, self.devices[k], self.autocast)
        if isinstance(self.method, Streaming):
            method = self.method

            def join() -> None:  # what one stage cannot do all refuse
                stations.extend(self._stations(method, {k: stage}, feed))

            world.gathered(join)
        elif self.schedule.kind != "serial" and len(modules) > 1:
            needed = self._store_bytes(len(feed), range(1, len(modules)))
            samples = owned(len(feed), world.replica, world.replicas)
            here = range(k, k + 1) if k > 0 else range(0)

            def make() -> None:  # a store that does not fit on one host is refused on all
                kind = stores.place(self.store, self._store_bytes(samples, here), self.devices[k], folder)
                own.extend(self._interface(j, samples, kind, folder, pool) for j in here)

            world.gathered(make)
            if k + 1 < len(modules):
                behind = Cut(self.partition.shapes[k], make_filter(self.downsample), self.method, self.devices[k], pool)
        for module in (modules[j] for j in range(len(modules)) if j != k):
            module.to("cpu")  # the other stages' weights are needed again when the model is put together
        return Distributed(
            self.partition.model,
            modules,
            world,
            stage,
            own[0] if own else None,
            behind,
            self.method,
            self.loss,
            feed,
            station=stations[0] if stations else None,
            shapes=self.partition.shapes,
            store_dtype=stores.DTYPES[self.store_dtype],
            auxiliary_bytes=needed,
            clip=self.clip,
            pipelined=self.serial_phase != "sequential" and world.replicas == 1,
            micro_batches=self.micro_batches,
            timeline=self.timeline,
            say=self.progress.line,
        )

    def _stations(self, method: Streaming, stages: Mapping[int, Stage], feed: Feed) -> list[Station]:
        """These stages at work, for methods whose states live a few steps."""
        reduce = make_filter(self.downsample)
        cuts = [None, *(Crossing(shape, reduce) for shape in self.partition.shapes), None]
        for shape in self.partition.shapes:
            reduce.shape(shape)  # refused here where it cannot be downsampled
        rows, outputs = min(self.batch_size, len(feed)), self._output_shape(feed)
        classes = None
        if (
            outputs is not None
            and len(outputs) == 1
            and not (feed.reconstruct or feed.split.targets.is_floating_point())
        ):
            classes = outputs[0]
        example = feed.batch(torch.zeros(1, dtype=torch.int64))[0]
        inputs = tuple(example.shape[1:]) if example.is_floating_point() else None
        common = self.loss, rows, outputs, classes, inputs, self.optimizer, self.seed
        count = len(self.partition)
        return [method.station(Site(stage, k, count, cuts[k], cuts[k + 1], *common)) for k, stage in stages.items()]

    def _output_shape(self, feed: Feed) -> tuple[int, ...] | None:
        """Of what the network puts out for a sample; None where that is not one tensor."""
        self.partition.model.eval()
        with torch.no_grad():
            x: Any = feed.batch(torch.zeros(1, dtype=torch.int64))[0]
            for module in self.partition.stages:
                x = module(x.to(next((w.device for w in module.parameters()), x.device)))
        return tuple(x.shape[1:]) if isinstance(x, torch.Tensor) else None

    def _interfaces(self, feed: Feed, folder: Path) -> list[Interface]:
        if self.schedule.kind == "serial" or isinstance(self.method, Streaming):  # they keep no states
            return []
        everyone = range(1, len(self.partition))
        kind = stores.place(self.store, self._store_bytes(len(feed), everyone), self.devices[-1], folder)
        return [self._interface(k, len(feed), kind, folder) for k in everyone]

    def _store_bytes(self, samples: int, interfaces: range) -> int:
        shapes = [make_filter(self.downsample).shape(self.partition.shapes[k - 1]) for k in interfaces]
        return stores.store_bytes(samples, shapes, stores.DTYPES[self.store_dtype], self._coupling.keeps_multipliers)

    def _interface(self, k: int, samples: int, kind: str, folder: Path, pool: Pool | None = None) -> Interface:
        shape, reduce = self.partition.shapes[k - 1], make_filter(self.downsample)
        of = f"-{self.world.replica}" if self.world is not None and self.world.replicas > 1 else ""

        def store(what: str) -> stores.Store:
            path, dtype = folder / "stores" / f"{what}-{k}{of}.bin", stores.DTYPES[self.store_dtype]
            return stores.make_store(kind, samples, reduce.shape(shape), dtype, self.devices[k], path)

        multipliers = store("multipliers") if self._coupling.keeps_multipliers else None
        return Interface(shape, reduce, self._coupling, store("states"), multipliers, pool)

    @property
    def _coupling(self) -> Coupling:
        """The method, where it keeps states."""
        assert isinstance(self.method, Coupling)
        return self.method

    def _why_not_captured(self, stages: list[Stage]) -> str:
        if self.devices[0].type != "cuda" or len(set(self.devices)) > 1:
            return "the stages are not all on one GPU"
        if not all(stage.can_be_recorded for stage in stages):
            return "the optimiser is not a fused one"
        return ""


def _world(engine: str, stages: int, replicas: int) -> World | None:
    """The processes of the distributed engine; None for the engine in this one."""
    if engine not in ("auto", "in-process", "distributed"):
        raise InputError(f"unknown engine '{engine}': write auto, in-process or distributed")
    if engine == "in-process" or (engine == "auto" and not started()):
        if replicas > 1:
            raise InputError("replicas need a process for each: write engine distributed, or leave them out")
        return None
    return World(stages, replicas)


@contextmanager
def _shared_folder(out: Path, world: World) -> Iterator[None]:
    """The leader holds the lock; the others must see its folder, because each writes its part of a checkpoint there."""
    lock = FolderLock(out)
    world.led(lambda: lock.__enter__() and None)
    try:
        mark = world.led(lambda: lock.path.read_text())
        seen = world.gathered(lambda: _appears(lock.path, mark))
        if not all(seen):
            raise InputError(
                f"{out} is not the same folder on all hosts (process {seen.index(False)} does not see it): "
                "write --out on a file system that they share"
            )
        yield
    finally:
        if world.leads:
            lock.__exit__(None, None, None)


def _appears(path: Path, text: str) -> bool:
    """Is this what the file says? A network file system may show it some seconds late."""
    until = time.monotonic() + 3
    while not (path.exists() and path.read_text() == text):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def spread(device: str | Sequence[str | torch.device], stages: int) -> list[torch.device]:
    """A device for every stage: contiguous stages share one where there are fewer devices than stages."""
    if not isinstance(device, str):
        if len(device) != stages:
            raise InputError(f"{len(device)} devices for {stages} stages: give one for each stage")
        return [torch.device(d) for d in device]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return [torch.device("cpu")] * stages
    if device != "cuda":
        raise InputError(f"unknown device '{device}': write auto, cpu or cuda")
    count = torch.cuda.device_count()
    if count == 0:
        raise InputError("no GPU to be found: write --device cpu")
    return [torch.device("cuda", k * min(count, stages) // stages) for k in range(stages)]


def mixed_precision(precision: str, device: torch.device) -> torch.autocast:
    """In which a stage on this device works."""
    low = _autocast(precision, [device])
    return torch.autocast(device.type, low, enabled=low is not None)


def _autocast(precision: str, devices: list[torch.device]) -> torch.dtype | None:
    if precision not in ("auto", "float32", "bfloat16"):
        raise InputError(f"unknown precision '{precision}': write auto, float32 or bfloat16")
    on_gpu = all(device.type == "cuda" for device in devices)
    pays = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)  # older GPUs only imitate it
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and pays) else None


def _gpus(devices: list[torch.device]) -> list[torch.device]:
    return sorted({device for device in devices if device.type == "cuda"}, key=str)
