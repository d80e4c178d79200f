"""The steps of one among several processes, which has some of the stages."""

from __future__ import annotations

from typing import final

from parlay import signs
from parlay.batch import Batch
from parlay.engine.chain import Chain
from parlay.engine.guard import Guard
from parlay.engine.losses import SharedLosses, Totals
from parlay.engine.own import Own
from parlay.engine.rounds import Rounds
from parlay.engine.shared_serial import SharedSerialStep
from parlay.engine.step import ParallelStep
from parlay.engine.world import Processes
from parlay.lanes import Cuda
from parlay.stage.norms import JointNorms, Replicas


@final
class Shared:
    def __init__(self, own: Own, world: Processes, pipelined: bool, timeline: int) -> None:
        """`pipelined`: serial steps go through the stages in micro-batches. `timeline`: steps of an epoch to record."""
        self.own, self._timeline = own, timeline
        with signs.blocked():
            transport = world.transport(own.device)
        self.shared = SharedLosses(world)
        self.chain = Chain(own, transport, timeline)
        self.recorder = self.chain.recorder
        rounds = Rounds(transport, own.links, self.recorder)
        on_device = world.own_gpu and all(optimiser.can_be_captured for optimiser in own.optimisers)
        guard = Guard(Cuda(own.device) if on_device else None, own.device, own.optimisers, world.agreed)
        self.parallel = ParallelStep(own, guard, self.recorder, rounds, self.shared)
        self._serial = SharedSerialStep(own, world, self.shared, self.chain, pipelined and world.replicas == 1)
        if world.replicas > 1:
            replicas = Replicas(world.replica, world.replicas, world.over_replicas)
            self.chain.norms = [JointNorms(stage.module, replicas) for stage in own.stages]

    def step(self, batch: Batch | None, totals: Totals) -> None:  # noqa: ARG002
        self._begin(batch)
        self.parallel(batch)

    def serial_step(self, batch: Batch, totals: Totals) -> None:  # noqa: ARG002
        self._begin(batch)
        self.parallel.number += 1
        self._serial(batch)

    def _begin(self, batch: Batch | None) -> None:
        signs.beat()
        self.recorder.on = batch is not None and batch.step < self._timeline
        self.chain.number = self.parallel.number + 1

    def agreed(self, stop: bool) -> bool:
        self.shared.wants_to_stop = stop
        return self.shared.stopped

    def drain(self, totals: Totals) -> None:
        self.shared.violations(self.parallel.flush())
        self.shared.drain(totals)

    def close(self) -> None:
        for norms in self.chain.norms:
            norms.close()
