"""The captured engine on a rehearsed GPU, beside the eager one: what tests of the captured path share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import parlay
import problems
from parlay.batch import Batch
from parlay.data import batches
from parlay.engine.alone import Alone
from parlay.engine.build import build
from parlay.engine.engine import Engine
from parlay.engine.losses import Totals
from parlay.lanes import Counts, Lanes
from parlay.link.queue import QueueLink
from parlay.link.states import StateLink
from parlay.stores.host import HostMemory
from rehearsal import Rehearsal

BATCH = 8
Phases = list[tuple[str, list[Batch]]]
Make = Callable[[Lanes | None], Engine]


def fused(weights: Any) -> torch.optim.Optimizer:
    """As on a GPU: fused, with a rate that is a tensor."""
    return torch.optim.SGD(list(weights), lr=torch.full((), 0.05), momentum=0.9, weight_decay=1e-3, fused=True)


def making(method: Any, stages: int, data: tuple[Tensor, Tensor], folder: Path, **options: Any) -> Make:
    """An engine, captured where lanes are given, with all that it holds on their device."""
    network = options.pop("model", problems.with_norm)
    batch_size = options.pop("batch_size", BATCH)

    def make(lanes: Lanes | None) -> Engine:
        with Rehearsal.aside() if lanes is not None else nullcontext():
            cut = parlay.partition(network(), stages, data[0][:2])
            chosen = {"schedule": "parallel", "optimizer": fused, "batch_size": batch_size, **options}
            made = problems.trainer(cut, method, **chosen)
            feed = made._feed(data, chosen.get("augment"))
            running = build(cut, method, feed, made.world, made.engine_options, folder, say=_fail, lanes=lanes)
        if isinstance(lanes, Rehearsal):
            _adopt(lanes, running)
        return running

    return make


def _adopt(lanes: Rehearsal, running: Engine) -> None:
    """All that it holds is memory of the device from now on."""
    own = running.own
    for worker in own.workers.values():
        for part in worker.parts():
            assert part.optimiser.inner is not None
            state = (value for own in part.optimiser.inner.state.values() for value in own.values())
            lanes.adopt(part.module, *(group["lr"] for group in part.optimiser.groups), *state)
        lanes.adopt(getattr(getattr(worker, "_inputs", None), "_memory", None))
    for link in own.links:
        if isinstance(link, StateLink):
            own_rows = (store._rows for store in link.stores() if not isinstance(store, HostMemory))
            lanes.adopt(link.weight, link.s2, *own_rows)
        if isinstance(link, QueueLink):
            lanes.adopt(link.outputs._memory, link.adjoints._memory)
    alone = running.steps
    assert isinstance(alone, Alone)
    windows = alone._captures._windows if alone._captures is not None else None
    lanes.adopt(own.feed.split.inputs, own.feed.split.targets, alone.guard._flag)
    lanes.adopt(*((windows._brought, windows._new) if windows is not None else ()))


def _fail(line: str) -> None:
    raise AssertionError(line)


def steps(samples: int, epochs: int, weight: float = 3.0, rate: Callable[[int], float] | None = None) -> list[Batch]:
    """Batches of some epochs, with a rate that changes at every step."""
    found: list[Batch] = []
    for epoch in range(epochs):
        for n, ids in enumerate(batches(samples, BATCH, 0, epoch)):
            own = (rate or (lambda t: 1 / (1 + t % 3)))(len(found))
            found.append(Batch(ids, epoch, n, own, 0, weight))
    return found


class Training:
    """An engine at work; `again` makes another one, which takes up what a checkpoint keeps of the one before."""

    def __init__(self, make: Make, lanes: Rehearsal | None) -> None:
        self.make, self.lanes = make, lanes
        self.running = make(lanes)
        self.losses: list[float] = []

    def train(self, phases: Phases, resumed_after: int | None) -> None:
        count = 0
        for phase, own in phases:
            if phase == "parallel":
                self._refresh(own)
            for batch in own:
                running = self.running
                (running.parallel_step if phase == "parallel" else running.serial_step)(batch)
                count += 1
                if count == resumed_after:
                    self.again()
            if phase == "parallel":
                self.running.finish()
            self.losses += self.running.drain().losses()
            self.running.totals = Totals()

    def again(self) -> None:
        totals = self.running.drain()
        kept = _on_host(self.running.parts(True), self.lanes)
        self.running = self.make(self.lanes)
        with Rehearsal.aside() if self.lanes is not None else nullcontext():
            self.running.load(kept)
        if self.lanes is not None:
            _adopt(self.lanes, self.running)
        self.running.totals = totals

    def _refresh(self, batches: list[Batch]) -> None:
        if self.lanes is None:
            self.running.refresh(batches, problems.never)
            return
        # `.to(device)` takes ids to a GPU there; it does nothing where the device is called cpu
        there = [replace(batch, ids=self.lanes.to_device(batch.ids)) for batch in batches]
        with self.lanes.main:
            self.running.refresh(there, problems.never)


def _on_host(parts: dict[str, dict[str, Tensor]], lanes: Rehearsal | None) -> dict[str, dict[str, Tensor]]:
    if lanes is not None:
        lanes.synchronize()
    with Rehearsal.aside() if lanes is not None else nullcontext():
        return {part: {name: value.clone() for name, value in own.items()} for part, own in parts.items()}


def outcome(
    make: Make, phases: Phases, schedule: str | None, resumed_after: int | None = None
) -> tuple[dict[str, Tensor], list[float], Counts]:
    """Weights, buffers, states and optimiser state, the mean losses, and what went through the seam.

    `schedule`: captured, on lanes that go in this order; None: eager.
    """
    if schedule is None:
        eager = Training(make, None)
        eager.train(phases, resumed_after)
        return _kept(eager.running), eager.losses, Counts()
    gc.freeze()
    with Rehearsal(schedule) as lanes:
        captured = Training(make, lanes)
        captured.train(phases, resumed_after)
        lanes.synchronize()
    return _kept(captured.running), captured.losses, replace(lanes.counts)


def _kept(running: Engine) -> dict[str, Tensor]:
    return {f"{part}/{name}": value for part, kept in running.parts(True).items() for name, value in kept.items()}


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    if found.keys() != wanted.keys():
        return f"other parts: {sorted(found.keys() ^ wanted.keys())[:4]}"
    bad = [name for name, value in found.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        return f"not finite: {bad[:4]}"
    other = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    return f"differ: {other[:4]}" if other else ""


def small(seed: int = 0) -> nn.Sequential:
    """A residual network with batch norm that is quick to rehearse."""
    torch.manual_seed(seed)
    return parlay.build_model("resnet8", problems.IMAGE, problems.CLASSES)


def noisy(seed: int = 0) -> nn.Sequential:
    """The same with dropout before each block."""
    blocks = [nn.Sequential(nn.Dropout(0.2), block) for block in problems.with_norm(seed)]
    return nn.Sequential(*blocks)
