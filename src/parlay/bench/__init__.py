"""`parlay bench`: time per step of several ways to train the same network, side by side in one run.

core       systems, rounds, results: the frame       table     results for people
cpu        which systems there are on CPU cores      cuda      and on GPUs
processes  a pool of them, asleep until timed        workers   what each of them does in a step
side_by_side  what stages and their messages take, for a plan
"""

from __future__ import annotations

import platform
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from parlay import methods
from parlay.bench.core import Problem, Result, Say, best, interleaved
from parlay.config.recipe import Recipe
from parlay.errors import InputError

DEFAULTS: dict[str, Any] = {"dataset": "cifar10", "stages": 2, "partition": "cost"}
"""Where the benchmark differs from training: photographs, which need not lie on the disk, and stages cut by cost."""


class BenchResult(NamedTuple):
    recipe: Recipe
    """With everything that was measured or filled in."""
    rows: list[Result]


def run(recipe: Recipe, rounds: int, steps: int, say: Say, whole: bool = False) -> BenchResult:
    """Time all systems of the recipe's device; `whole`: and serial training compiled in one piece, on a GPU."""
    if methods.streams(recipe.method):
        raise InputError("bench times streaming methods beside the others anyway: write method al or penalty")
    kind = _device(recipe)
    if kind not in ("cpu", "cuda"):
        raise InputError(f"there is no benchmark on {kind}: write --device cpu")
    recipe, systems = import_module(f"parlay.bench.{kind}").systems(recipe, say, whole)
    try:
        rows = interleaved(systems, Problem(recipe.model, recipe.batch_size), rounds, steps, say)
    finally:
        for system in systems:
            system.close()
    return BenchResult(recipe, best(rows))


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
    from parlay.stage.precision import chosen_device

    return str(chosen_device(recipe.device).type)
