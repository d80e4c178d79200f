"""What a run would take, before anything runs: cuts, memory, where it fits, and the speed-up to expect.

Speed-ups are by time per sample trained. In the red-black order a stage trains on half of the samples of a step, and
the ratio of step times, `speedup_per_step`, is of half of the work.

Where stages will be processes on CPU cores, they are measured side by side: they share caches and memory, so each is
slower than alone. Elsewhere they are measured one by one, and nothing is said of what the exchange takes.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parlay import stores
from parlay.bench.cpu import one_core
from parlay.bench.side_by_side import exchanged, measured
from parlay.bench.workers import Bench
from parlay.config.recipe import Recipe
from parlay.config.schedule import PARALLEL, Schedule
from parlay.costs import block_costs
from parlay.errors import InputError
from parlay.files import scratch_folder
from parlay.link.filters import downsample
from parlay.run.setup import Setup, set_up
from parlay.stage.precision import chosen_device, mixed_precision

GIB = 1 << 30
FEW, MORE = 2, 4  # samples of a batch, from which what is held with a full one follows


def plan(recipe: Recipe) -> dict[str, Any]:
    """The forecast of a recipe. No data is read: shapes and sizes of the named sets are known."""
    on_cores = chosen_device(recipe.device).type == "cpu"
    side_by_side = recipe.engine == "distributed" and recipe.method != "serial" and on_cores
    with one_core() if side_by_side else nullcontext():
        setup = set_up(recipe)
    recipe, cut = setup.recipe, setup.partition
    phases = Schedule.parse(recipe.schedule).phases(recipe.epochs)
    needed = auxiliary_bytes(setup) if PARALLEL in phases else 0  # refuses what the method cannot do, before timing
    share = setup.method.computed if setup.method else 1.0  # of the samples of a step that a stage trains on
    crossing = [math.ceil(share * count) for count in exchanged(setup)]
    times = measured(setup, crossing) if side_by_side else _projected(setup, share)
    per_step, samples = times["serial_ms"] / times["step_ms"], recipe.batch_size * share
    return {
        "model": recipe.model,
        "dataset": recipe.dataset,
        "stages": recipe.stages,
        "blocks": len(cut.model),
        "parameters": sum(w.numel() for w in cut.model.parameters()),
        "cuts": list(cut.cuts),
        "interfaces": [list(shape) for shape in cut.shapes],
        "auxiliary_gib": needed / GIB,
        **_place(recipe, needed),
        "device": str(chosen_device(recipe.device)),
        "batch_size": recipe.batch_size,
        **times,
        "exchange_bytes": crossing,
        "samples_per_step": samples,
        "sample_us": 1000 * times["step_ms"] / samples,
        "speedup_per_step": per_step,
        "speedup_parallel_epoch": per_step * share,
        "phases": phases,
        "speedup": hybrid_speedup(per_step, phases, share),
    }


def hybrid_speedup(ratio: float, phases: str, share: float = 1.0) -> float:
    """ρ_H, eq. (11), for K devices: serial epochs take as long as ever, parallel ones 1/ρ_K of that.

    `share`: of the samples of a parallel epoch, the part that a stage trains on. What is left out is no work done.
    """
    parallel = phases.count(PARALLEL)
    serial = len(phases) - parallel
    return (share * parallel + serial) / (parallel / ratio + serial)


def auxiliary_bytes(setup: Setup) -> int:
    """What a run will hold beside the network: a state for every sample, or batches on their way.

    What batches take only links and workers know, so a few small steps are made. Part of it grows with the samples of a
    batch, the rest does not: batches of two sizes tell one from the other.
    """
    recipe, method = setup.recipe, setup.method
    if method is None:
        return 0
    if method.keeps:
        copies = 1 + int(recipe.augment) if recipe.augment.isdecimal() else 1
        shapes = [downsample(recipe.downsample).shape(shape) for shape in setup.partition.shapes]
        dtype = stores.DTYPES[recipe.store_dtype]
        return stores.store_bytes(setup.facts.train_size * copies, shapes, dtype, multipliers=method.keeps > 1)
    few, more = _held(recipe, FEW), _held(recipe, MORE)
    rows = min(recipe.batch_size, setup.facts.train_size)
    return few + (rows - FEW) * (more - few) // (MORE - FEW)


def _held(recipe: Recipe, rows: int) -> int:
    """With batches of so many samples, once all slots are full and all optimisers have made an update."""
    bench = Bench.of(replace(recipe, capture="off", compile="off", batch_size=rows))
    with scratch_folder() as scratch:
        engine = bench.engine(scratch)
        for step in range(2 * recipe.stages + 1):  # there and back
            engine.parallel_step(bench.batch(step))
        engine.drain()
        engine.close()
    return engine.auxiliary_bytes


def _place(recipe: Recipe, needed: int) -> dict[str, Any]:
    """Where the stores would go, or the line that `train` would refuse the run with."""
    folder = Path(recipe.out or ".")
    try:
        return {"store": stores.place(recipe.store, needed, chosen_device(recipe.device), folder), "fits": True}
    except InputError as error:
        return {"store": None, "fits": False, "problem": str(error)}


def _projected(setup: Setup, share: float) -> dict[str, Any]:
    """From the stages, measured one after the other: no communication, no devices that slow each other down."""
    size, method = setup.recipe.batch_size, setup.method
    whole = _stage_ms(setup, size)
    computed = whole if share == 1 else _stage_ms(setup, math.ceil(size * share))
    stage_ms = [ms * (method.work(k, len(whole)) if method else 1.0) for k, ms in enumerate(computed)]
    return {"measured": "one by one", "serial_ms": sum(whole), "stage_ms": stage_ms, "step_ms": max(stage_ms)}


def _stage_ms(setup: Setup, samples: int) -> list[float]:
    """Forward and backward of every stage alone, with so many samples."""
    device = chosen_device(setup.recipe.device)
    example = torch.randn(samples, *setup.facts.shape, device=device).contiguous(memory_format=torch.channels_last)
    with mixed_precision(setup.recipe.precision, device):
        return [1000 * seconds for seconds in block_costs(nn.Sequential(*setup.partition.stages), example)]
