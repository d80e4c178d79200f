"""The steps of a process that has all stages; on a GPU they are captured."""

from __future__ import annotations

from typing import final

from parlay.batch import Batch
from parlay.engine.captured import Captured
from parlay.engine.captures import Captures
from parlay.engine.chain import Chain
from parlay.engine.guard import Guard
from parlay.engine.losses import Losses, Totals
from parlay.engine.own import Own
from parlay.engine.serial import SerialStep
from parlay.engine.step import ParallelStep


@final
class Alone:
    shared = None

    def __init__(self, own: Own, compile: bool) -> None:
        """`compile`: captured steps run compiled blocks and links."""
        captures = own.lanes if own.lanes.captures else None
        self.own = own
        self.guard = Guard(captures, own.device, own.optimisers)
        self.chain = Chain(own)
        self.recorder = self.chain.recorder
        self.parallel = ParallelStep(own, self.guard, self.recorder)
        self._serial = SerialStep(own, self.guard)
        self._losses = Losses(own.world.stages, captures)
        self._captures = Captures(own, compile) if captures is not None else None
        if self._captures is not None:
            common = own.lanes, own.changed, self._forget, own.say
            self.parallel.capture(Captured(self.parallel.run, *common, self._captures.through_windows))
            self._serial.capture(Captured(self._serial.run, *common))

    def step(self, batch: Batch | None, totals: Totals) -> None:
        self._begin(batch)
        trained, row = self.parallel(batch)
        self._losses.add(trained, row, totals)

    def serial_step(self, batch: Batch, totals: Totals) -> None:
        self._begin(batch)
        self._losses.add([batch], self._serial(batch), totals)

    def _begin(self, batch: Batch | None) -> None:
        if self._captures is not None:
            self._captures.batch = batch
            self._captures.check_compiled(batch)

    def agreed(self, stop: bool) -> bool:
        return stop

    def drain(self, totals: Totals) -> None:
        self._losses.drain(totals)

    def _forget(self) -> None:
        """Of a step that could not be captured nothing may stay behind."""
        self.guard.clear()
        self.own.forget()

    def close(self) -> None:
        if self._captures is not None:
            self._captures.close()
