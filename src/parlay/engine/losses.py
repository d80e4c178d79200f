"""Losses and violations of an epoch's steps, and what the processes agree about in each: stop, or a spoiled loss.

A GPU is not waited for: its losses are looked at some steps later. Among several processes a word on each step is
posted as a tiny reduction. On CPUs it is read before the update, which nobody makes when a loss is not finite. Where
each process has a GPU, a flag between the GPUs holds the updates (guard.py), and the word is read up to LATE steps
later, at the same step everywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from parlay.batch import Batch
from parlay.engine.world import Processes
from parlay.errors import Diverged
from parlay.lanes import Event, Lanes
from parlay.stage.stage import Stage

LOOK_EVERY = 32  # steps between two looks at the losses of a GPU: those of the steps before the last look
LATE = 2  # steps that a word may be read late

Trained = Sequence[Batch | None]
"""The batch that each stage has trained on in a step; of a serial step the one of the whole network."""


@dataclass
class Totals:
    """Sums over the steps of an epoch, on the host."""

    samples: int = 0
    """Of the violations."""
    loss: list[float] = field(default_factory=list)
    violation: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    """Samples of each loss."""

    def __post_init__(self) -> None:
        if self.loss and not self.counts:  # of a checkpoint that counted all together
            self.counts = [float(self.samples)] * len(self.loss)

    def add(self, trained: Trained, losses: list[float], violations: list[float]) -> None:
        samples = [batch.rows if batch is not None else 0 for batch in trained]
        self.loss = _sum(self.loss, [value * n for value, n in zip(losses, samples, strict=True)])
        self.counts = _sum(self.counts, [float(n) for n in samples])
        self.violation = _sum(self.violation, [value * samples[0] for value in violations])
        self.samples += samples[0]

    def losses(self) -> list[float]:
        """Means over the samples."""
        return [value / max(n, 1.0) for value, n in zip(self.loss, self.counts, strict=True)]

    def violations(self) -> list[float]:
        return [value / max(self.samples, 1) for value in self.violation]


def _sum(sums: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more


class Row(NamedTuple):
    """The losses and violations of a step, in one tensor."""

    trained: Trained
    values: Tensor


class Coming(NamedTuple):
    """Rows of some steps on their way to the host."""

    rows: list[Row]
    values: Tensor
    there: Event


@final
class Losses:
    """Of a process that has all stages."""

    def __init__(self, stages: int, lanes: Lanes | None = None) -> None:
        """`lanes`: of a GPU that is not waited for."""
        self.stages, self._lanes = stages, lanes
        self._rows: list[Row] = []
        self._coming: Coming | None = None

    def add(self, trained: Trained, values: Tensor, totals: Totals) -> None:
        self._rows.append(Row(trained, values))
        if self._lanes is None:
            self.drain(totals)
        elif len(self._rows) >= LOOK_EVERY:
            self._look(self._lanes, totals)

    def _look(self, lanes: Lanes, totals: Totals) -> None:
        """At losses that have come; those of the last steps are sent on their way."""
        rows, self._rows = self._rows, []
        values = lanes.fetch(torch.stack([row.values for row in rows]))
        before, self._coming = self._coming, Coming(rows, values, lanes.current.mark())
        if before is not None:
            before.there.synchronize()
            self._read(before.rows, before.values, totals)

    def drain(self, totals: Totals) -> None:
        """Take the losses of all steps from the device, look at them, and add them up."""
        rows, self._rows = self._rows, []
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.there.synchronize()
            self._read(coming.rows, coming.values, totals)
        if rows:
            self._read(rows, torch.stack([row.values for row in rows]), totals)  # one copy takes them

    def _read(self, rows: list[Row], values: Tensor, totals: Totals) -> None:
        for row, numbers in zip(rows, values.tolist(), strict=True):
            count = len(row.trained)
            raise_if_not_finite(row.trained, numbers[:count], self.stages)
            totals.add(row.trained, numbers[:count], numbers[count:])


class Noted(NamedTuple):
    """A step as this process saw it: of its own stages, or of the network for the last process of a serial step."""

    trained: Trained
    losses: list[float]
    serial: bool


class Word(NamedTuple):
    """What was posted about a step, and is not read yet."""

    noted: Noted | None
    flags: Tensor
    work: Any


@final
class SharedLosses:
    """Of one among several processes, which has some of the stages."""

    def __init__(self, world: Processes) -> None:
        self.stopped = False
        """Have all agreed to stop?"""
        self.spoiled = False
        """Has this process met a loss that is not finite? Then it changes nothing any more."""
        self.wants_to_stop = False
        self._world = world
        self._words: deque[Word] = deque()
        self._noted: list[Noted] = []
        self._violations: list[list[Tensor]] = []
        self._unread: deque[tuple[Trained, Tensor]] = deque()

    def note(self, trained: Trained, losses: Tensor, late: bool) -> None:
        """The losses of this process's stages are known. `late`: the host asks the GPU for those of the step before."""
        self._unread.append((trained, losses))
        self._read_losses(keep=1 if late else 0)

    def note_serial(self, batch: Batch, loss: float) -> None:
        self._note(Noted([batch], [loss], serial=True))

    def _read_losses(self, keep: int) -> None:
        while len(self._unread) > keep:
            trained, losses = self._unread.popleft()
            self._note(Noted(trained, losses.tolist(), serial=False))

    def _note(self, noted: Noted) -> None:
        self._noted.append(noted)
        bad = not all(map(math.isfinite, noted.losses))
        self.spoiled = self.spoiled or bad
        self._post(noted, self.wants_to_stop, bad)

    def pass_by(self, stop: bool) -> None:
        """A word on a step that trains nothing."""
        self._post(None, stop, False)

    def violations(self, found: list[list[Tensor]]) -> None:
        """Of each own link, those met since the last time."""
        self._violations = self._violations or [[] for _ in found]
        for kept, more in zip(self._violations, found, strict=True):
            kept += more

    def read(self, keep: int) -> bool:
        """Read all words but the last `keep`: is it time to stop? Raises `Diverged` in all processes alike."""
        while len(self._words) > keep:
            noted, flags, work = self._words.popleft()
            self._world.finish(work)
            stop, bad = map(bool, flags.tolist())
            self.stopped = self.stopped or stop
            if bad and noted is not None:
                raise_if_not_finite(*self._everybody(noted), self._world.stages)
        return self.stopped

    def average(self, stage: Stage) -> None:
        """Sum the gradients of a stage over its replicas: each has its weighted part of the mean."""
        weights = [w for w in stage.parameters.values() if w.requires_grad]
        if self._world.replicas == 1 or not weights:
            return
        stage.gradients()  # those of low-precision copies are the weights' now
        # a spoiled process changes nothing; the others go on for some steps, and need a number
        grads = [torch.zeros_like(w) if w.grad is None or self.spoiled else w.grad for w in weights]
        flat = self._world.over_replicas(torch.cat([grad.reshape(-1) for grad in grads]))
        for w, whole in zip(weights, torch.split(flat, [w.numel() for w in weights]), strict=True):
            w.grad = torch.empty_like(w).copy_(whole.view(w.shape))

    def drain(self, totals: Totals) -> None:
        """Add everybody's losses and violations of the steps since the last time, step by step."""
        self._read_losses(keep=0)
        self.read(0)
        noted, self._noted = self._noted, []
        own = [torch.stack(values).tolist() if values else [] for values in self._violations]
        self._violations = []
        world = self._world
        found = world.gather(lambda: ([step.losses for step in noted], own))
        links = [values for _, of_one in found[:: world.replicas] for values in of_one if values]
        for i, step in enumerate(noted):
            losses = self._joined([steps[i] for steps, _ in found], step.serial)
            totals.add(step.trained, losses, [values[i] for values in links if i < len(values)])

    def _joined(self, found: list[list[float]], serial: bool) -> list[float]:
        """A step's loss is the sum of its replicas' parts; of a serial step the last process alone has one."""
        each = self._world.replicas
        groups = [found[n : n + each] for n in range(0, len(found), each)]
        losses = [[sum(parts) for parts in zip(*group, strict=True)] for group in groups]
        return losses[-1] if serial else [loss for own in losses for loss in own]

    def _everybody(self, noted: Noted) -> tuple[Trained, list[float]]:
        return noted.trained, self._joined(self._world.gather(lambda: noted.losses), noted.serial)

    def _post(self, noted: Noted | None, stop: bool, bad: bool) -> None:
        flags = torch.tensor([stop, bad], dtype=torch.int32)
        with self._world.naming_the_lost():
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._world.pulse, async_op=True)
        self._words.append(Word(noted, flags, work))


def raise_if_not_finite(trained: Trained, losses: list[float], stages: int) -> None:
    for k, (batch, loss) in enumerate(zip(trained, losses, strict=True)):
        if math.isfinite(loss):
            continue
        whose = f"stage {k} of {stages}" if len(losses) == stages else "the network"  # a serial step has one loss
        if batch is None:  # no adjoint has come yet
            raise Diverged(f"the loss of {whose} is {loss} in the first steps of a parallel phase")
        ids = ", ".join(map(str, batch.ids[:4].tolist())) + (", ..." if batch.rows > 4 else "")
        when = f"epoch {batch.epoch + 1}, step {batch.step + 1}"  # as people count
        raise Diverged(f"the loss of {whose} is {loss} in {when} (samples {ids})")
