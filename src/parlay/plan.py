"""What a run would take, before anything runs: cuts, memory, where it fits, and the speed-up to expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from parlay import stores
from parlay.errors import InputError
from parlay.filters import downsample
from parlay.partitioning import block_costs
from parlay.recipe import Recipe
from parlay.run import Setup, set_up
from parlay.schedule import PARALLEL, Schedule
from parlay.trainer import spread

GIB = 1 << 30


def plan(recipe: Recipe) -> dict[str, Any]:
    """The forecast of a recipe. No data is read: shapes and sizes of the named sets are known."""
    setup = set_up(recipe)
    recipe = setup.recipe
    stage_ms = [1000 * seconds for seconds in _stage_seconds(setup)]
    ratio = sum(stage_ms) / max(stage_ms)
    phases = Schedule.parse(recipe.schedule).phases(recipe.epochs)
    needed = auxiliary_bytes(setup) if PARALLEL in phases else 0
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
        "stage_ms": stage_ms,
        "speedup_parallel_epoch": ratio,
        "phases": phases,
        "speedup": hybrid_speedup(ratio, phases),
    }


def auxiliary_bytes(setup: Setup) -> int:
    """What the stores of a run will hold."""
    if setup.coupling is None:
        return 0
    recipe, reduce = setup.recipe, downsample(setup.recipe.downsample)
    copies = 1 + int(recipe.augment) if recipe.augment.isdecimal() else 1
    shapes = [reduce.shape(shape) for shape in setup.partition.shapes]
    dtype = stores.DTYPES[recipe.store_dtype]
    return stores.store_bytes(setup.facts.train_size * copies, shapes, dtype, setup.coupling.keeps_multipliers)


def hybrid_speedup(ratio: float, phases: str) -> float:
    """ρ_H, eq. (11), for K devices: serial epochs take as long as ever, parallel ones 1/ρ_K of that."""
    parallel = phases.count(PARALLEL)
    return len(phases) / (parallel / ratio + len(phases) - parallel)


def _stage_seconds(setup: Setup) -> list[float]:
    """Measured forward and backward of every stage alone, at the recipe's batch size."""
    device = spread(setup.recipe.device, 1)[0]
    example = torch.randn(setup.recipe.batch_size, *setup.facts.shape, device=device)
    return block_costs(nn.Sequential(*setup.partition.stages), example)


def _place(recipe: Recipe, needed: int) -> dict[str, Any]:
    """Where the stores would go, or the line that `train` would refuse the run with."""
    folder = Path(recipe.out or ".")
    try:
        return {"store": stores.place(recipe.store, needed, spread(recipe.device, 1)[0], folder), "fits": True}
    except InputError as error:
        return {"store": None, "fits": False, "problem": str(error)}
