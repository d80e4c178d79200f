"""Training in Python: the stages of any network, any data of (input, target) pairs, any loss.

stages, loss, method, schedule ─► Trainer.fit(train, test) ─► Result, with an ordinary model again
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from parlay import evaluate, stores
from parlay.checkpoint import FolderLock
from parlay.coupling import AugmentedLagrangian, Coupling
from parlay.data import Augmentation, as_split
from parlay.data.feed import Feed, Prepare
from parlay.engines.in_process import InProcess
from parlay.errors import InputError
from parlay.filters import downsample as make_filter
from parlay.interface import Interface
from parlay.interrupt import Interrupt
from parlay.partitioning import Partition
from parlay.progress import Progress, for_terminal
from parlay.rates import Rate
from parlay.schedule import Schedule
from parlay.stage import MakeOptimizer, Stage
from parlay.training import Result, Run

COMPILED_FROM = 20_000  # steps: compiling takes about a minute and saves 3 to 4 ms of each (ResNet-110, H200)


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
        method: Coupling | None = None,
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
        prepare: Prepare | None = None,
        augment: Augmentation | None = None,
        reconstruct: bool = False,
        test_loss: evaluate.Loss | None = None,
        out: str | Path | None = None,
        checkpoint_every: int = 1,
        progress: Progress | None = None,
        about: Mapping[str, Any] | None = None,
        recipe: str | None = None,
    ) -> None:
        """The method is `AugmentedLagrangian()` where none is given; the loss is a mean over the samples.

        `optimizer` makes a stage's optimiser of its weights. `prepare` and `augment` stand between the data and the
        network; the latter works in serial phases. `reconstruct`: the target of a sample is the sample itself.
        `capture`: record steps as CUDA graphs where possible. `compile`: compile what is recorded; None: where it pays.
        `out` is the run folder, None for none; `about` goes into its summary, and `recipe` is the text of its
        `recipe.toml`.
        """
        if not isinstance(stages, Partition):
            raise InputError(f"stages is a {type(stages).__name__}: write parlay.partition(model, K, example=inputs)")
        if method is not None and not isinstance(method, Coupling):
            raise InputError(f"method is {method!r}: write an object, as in parlay.AugmentedLagrangian()")
        if batch_size < 1:
            raise InputError(f"batch-size is {batch_size}: write a number of at least 1")
        if store_dtype not in stores.DTYPES:
            raise InputError(f"unknown store-dtype '{store_dtype}': write one of {', '.join(stores.DTYPES)}")
        self.partition = stages
        self.loss = loss
        self.method = method or AugmentedLagrangian()
        self.schedule = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        self.optimizer = optimizer
        self.rate = rate or Rate()
        self.clip = clip
        self.downsample = downsample
        self.store = store
        self.store_dtype = store_dtype
        self.batch_size = batch_size
        self.seed = seed
        self.devices = spread(device, len(stages))
        self.autocast = _autocast(precision, self.devices)
        self.capture = capture
        self.compile = compile
        self.prepare = prepare
        self.augment = augment
        self.reconstruct = reconstruct
        self.test_loss = test_loss or loss
        self.out = Path(out) if out is not None else None
        self.checkpoint_every = checkpoint_every
        self.progress = progress or for_terminal()
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
        with self._folder() as folder, torch.random.fork_rng(devices=_gpus(self.devices)), Interrupt() as interrupt:
            engine = self._engine(feed, folder, epochs * -(-len(feed) // self.batch_size))
            try:
                return Run(self, engine, feed, judge, epochs, interrupt).go(resume)
            finally:
                engine.close()
                self.progress.end()

    def _feed(self, data: Any, augment: Augmentation | None) -> Feed:
        feed = Feed(as_split(data), self.prepare, augment, self.reconstruct)
        return feed.placed(self.devices[0], self.devices[-1])

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
        with FolderLock(self.out):
            yield self.out

    def _engine(self, feed: Feed, folder: Path, steps: int = 0) -> InProcess:
        """For a run of so many steps."""
        cut = zip(self.partition.stages, self.devices, strict=True)
        stages = [Stage(module, self.optimizer, device, self.autocast) for module, device in cut]
        interfaces = self._interfaces(feed, folder)
        why_not = self._why_not_captured(stages, interfaces)
        if why_not and self.capture and self.devices[0].type == "cuda":
            self.progress.line(f"steps are not recorded as CUDA graphs: {why_not}")
        return InProcess(
            self.partition.model,
            stages,
            interfaces,
            self.method,
            self.loss,
            feed,
            clip=self.clip,
            capture=self.capture and not why_not,
            compile=not why_not and (steps >= COMPILED_FROM if self.compile is None else self.compile),
            say=self.progress.line,
        )

    def _interfaces(self, feed: Feed, folder: Path) -> list[Interface]:
        if self.schedule.kind == "serial":  # it keeps no states
            return []
        reduce, dtype = make_filter(self.downsample), stores.DTYPES[self.store_dtype]
        shapes = [reduce.shape(shape) for shape in self.partition.shapes]
        needed = stores.store_bytes(len(feed), shapes, dtype, self.method.keeps_multipliers)
        kind = stores.place(self.store, needed, self.devices[-1], folder)

        def store(k: int, what: str) -> stores.Store:
            path = folder / "stores" / f"{what}-{k}.bin"
            return stores.make_store(kind, len(feed), shapes[k - 1], dtype, self.devices[k], path)

        def interface(k: int) -> Interface:
            multipliers = store(k, "multipliers") if self.method.keeps_multipliers else None
            return Interface(self.partition.shapes[k - 1], reduce, self.method, store(k, "states"), multipliers)

        return [interface(k) for k in range(1, len(self.partition))]

    def _why_not_captured(self, stages: list[Stage], interfaces: list[Interface]) -> str:
        if self.devices[0].type != "cuda" or len(set(self.devices)) > 1:
            return "the stages are not all on one GPU"
        if not all(isinstance(interface.states, stores.DeviceStore) for interface in interfaces):
            return "the states are not kept on the GPU"
        if not all(stage.can_be_recorded for stage in stages):
            return "the optimiser is not a fused one"
        return ""


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


def _autocast(precision: str, devices: list[torch.device]) -> torch.dtype | None:
    if precision not in ("auto", "float32", "bfloat16"):
        raise InputError(f"unknown precision '{precision}': write auto, float32 or bfloat16")
    on_gpu = all(device.type == "cuda" for device in devices)
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and on_gpu) else None


def _gpus(devices: list[torch.device]) -> list[torch.device]:
    return sorted({device for device in devices if device.type == "cuda"}, key=str)
