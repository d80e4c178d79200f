"""`parlay compare`: the same work by several methods."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay import methods, process
from parlay.cli.exits import FAILED, FINISHED, say_no
from parlay.cli.flags import add_command, add_json, add_recipe_flags, given_keys
from parlay.cli.train import fit_any
from parlay.config.recipe import make_recipe, read_recipe
from parlay.errors import InputError

if TYPE_CHECKING:
    from parlay.cli.flags import Commands


def add(commands: Commands) -> None:
    sub = add_command(commands, "compare", _compare, "the same work by several methods, one table")
    sub.add_argument(
        "--methods",
        metavar="ROWS",
        help="methods, each with keys of its own, as in serial,al,al:downsample=2:schedule=tail:4:1 (default: all)",
    )
    sub.add_argument("--seeds", metavar="N,N", help="every row is trained with each of them (default: 0)")
    sub.add_argument("--report", action="store_true", help="write report.html into the folder at the end")
    file = "TOML file with the same keys, methods and seeds as lists; flags win"
    add_recipe_flags(sub, without=("method", "seed"), file=file)
    add_json(sub)


def _compare(given: argparse.Namespace) -> int:
    if process.is_rank():
        raise InputError("compare starts its processes itself: write parlay compare without torchrun")
    more = ("methods", "seeds", *methods.every_option())
    base = read_recipe(Path(given.recipe), more) if given.recipe else {}
    asked = given.methods or _joined("methods", base.pop("methods", None)) or ",".join(methods.names())
    seeds = given.seeds or _joined("seeds", base.pop("seeds", None)) or str(base.get("seed", 0))
    keys = {**base, **given_keys(given)}
    common = make_recipe(keys, {"method": "serial"})  # refuses what is wrong in any row
    from parlay import compare

    rows, numbers = compare.read_rows(asked), compare.read_seeds(seeds)
    out = Path(common.out) if common.out else Path("runs") / f"compare-{common.dataset}-{common.model}"
    planned = compare.plan(rows, numbers, keys, out)
    from parlay import report
    from parlay.report import tables
    from parlay.run.progress import for_terminal
    from parlay.run.records import dumps, write_json

    status = compare.carry_out(planned, fit_any, for_terminal())
    folders, found = compare.there(planned), compare.table(planned)
    about = {name: getattr(common, name) for name in ("dataset", "model", "epochs", "batch_size")}
    told = {"status": status, **about, "seeds": numbers, "command": given.line, "rows": found}
    if folders:
        write_json(out / "comparison.json", told)
    if folders and given.report:
        title = f"{common.model} on {common.dataset}, by several methods"
        report.write(folders, out / "report.html", title, timed=True)
    if given.json:
        print(dumps(told, indent=2))
    elif folders:
        report.show({one.folder: one.row.text for one in planned if one.folder in folders}, timed=True)
        if given.report:
            tables.say(f"report: {out / 'report.html'}")
    if status == "interrupted":
        return say_no(f"interrupted: the same command goes on with {out}", FAILED)
    return FINISHED if status == "finished" else FAILED


def _joined(name: str, value: Any) -> str:
    """A list of a recipe as the flag would have it."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InputError(f"{name} is {value!r} in the recipe: write a list, as in ['serial', 'al'] or [0, 1]")
    return ",".join(map(str, value))
