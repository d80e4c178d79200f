"""Training in Python: the stages of any network, any data of (input, target) pairs, any loss.

stages, loss, method, schedule ─► Trainer.fit(train, test) ─► Result, with an ordinary model again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from parlay.config.rates import Rate
from parlay.config.schedule import Schedule
from parlay.data import Augmentation, Feed, Prepare, as_split
from parlay.engine import Engine, Loss, MakeOptimizer, Options, Processes, build, sgd, world_of
from parlay.errors import InputError
from parlay.methods.augmented_lagrangian import AugmentedLagrangian
from parlay.methods.method import Method
from parlay.partitioning import Partition
from parlay.process import Interrupt
from parlay.run.folder import claimed
from parlay.run.loop import Run
from parlay.run.options import RunOptions
from parlay.run.outcome import Result
from parlay.run.progress import Progress, Silent, for_terminal


class Trainer:
    """Trains the stages of a partition by one method and schedule."""

    def __init__(
        self,
        stages: Partition,
        loss: Loss,
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
        device: str | torch.device = "auto",
        precision: str = "auto",
        capture: bool = True,
        compile: bool | None = None,
        engine: str = "auto",
        processes: int | None = None,
        replicas: int = 1,
        serial_phase: str = "auto",
        timeline: int = 0,
        prepare: Prepare | None = None,
        augment: Augmentation | None = None,
        reconstruct: bool = False,
        test_loss: Loss | None = None,
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
        network; the latter works in serial phases, and with streamed methods in all. `reconstruct`: the target of a
        sample is the sample itself.
        `capture`: capture steps as CUDA graphs where possible; `compile` what is captured (None: where it pays).
        `engine`: "distributed" trains some of the stages in this process and leaves the others to those that torchrun
        has started beside it; "auto" does so where there are some. `processes` share the stages of a replica (None: a
        process for each); they, `replicas`, `serial_phase` and `timeline` are for that engine.
        `out` is the run folder, None for none; `tensorboard` writes scalars there, `about` goes into its summary, and
        `recipe` is the text of its `recipe.toml`. Without `checkpoint_states` its checkpoints are as small as those of
        serial training, and a run that goes on from one sets its states anew.
        The whole network is evaluated after every `judge_every`th epoch and the last; for an adaptive schedule after
        all.
        """
        if not isinstance(stages, Partition):
            raise InputError(f"stages is a {type(stages).__name__}: write parlay.partition(model, K, example=inputs)")
        if method is not None and not isinstance(method, Method):
            raise InputError(f"method is {method!r}: write an object, as in parlay.AugmentedLagrangian()")
        self.partition = stages
        self.method: Method = method or AugmentedLagrangian()
        self.schedule = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        self.rate = rate or Rate()
        self.downsample = downsample
        self.batch_size, self.seed = batch_size, seed
        self.world = world_of(engine, len(stages), replicas, processes)
        self.device = self.world.device(device)
        self.prepare, self.augment, self.reconstruct = prepare, augment, reconstruct
        self.test_loss = test_loss or loss
        self.out = Path(out) if out is not None else None
        self.tensorboard = tensorboard
        self.judge_every, self.checkpoint_every, self.checkpoint_states = (
            judge_every,
            checkpoint_every,
            checkpoint_states,
        )
        self.progress = (progress or for_terminal()) if self.world.leads else Silent()
        self.about = dict(about or {})
        self.recipe = recipe
        self.engine_options = Options.of(
            loss=loss,
            optimizer=optimizer,
            downsample=downsample,
            device=self.device,
            precision=precision,
            clip=clip,
            store=store,
            store_dtype=store_dtype,
            batch_size=batch_size,
            seed=seed,
            capture=capture,
            compile=compile,
            pipelined=serial_phase != "sequential",
            timeline=timeline,
            parallel=self.schedule.kind != "serial",
        )
        self._options()

    def fit(self, train: Any, test: Any = None, epochs: int = 30, resume: bool = False) -> Result:
        """Train on data of (input, target) pairs. With `resume`, go on from the newest checkpoint of the run folder."""
        if epochs < 1:
            raise InputError(f"epochs is {epochs}: write a number of at least 1")
        if resume and self.out is None:
            raise InputError("resume needs a run folder: give `out`")
        feed = self._feed(train, self.augment)
        test_feed = self._feed(test, None) if test is not None else None
        # the random numbers of a step are seeded by its number; the caller's own stream is left as it was
        with (
            self._joined(),
            claimed(self.out, self.world) as folder,
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
            Interrupt() as interrupt,
        ):
            engine = self.engine(feed, folder, epochs * -(-len(feed) // self.batch_size))
            try:
                return Run(self._options(), engine, feed, test_feed, epochs, interrupt.requested).go(resume)
            finally:
                engine.close()
                self.progress.end()

    def engine(self, feed: Feed, folder: Path, steps: int = 0) -> Engine:
        """What runs the steps, without a run around it; `folder` is for stores that lie in files.

        `steps` is how many there will be: code is compiled for many.
        """
        say = self.progress.line
        return build(self.partition, self.method, feed, self.world, self.engine_options, folder, steps, say)

    def _options(self) -> RunOptions:
        return RunOptions(**{key.name: getattr(self, key.name) for key in fields(RunOptions)})

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Among the other processes, where there are some."""
        if not isinstance(self.world, Processes):
            yield
            return
        try:
            self.world.open(self.device)
            yield
        finally:
            self.world.close()

    def _feed(self, data: Any, augment: Augmentation | None) -> Feed:
        """Inputs where the first stage is, targets where the last one is."""
        feed, own = Feed(as_split(data), self.prepare, augment, self.reconstruct), self.world.own
        host = torch.device("cpu")
        return feed.placed(
            self.device if own[0] == 0 else host, self.device if own[-1] == self.world.stages - 1 else host
        )
