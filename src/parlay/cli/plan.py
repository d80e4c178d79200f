"""`parlay plan`: cuts, memory and expected speed-up before anything runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from parlay import methods
from parlay.cli.exits import FINISHED
from parlay.cli.flags import add_command, add_json, add_recipe_flags, given_keys, recipe_keys, with_stages

if TYPE_CHECKING:
    from parlay.cli.flags import Commands


def add(commands: Commands) -> None:
    sub = add_command(commands, "plan", _plan, "cuts, memory and expected speed-up before anything runs")
    add_recipe_flags(sub, auto=True)
    add_json(sub)


def _plan(given: argparse.Namespace) -> int:
    recipe, tried = with_stages(recipe_keys(given, None), given_keys(given))
    from parlay.plan import plan
    from parlay.run.records import dumps

    forecast = plan(recipe)
    if tried:
        forecast["tried"] = tried[1]
    if given.json:
        print(dumps(forecast, indent=2))
        return FINISHED
    of = f"{forecast['blocks']} blocks, {forecast['parameters']:,} parameters"
    print(f"{forecast['model']} on {forecast['dataset']}: {of}")
    if tried:
        print(tried[0])
    bounds = [0, *forecast["cuts"], forecast["blocks"]]
    arriving = ["the input", *("x".join(map(str, shape)) for shape in forecast["interfaces"])]
    for k, (ms, shape) in enumerate(zip(forecast["stage_ms"], arriving, strict=True)):
        print(f"  stage {k}: blocks {bounds[k]:>3} to {bounds[k + 1] - 1:>3}  {ms:8.2f} ms a step  takes {shape}")
    where = f"kept on: {forecast['store']}" if forecast["fits"] else forecast["problem"]
    what = "queues and networks beside the stages" if methods.streams(recipe.method) else "states and multipliers"
    print(f"{what}: {forecast['auxiliary_gib']:.2f} GiB, {where}")
    how = "projected from the stage times, no communication"
    if "link_gib_per_second" in forecast:
        crossing = sum(forecast["exchange_bytes"]) / (1 << 20)
        how = f"stages measured side by side, {crossing:.1f} MiB a step at {forecast['link_gib_per_second']:.1f} GiB/s"
    print(
        f"speed-up on {forecast['stages']} devices over serial training on one, by time per sample trained ({how}): "
        f"{forecast['speedup_parallel_epoch']:.2f} in a parallel epoch, {forecast['speedup']:.2f} over the schedule"
    )
    if forecast["samples_per_step"] < forecast["batch_size"]:
        print(
            f"each stage trains on {forecast['samples_per_step']:g} of {forecast['batch_size']} samples in a step: "
            f"the speed-up per step, {forecast['speedup_per_step']:.2f}, is of less work"
        )
    return FINISHED
