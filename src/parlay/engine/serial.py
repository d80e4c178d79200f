"""A serial step: forward and backward through the whole network, as backpropagation does.

In one process, where the stages run one after the other, as one captured step on a GPU. shared_serial.py has the same
over several processes.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from parlay import faults
from parlay.batch import Batch
from parlay.engine.captured import Captured, Inputs
from parlay.engine.guard import Guard
from parlay.engine.own import Own
from parlay.stage.precision import in_full


@final
class SerialStep:
    """Of a process that has all stages."""

    def __init__(self, own: Own, guard: Guard) -> None:
        self.own, self.guard = own, guard
        self._captured: Captured | None = None

    def capture(self, captured: Captured) -> None:
        self._captured = captured

    def __call__(self, batch: Batch) -> Tensor:
        """The loss."""
        own = self.own
        own.train_mode()
        for worker in own.workers.values():
            worker.seed(batch, None)
        rate = torch.tensor(batch.rate, dtype=torch.float64)
        inputs = {"rate": rate, "ids": batch.ids, **own.feed.draw(batch.rows, batch.generator())}
        if self._captured is None:
            return self.run(inputs)
        return self._captured(inputs, full=batch.rows == own.batch_size)

    def run(self, inputs: Inputs, compiled: bool = False) -> Tensor:
        own = self.own
        x, targets = own.feed.batch(inputs["ids"], inputs)
        for worker in own.workers.values():
            with worker.sources[0]:
                x = worker.stage.forward(x, compiled)
        loss = faults.spoil(own.world.stages - 1, own.loss(in_full(x), targets))
        self.guard.see(loss)
        if self.guard.may_update():
            loss.backward()  # type: ignore[no-untyped-call]
            self.guard.hold()
            own.clip([g for stage in own.stages for g in stage.gradients()])
            for stage in own.stages:
                stage.optimiser.set_rate(inputs["rate"])
                stage.apply()
        return loss.detach().reshape(1)
