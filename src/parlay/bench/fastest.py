"""`--stages auto`: some numbers of stages, cut by cost and timed as training would run them; the fastest is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parlay.bench.core import LAYER_PARALLEL, Problem, Row, Say, interleaved
from parlay.bench.cuda import STAGES, Engined
from parlay.errors import InputError
from parlay.recipe import Recipe
from parlay.run.setup import set_up
from parlay.trainer import spread

ROUNDS, STEPS = 3, 20


def check(recipe: Recipe) -> None:
    """Before anything is measured: is there something to choose from?"""
    if recipe.method == "serial":
        raise InputError("serial training is not cut: leave --stages auto out")
    if recipe.partition not in ("even", "cost"):
        raise InputError(f"the cuts {recipe.partition} fix the number of stages: leave them or --stages auto out")
    if spread(recipe.device, 1)[0].type != "cuda":
        raise InputError("--stages auto times steps on a GPU, and this run has none: write a number, as in --stages 3")
    if recipe.engine == "distributed":
        raise InputError("--stages auto is for one process: write as many stages as there are devices")


def tried(recipe: Recipe, say: Say, rounds: int = ROUNDS, steps: int = STEPS) -> list[Row]:
    """The timed rows, in the order of their number of stages."""
    recipe = replace(recipe, schedule="parallel", engine="in-process", partition="cost")
    blocks = len(set_up(replace(recipe, stages=1, partition="even")).partition.model)
    systems = [Engined(LAYER_PARALLEL, replace(recipe, stages=k), f"K = {k}") for k in STAGES if k <= blocks]
    try:
        return interleaved(systems, Problem(recipe.model, recipe.batch_size), rounds, steps, say)
    finally:
        for system in systems:
            system.close()


def chosen(recipe: Recipe, rows: Sequence[Row]) -> Recipe:
    """The recipe with the fastest number of stages, and the cuts that were timed."""
    best = min(rows, key=lambda row: row.step_ms)
    return replace(recipe, stages=best.stages, partition=",".join(map(str, best.extra["cuts"])))


def told(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For `plan`: what was tried."""
    return [{"stages": row.stages, "step_ms": row.step_ms, "cuts": row.extra["cuts"]} for row in rows]


def line(rows: Sequence[Row]) -> str:
    return "stages auto: " + ", ".join(f"K = {row.stages} {row.step_ms:.2f} ms" for row in rows) + " a step"
