"""`parlay bench`: time per step of several ways to train the same network, side by side in one run.

core      systems, rounds, rows: the frame           table     rows for people
cpu       which systems there are on CPU cores       cuda      and on GPUs
gang      processes that sleep until timed           workers   what each of them does in a step
"""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from parlay import methods
from parlay.bench.core import Problem, Row, Say, best, interleaved
from parlay.config.recipe import Recipe
from parlay.errors import InputError

DEFAULTS: dict[str, Any] = {"dataset": "cifar10", "stages": 2, "partition": "cost"}
"""Where the benchmark differs from training: photographs, which need not lie on the disk, and stages cut by cost."""


class Found(NamedTuple):
    recipe: Recipe
    """With everything that was measured or filled in."""
    rows: list[Row]


def run(recipe: Recipe, rounds: int, steps: int, say: Say, whole: bool = False) -> Found:
    """Time all systems of the recipe's device; `whole`: and serial training compiled in one piece, on a GPU."""
    if methods.streams(recipe.method):
        raise InputError("bench times streaming methods beside the others anyway: write method al or penalty")
    kind = _device(recipe)
    if find_spec(f"parlay.bench.{kind}") is None:
        raise InputError(f"there is no benchmark on {kind}: write --device cpu")
    if whole and kind != "cuda":
        raise InputError(f"nothing is compiled on {kind}: leave --whole out, or write --device cuda")
    place = import_module(f"parlay.bench.{kind}")
    partition, recipe = recipe.partition, place.resolved(recipe)
    more = {"whole": True} if whole else {}
    systems = place.systems(recipe, partition, say, **more)
    try:
        rows = interleaved(systems, Problem(recipe.model, recipe.batch_size), rounds, steps, say)
    finally:
        for system in systems:
            system.close()
    return Found(recipe, best(rows))


def devices(recipe: Recipe) -> list[str]:
    """What the systems run on: a core per stage, or one GPU."""
    import torch

    return [torch.cuda.get_device_name()] if _device(recipe) == "cuda" else [recipe.device] * recipe.stages


def processor() -> str:
    """Its name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _device(recipe: Recipe) -> str:
    from parlay.trainer import spread

    return str(spread(recipe.device, 1)[0].type)
