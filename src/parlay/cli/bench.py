"""`parlay bench`: the time of a step, by several ways to train the same network."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.exits import FINISHED
from parlay.cli.flags import add_command, add_json, add_recipe_flags, checked, given_keys, recipe_keys, whole_number
from parlay.config.keys import check
from parlay.errors import InputError

if TYPE_CHECKING:
    from parlay.cli.flags import Commands


def add(commands: Commands) -> None:
    sub = add_command(
        commands, "bench", _bench, "time per step of serial, layer-parallel, pipeline and data-parallel training"
    )
    add_recipe_flags(sub, without=("out",))
    sub.add_argument(
        "--rounds", type=whole_number, default=5, metavar="N", help="times that every system is timed (default: 5)"
    )
    sub.add_argument(
        "--steps", type=whole_number, default=5, metavar="N", help="steps of one timing, after a warm-up (default: 5)"
    )
    sub.add_argument(
        "--whole", action="store_true", help="time serial training compiled in one piece too: it takes minutes (cuda)"
    )
    sub.add_argument("--out", dest="file", metavar="FILE", help="file for the JSON object")
    add_json(sub)


def _bench(given: argparse.Namespace) -> int:
    from parlay import bench

    recipe = checked({**bench.DEFAULTS, **recipe_keys(given, None)}, given_keys(given))
    for word, value in (("rounds", given.rounds), ("steps", given.steps)):
        check(word, value, "int", {"least": 1, "most": 1_000_000})
    file = Path(given.file) if given.file else None
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InputError(f"cannot write {file}: write --out with a file in a folder that exists")
    from rich.console import Console

    from parlay.bench import core, table
    from parlay.run.records import dumps, environment, write_json

    console, load = Console(stderr=True, highlight=False), os.getloadavg()[0]
    with console.status("") as status:
        recipe, rows = bench.run(recipe, given.rounds, given.steps, status.update, given.whole)
    measured = {"rounds": given.rounds, "steps": given.steps, "cuts": recipe.partition, "spread": "quartiles"}
    about = {**environment(bench.devices(recipe)), "processor": bench.processor(), "load_before": load}
    found = core.as_json(rows, about, given.line, **measured)
    if file is not None:
        write_json(file, found)
    if given.json:
        print(dumps(found, indent=2))
    else:
        table.show(rows, Console(highlight=False, width=None if sys.stdout.isatty() else 180))
    return FINISHED
