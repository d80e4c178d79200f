"""Today's captured engine on a rehearsed GPU, beside the eager one: what tests of the captured path share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import parlay
import problems
from parlay.data import batches
from parlay.engines.base import Batch, Totals
from parlay.engines.in_process import InProcess
from parlay.lanes import Counts
from rehearsal import Rehearsal

BATCH = 8


def fused(weights: Any) -> torch.optim.Optimizer:
    """As on a GPU: fused, with a rate that is a tensor."""
    return torch.optim.SGD(list(weights), lr=torch.full((), 0.05), momentum=0.9, weight_decay=1e-3, fused=True)


def make(method: Any, stages: int, data: tuple[Tensor, Tensor], folder: Path, **options: Any) -> InProcess:
    model = options.pop("model", problems.with_norm)()
    cut = parlay.partition(model, stages, data[0][:2])
    chosen = {"schedule": "parallel", "optimizer": fused, "batch_size": BATCH, **options}
    made = problems.trainer(cut, method, **chosen)
    return made.engine(made._feed(data, chosen.get("augment")), folder)  # type: ignore[return-value]


def on(lanes: Rehearsal, eager: InProcess, batch_size: int = BATCH) -> InProcess:
    """The same engine, captured, with all it holds on the rehearsed device."""
    for stage in eager.stages:
        lanes.adopt(stage.module, *(group["lr"] for group in stage._groups()))
    for interface in eager.interfaces:
        lanes.adopt(interface.mean_square, *(store._rows for store in interface.stores()))
    stations = eager._stream.stations if eager._stream is not None else None
    for station in stations or []:
        for part in station.parts():
            lanes.adopt(part.module, *(group["lr"] for group in part._groups()))
    lanes.adopt(eager.feed.split.inputs, eager.feed.split.targets)
    return InProcess(
        eager.model,
        eager.stages,
        eager.interfaces,
        eager.coupling,
        eager.loss,
        eager.feed,
        stations=stations,
        clip=eager.clip,
        batch_size=batch_size,
        capture=True,
        say=_fail,
        lanes=lanes,
    )


def _fail(line: str) -> None:
    raise AssertionError(line)


def steps(samples: int, epochs: int, beta: float = 3.0, rate: Callable[[int], float] | None = None) -> list[Batch]:
    """Batches of some epochs, with a rate that changes at every step."""
    found: list[Batch] = []
    for epoch in range(epochs):
        for n, ids in enumerate(batches(samples, BATCH, 0, epoch)):
            own = (rate or (lambda t: 1 / (1 + t % 3)))(len(found))
            found.append(Batch(ids, epoch, n, own, beta, 0, time=float(epoch)))
    return found


def trained(running: InProcess, phases: list[tuple[str, list[Batch]]], lanes: Rehearsal | None = None) -> list[float]:
    losses: list[float] = []
    for phase, own in phases:
        if phase == "parallel" and running.interfaces:
            # `.to(device)` takes ids to a GPU there; it does nothing where the device is called cpu
            there = [replace(batch, ids=lanes.to_device(batch.ids)) for batch in own] if lanes is not None else own
            running.refresh(there, problems.never)
        for batch in own:
            (running.parallel_step if phase == "parallel" else running.serial_step)(batch)
        if phase == "parallel":
            running.finish()
        losses += running.drain().losses()
        running.totals = Totals()
    return losses


def outcome(
    build: Callable[[], InProcess], phases: list[tuple[str, list[Batch]]], schedule: str | None, batch_size: int = BATCH
) -> tuple[dict[str, Tensor], list[float], Counts]:
    """Weights, buffers and optimiser state, the mean losses, and what went through the seam."""
    if schedule is None:
        running = build()
        losses = trained(running, phases)
        return _kept(running), losses, Counts()
    gc.freeze()
    eager = build()
    with Rehearsal(schedule) as lanes:
        with lanes.main:
            running = on(lanes, eager, batch_size)
        lanes.synchronize()
        losses = trained(running, phases, lanes)
        lanes.synchronize()
    return _kept(running), losses, replace(lanes.counts)


def _kept(running: InProcess) -> dict[str, Tensor]:
    found = {name: value for part in running.parts(True).values() for name, value in part.items()}
    return {name: value for name, value in found.items() if "violation" not in name}


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
