"""The engine: it runs the stages that this process owns, be it all K, one, or several, one step at a time.

A trainer calls `parallel_step` and `serial_step`; step.py and serial.py have what they do. Among several processes all
make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

from parlay import signs
from parlay.batch import Batch
from parlay.engine import parts as checkpoints
from parlay.engine.alone import Alone
from parlay.engine.evaluate import Loss, evaluate
from parlay.engine.losses import Totals
from parlay.engine.own import Own
from parlay.engine.probe import probe
from parlay.engine.refresh import refresh
from parlay.engine.shared import Shared
from parlay.engine.world import Processes
from parlay.timeline import Span


@final
class Engine:
    def __init__(self, own: Own, *, compile: bool = False, pipelined: bool = False, timeline: int = 0) -> None:
        """`pipelined` and `timeline` are for several processes, `compile` for captured steps in one."""
        self.own, self.model, self.world = own, own.model, own.world
        self.totals = Totals()
        self.steps: Alone | Shared
        if isinstance(own.world, Processes):
            self.steps = Shared(own, own.world, pipelined, timeline)
        else:
            self.steps = Alone(own, compile)
        own.train_mode()
        self._learning_rate: float | None = None
        self._bytes = 0
        self._measure()

    # Steps

    def parallel_step(self, batch: Batch) -> None:
        """Every stage on its own problem; with streamed methods, each at a batch of its own."""
        self.steps.step(batch, self.totals)

    def serial_step(self, batch: Batch) -> None:
        """Forward and backward through the whole network, with augmentation."""
        self.steps.serial_step(batch, self.totals)

    def finish(self) -> None:
        """A parallel phase ends: train on the batches that are still on their way."""
        while not self.steps.parallel.clock.empty:
            signs.beat()
            self.steps.step(None, self.totals)
        if self.steps.shared is None or not self.steps.shared.spoiled:
            for worker in self.own.workers.values():
                worker.settle(self.own.clip)
        self.drain()

    def agreed(self, stop: bool) -> bool:
        """Asked before every step: does the loop end here? The same answer in all processes, maybe some steps late."""
        return self.steps.agreed(stop)

    def drain(self) -> Totals:
        """Bring `totals` up to the last step. Raises `Diverged` at the first loss that is not finite."""
        self.steps.drain(self.totals)
        self._measure()
        return self.totals

    def refresh(self, batches: Iterable[Batch], stop: Callable[[], bool]) -> list[float] | None:
        """Set the states by a pass over the training set; the violation of those that stood there before."""
        if not any(link.starts for link in self.own.links):
            return None
        return refresh(self.own, self.steps.chain, self.steps.shared, batches, stop)

    def cosines(self, batch: Batch) -> list[float] | None:
        """Between the parallel and the true gradient: of all weights, then of each stage's. None: unknown."""
        return probe(self.own, batch)

    # The whole network

    def forward(self, x: Tensor) -> Any:
        """Without filters. The result is on the last process."""
        with torch.no_grad():
            return self.steps.chain.forward(x)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], loss: Loss | None = None) -> dict[str, float]:
        """Mean loss and, for classes, accuracy through the whole network in evaluation mode."""
        own, world = self.own, self.world
        self.steps.recorder.on = False
        for stage in own.stages:
            stage.module.eval()
        found: dict[str, float] = {}
        if own.last:
            found = evaluate(self.forward, loss or own.loss, batches)
        else:
            for inputs, _ in batches:
                self.forward(inputs)
        return world.broadcast(found, world.rank_of(world.stages - 1, 0)) if isinstance(world, Processes) else found

    def try_one(self, x: Tensor) -> Any:
        """Runs one input through the network in this process alone, to fail early on a wrong shape."""
        for module in self.own.modules:
            x = module(x.to(next((w.device for w in module.parameters()), x.device)))
        return x

    def assemble(self) -> None:
        """Give `model`, on the CPU by now, the weights of all stages in all processes."""
        world = self.world
        if isinstance(world, Processes):
            for k, module in enumerate(self.own.modules):
                world.fill(list(module.state_dict().values()), world.rank_of(k, 0))

    # Checkpoints and facts

    def parts(self, with_states: bool) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint keeps, by part."""
        return checkpoints.parts(self.own, self.steps.parallel.clock, with_states)

    def load(self, kept: checkpoints.Parts) -> None:
        """Take what `parts` gave at any number of stages and processes; states only where they fit."""
        checkpoints.load(self.own, self.steps.parallel.clock, kept, self.own.say)

    @property
    def filled(self) -> bool:
        """Do all links hold states?"""
        return all(link.filled for link in self.own.links)

    @property
    def here(self) -> range:
        """The stages of this process."""
        return self.own.range

    @property
    def learning_rate(self) -> float | None:
        """Of the last step."""
        return self._learning_rate

    @property
    def auxiliary_bytes(self) -> int:
        """What links and workers keep beside the stages, in all processes."""
        return self._bytes

    def _measure(self) -> None:
        rate = next((rate for stage in self.own.stages if (rate := stage.optimiser.rate) is not None), None)
        kept = sum(link.bytes for link in self.own.links) + sum(worker.bytes for worker in self.own.workers.values())
        found = self.world.gather(lambda: (rate, kept))
        self._learning_rate = next((rate for rate, _ in found if rate is not None), None)
        self._bytes = sum(size for _, size in found)

    def facts(self) -> dict[str, Any]:
        """What a run's summary says about its engine."""
        world = self.world
        if not isinstance(world, Processes):
            found: dict[str, Any] = {"engine": "in-process", "processes": 1}
        else:
            found = {"engine": "distributed", "processes": world.size, "replicas": world.replicas}
        delay = self.own.method.delay(world.stages)
        return found if delay is None else {**found, "staleness": delay}

    def spans(self) -> list[Span]:
        """Who did what when, in all processes, as far as it was recorded."""
        return [span for spans in self.world.gather(lambda: list(self.steps.recorder.spans)) for span in spans]

    @property
    def waited(self) -> float:
        """Seconds that this process has waited for others."""
        return self.world.waits.seconds if isinstance(self.world, Processes) else 0.0

    def waits(self) -> list[float]:
        """The same of all processes; empty where there is only one."""
        return self.world.gather(lambda: round(self.waited, 3)) if isinstance(self.world, Processes) else []

    def close(self) -> None:
        """Give the stores back."""
        try:
            self.steps.close()
        finally:
            for link in self.own.links:
                link.close()
