"""`--stages auto`: some numbers of stages, cut by cost and timed as training would run them; the fastest is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parlay.bench.core import LAYER_PARALLEL, Problem, Result, Say, interleaved
from parlay.bench.cuda import STAGES, EngineSystem, blocks
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.stage.precision import chosen_device

ROUNDS, STEPS = 3, 20


def check(recipe: Recipe) -> None:
    """Before anything is measured: is there something to choose from?"""
    if recipe.method == "serial":
        raise InputError("serial training is not cut: leave --stages auto out")
    if recipe.partition not in ("even", "cost"):
        raise InputError(f"the cuts {recipe.partition} fix the number of stages: leave them or --stages auto out")
    if chosen_device(recipe.device).type != "cuda":
        raise InputError("--stages auto times steps on a GPU, and this run has none: write a number, as in --stages 3")
    if recipe.engine == "distributed":
        raise InputError("--stages auto is for one process: write as many stages as there are devices")


def tried(recipe: Recipe, say: Say, rounds: int = ROUNDS, steps: int = STEPS) -> list[Result]:
    """In the order of their number of stages."""
    recipe = replace(recipe, schedule="parallel", engine="in-process", partition="cost")
    counts = [k for k in STAGES if k <= blocks(recipe)]
    systems = [EngineSystem(LAYER_PARALLEL, replace(recipe, stages=k), f"K = {k}") for k in counts]
    try:
        return interleaved(systems, Problem(recipe.model, recipe.batch_size), rounds, steps, say)
    finally:
        for system in systems:
            system.close()


def chosen(recipe: Recipe, results: Sequence[Result]) -> Recipe:
    """The recipe with the fastest number of stages, and the cuts that were timed."""
    best = min(results, key=lambda one: one.step_ms)
    return replace(recipe, stages=best.stages, partition=",".join(map(str, best.extra["cuts"])))


def told(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For `plan`: what was tried."""
    return [{"stages": one.stages, "step_ms": one.step_ms, "cuts": one.extra["cuts"]} for one in results]


def line(results: Sequence[Result]) -> str:
    return "stages auto: " + ", ".join(f"K = {one.stages} {one.step_ms:.2f} ms" for one in results) + " a step"
