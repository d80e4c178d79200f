"""A serial step over several processes: a pipeline of micro-batches, or the whole batch where it does not divide."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parlay import faults, signs
from parlay.batch import Batch
from parlay.engine.chain import Chain
from parlay.engine.evaluate import unchanged_buffers
from parlay.engine.losses import SharedLosses
from parlay.engine.own import Own, clip_gradients
from parlay.engine.rows import divided
from parlay.engine.world import Processes
from parlay.stage.precision import in_full
from parlay.stage.worker import nothing

EMPTY = torch.empty(0)


@final
class SharedSerialStep:
    """Of one among several processes."""

    def __init__(self, own: Own, world: Processes, losses: SharedLosses, chain: Chain, pipelined: bool) -> None:
        self.own, self.world, self.losses, self.chain = own, world, losses, chain
        # gloo carries a pipeline for CPUs only
        self._pipelined = pipelined and (own.device.type == "cpu" or world.own_gpu)
        self._pipelines: dict[int, Any] = {}
        self._recorder = chain.recorder

    def __call__(self, batch: Batch) -> None:
        own, number = self.own, self.chain.number
        own.train_mode()
        self._seed(batch)
        for stage in own.stages:
            stage.optimiser.set_rate(batch.rate)
        # a last, smaller batch that does not divide goes through the stages as a whole
        parts = divided(batch.rows, 0, self.world.count) if self._pipelined else 1
        loss = self._piped(batch, parts) if parts > 1 else self._chained(batch)
        if own.last:
            self.losses.note_serial(batch, loss)
        self.losses.read(0)
        with self._recorder.span("update", number):
            for worker in own.workers.values():
                self.losses.average(worker.stage)
            self._clip()
            for stage in own.stages:
                stage.apply()

    def _seed(self, batch: Batch) -> None:
        for worker in self.own.workers.values():
            worker.seed(batch, None, self.world.replica)

    def _chained(self, batch: Batch) -> float:
        """Forward and backward along the stages, one after the other: as in one process, to rounding."""
        own, chain, number = self.own, self.chain, self.chain.number
        share = own.rows.all(batch.ids)
        inputs, targets = self._augmented(batch)
        x = inputs if own.first else chain.receive(len(share.ids))
        if not own.first:
            x.requires_grad_(x.is_floating_point())
        y: Any = x
        with self._recorder.span("forward", number):
            for worker in own.workers.values():
                with worker.sources[0]:
                    y = worker.stage.forward(y)
        loss, gradient = EMPTY, EMPTY
        if own.last:
            loss = own.loss(in_full(y), targets) if len(share.ids) else nothing(y)
            loss = faults.spoil(self.world.stages - 1, loss)
            if self.world.replicas > 1:
                loss = loss * (len(share.ids) / max(share.whole, 1))
        else:
            chain.send(y)
            self.losses.note_serial(batch, 0.0)
            gradient = chain.receive_back(y)
        with self._recorder.span("backward", number):
            if own.last:
                loss.backward()  # type: ignore[no-untyped-call]
            elif y.requires_grad:
                y.backward(gradient)
        if not own.first:
            chain.send_back(x.grad if x.grad is not None else torch.zeros_like(x))
        return float(loss.detach()) if own.last else 0.0

    def _piped(self, batch: Batch, parts: int) -> float:
        if batch.rows not in self._pipelines:
            self._pipelines[batch.rows] = self._pipeline(batch.rows // parts, parts)
            self._seed(batch)
        if not self.own.last:
            self.losses.note_serial(batch, 0.0)
        torch.manual_seed(batch.random(self.own.range[0]))
        # one span for all: the schedule is the pipeline's own
        with self._recorder.span("forward", self.chain.number), self.world.naming_the_lost(), signs.blocked():
            loss = self._pipelines[batch.rows].step(*self._augmented(batch))
        return float(loss) if loss is not None else 0.0

    def _pipeline(self, rows: int, parts: int) -> Any:
        """The shapes and types between the stages are those of the first samples, sent along them once."""
        from parlay.engine.pipeline import Pipeline  # torch's part of it takes its time to load

        own, chain = self.own, self.chain
        example = own.feed.batch(torch.arange(rows))[0]
        with unchanged_buffers(*(stage.module for stage in own.stages)), torch.no_grad():
            given = chain.forward(example)
        if not own.first:
            example = torch.zeros(rows, *chain.shape, dtype=chain.dtype)

        def loss(output: Any, targets: Tensor) -> Tensor:
            return faults.spoil(self.world.stages - 1, own.loss(in_full(output), targets))

        world = self.world
        return Pipeline(own.stages, world.position, world.count, world.column(), parts, loss, example, given)

    def _augmented(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs on the first stage and targets on the last, of this replica; the changes are drawn for the batch."""
        own = self.own
        changes = own.feed.draw(batch.rows, batch.generator())
        inputs = own.feed.batch(batch.ids, changes)[0] if own.first else EMPTY
        targets = own.feed.targets(batch.ids, changes) if own.last else EMPTY
        return own.rows.own(batch.ids, inputs), own.rows.own(batch.ids, targets)

    def _clip(self) -> None:
        """By the norm over all stages."""
        if self.own.clip_at is None:
            return
        gradients = [g for stage in self.own.stages for g in stage.gradients()]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.own.device)
        clip_gradients(gradients, self.own.clip_at, self.world.summed(norm.square(), self.world.column()).sqrt())
