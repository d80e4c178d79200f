"""What a run would take, before anything runs: cuts, memory, where it fits, and the speed-up to expect.

Speed-ups are by time per sample trained. In the red-black order a stage trains on half of the samples of a step, and
the ratio of step times, `speedup_per_step`, is of half of the work.
"""

from __future__ import annotations

import math
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
from parlay.run.setup import Setup, set_up
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
    per_step, share = times["serial_ms"] / times["step_ms"], _share(setup)
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
        "samples_per_step": recipe.batch_size * share,
        "sample_us": 1000 * times["step_ms"] / (recipe.batch_size * share),
        "speedup_per_step": per_step,
        "speedup_parallel_epoch": per_step * share,
        "phases": phases,
        "speedup": forecast.hybrid_speedup(per_step, phases, share),
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


def _share(setup: Setup) -> float:
    """Of the samples of a step, the part that each stage trains on."""
    return setup.coupling.portion if setup.coupling is not None else 1.0


def _exchanged(setup: Setup) -> list[int]:
    return [math.ceil(_share(setup) * count) for count in forecast.exchanged(setup)]


def _projected(setup: Setup) -> dict[str, Any]:
    """From the stages, measured one after the other: no communication, no devices that slow each other down."""
    size, method = setup.recipe.batch_size, setup.method
    alone_ms = serial = [1000 * seconds for seconds in _stage_seconds(setup, size)]
    if _share(setup) < 1:
        alone_ms = [1000 * seconds for seconds in _stage_seconds(setup, math.ceil(size * _share(setup)))]
    work = [method.work(k, len(alone_ms)) if isinstance(method, Streaming) else 1.0 for k in range(len(alone_ms))]
    stage_ms = [ms * more for ms, more in zip(alone_ms, work, strict=True)]
    return {
        "measured": "one by one",
        "serial_ms": sum(serial),
        "stage_ms": stage_ms,
        "exchange_bytes": _exchanged(setup),
        "step_ms": max(stage_ms),
    }


def _measured(setup: Setup) -> dict[str, Any]:
    """From the stages side by side, a core each, and the speed of a link between two processes."""
    found, crossing = forecast.measure(setup), _exchanged(setup)
    return {
        "measured": "side by side",
        "serial_ms": found.serial_ms,
        "stage_ms": found.stage_ms,
        "exchange_bytes": crossing,
        "link_gib_per_second": found.bytes_per_second / GIB,
        "step_ms": forecast.step_ms(found, crossing),
    }


def _stage_seconds(setup: Setup, samples: int) -> list[float]:
    """Measured forward and backward of every stage alone, with so many samples."""
    device = spread(setup.recipe.device, 1)[0]
    example = torch.randn(samples, *setup.facts.shape, device=device)
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
