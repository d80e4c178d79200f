"""What a run would take, before anything runs: cuts, memory, where it fits, and the speed-up to expect."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parlay import forecast, stores
from parlay.bench.cpu import one_core
from parlay.coupling import Streaming
from parlay.errors import InputError
from parlay.filters import downsample
from parlay.partitioning import block_costs
from parlay.recipe import Recipe
from parlay.run import Setup, set_up
from parlay.schedule import PARALLEL, Schedule
from parlay.trainer import mixed_precision, spread

GIB = 1 << 30


def plan(recipe: Recipe) -> dict[str, Any]:
    """The forecast of a recipe. No data is read: shapes and sizes of the named sets are known."""
    beside = _side_by_side(recipe)
    with one_core() if beside else nullcontext():
        setup = set_up(recipe)
    recipe = setup.recipe
    phases = Schedule.parse(recipe.schedule).phases(recipe.epochs)
    needed = auxiliary_bytes(setup) if PARALLEL in phases else 0  # refuses what the method cannot do, before timing
    times = _measured(setup) if beside else _projected(setup)
    ratio = times["speedup_parallel_epoch"]
    return {
        "model": recipe.model,
        "dataset": recipe.dataset,
        "stages": recipe.stages,
        "blocks": len(setup.partition.model),
        "parameters": sum(w.numel() for w in setup.partition.model.parameters()),
        "cuts": list(setup.partition.cuts),
        "interfaces": [list(shape) for shape in setup.partition.shapes],
        "auxiliary_gib": needed / GIB,
        **_place(recipe, needed),
        "device": str(spread(recipe.device, 1)[0]),
        "batch_size": recipe.batch_size,
        **times,
        "phases": phases,
        "speedup": forecast.hybrid_speedup(ratio, phases),
    }


def auxiliary_bytes(setup: Setup) -> int:
    """What a run will hold beside the network: in its stores, or in the stations of a streaming method."""
    if isinstance(setup.method, Streaming):
        return forecast.stream_bytes(setup)
    if setup.coupling is None:
        return 0
    recipe, reduce = setup.recipe, downsample(setup.recipe.downsample)
    copies = 1 + int(recipe.augment) if recipe.augment.isdecimal() else 1
    shapes = [reduce.shape(shape) for shape in setup.partition.shapes]
    dtype = stores.DTYPES[recipe.store_dtype]
    return stores.store_bytes(setup.facts.train_size * copies, shapes, dtype, setup.coupling.keeps_multipliers)


def _side_by_side(recipe: Recipe) -> bool:
    """Will stages be processes on CPU cores? Then they can be measured as they will run."""
    return recipe.engine == "distributed" and recipe.method != "serial" and spread(recipe.device, 1)[0].type == "cpu"


def _projected(setup: Setup) -> dict[str, Any]:
    """From the stages, measured one after the other: no communication, no devices that slow each other down."""
    alone_ms = [1000 * seconds for seconds in _stage_seconds(setup)]
    method = setup.method
    work = [method.work(k, len(alone_ms)) if isinstance(method, Streaming) else 1.0 for k in range(len(alone_ms))]
    stage_ms = [ms * share for ms, share in zip(alone_ms, work, strict=True)]
    serial_ms = sum(alone_ms)
    return {
        "measured": "one by one",
        "serial_ms": serial_ms,
        "stage_ms": stage_ms,
        "exchange_bytes": forecast.exchanged(setup),
        "step_ms": max(stage_ms),
        "speedup_parallel_epoch": serial_ms / max(stage_ms),
    }


def _measured(setup: Setup) -> dict[str, Any]:
    """From the stages side by side, a core each, and the speed of a link between two processes."""
    found, crossing = forecast.measure(setup), forecast.exchanged(setup)
    step_ms = forecast.step_ms(found, crossing)
    return {
        "measured": "side by side",
        "serial_ms": found.serial_ms,
        "stage_ms": found.stage_ms,
        "exchange_bytes": crossing,
        "link_gib_per_second": found.bytes_per_second / GIB,
        "step_ms": step_ms,
        "speedup_parallel_epoch": found.serial_ms / step_ms,
    }


def _stage_seconds(setup: Setup) -> list[float]:
    """Measured forward and backward of every stage alone, at the recipe's batch size."""
    device = spread(setup.recipe.device, 1)[0]
    example = torch.randn(setup.recipe.batch_size, *setup.facts.shape, device=device)
    with mixed_precision(setup.recipe.precision, device):
        example = example.contiguous(memory_format=torch.channels_last)
        return block_costs(nn.Sequential(*setup.partition.stages), example)


def _place(recipe: Recipe, needed: int) -> dict[str, Any]:
    """Where the stores would go, or the line that `train` would refuse the run with."""
    folder = Path(recipe.out or ".")
    try:
        return {"store": stores.place(recipe.store, needed, spread(recipe.device, 1)[0], folder), "fits": True}
    except InputError as error:
        return {"store": None, "fits": False, "problem": str(error)}
