"""`parlay reproduce`: a table or figure of the paper."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.exits import FAILED, FINISHED, say_no
from parlay.cli.flags import add_command, add_json, given_keys, number, recipe_keys, whole_number
from parlay.cli.train import fit_any
from parlay.errors import InputError
from parlay.launch import places
from parlay.recipe import make_recipe

if TYPE_CHECKING:
    from parlay.cli.flags import Commands
    from parlay.compare import Planned
    from parlay.reproduce.request import Request

NAMES = "table1..table5|figure4..figure8"


def add(commands: Commands) -> None:
    sub = add_command(commands, "reproduce", _reproduce, "the paper's tables and figures")
    sub.add_argument("names", nargs="*", metavar=NAMES, help="what to reproduce; of several, all runs come first")
    sub.add_argument("--epochs", type=whole_number, metavar="E", help="epochs of every run (default: the paper's)")
    sub.add_argument("--seeds", default="0", metavar="N,N", help="every row is trained with each of them (default: 0)")
    sub.add_argument(
        "--scale", type=number, default=1.0, metavar="F", help="share of the training samples used (default: 1)"
    )
    sub.add_argument("--rows", metavar="ROW,ROW", help="only these rows, as in serial-da,sph-al-k3-1to4")
    sub.add_argument(
        "--at-once", type=whole_number, default=1, metavar="N", help="runs side by side on one GPU (default: 1)"
    )
    sub.add_argument("--recipe", metavar="FILE", help="TOML file with keys in the place of the paper's, as in model")
    sub.add_argument("--data-dir", default="data", metavar="DIR", help="folder of the data sets (default: data)")
    sub.add_argument(
        "--out", default="runs/reproduce", metavar="DIR", help="folder of all reproductions (default: runs/reproduce)"
    )
    sub.add_argument(
        "--queue", metavar="FILE", help="TOML file of rows; the next open ones are run, each by its command"
    )
    sub.add_argument("--minutes", type=number, metavar="M", help="budget of --queue; what it cuts off can go on later")
    add_json(sub)


def _reproduce(given: argparse.Namespace) -> int:
    if places.is_worker():
        raise InputError("reproduce starts its processes itself: write parlay reproduce without torchrun")
    if given.queue or given.minutes is not None:
        return _serve(given)
    requests = _requests(given)
    from parlay.reproduce import runs, writer
    from parlay.run.progress import for_terminal
    from parlay.run.records import dumps

    progress = for_terminal()
    status = runs.carry_out(requests, fit_any, progress)
    told = [writer.write(request, status, given.line, progress.line) for request in requests]
    if given.json:
        print(dumps(told[0] if len(told) == 1 else {"reproductions": told}, indent=2))
    else:
        tables = [(request.folder / f"{request.name}.md").read_text() for request in requests]
        sys.stdout.write("\n".join(tables))
        print("\n" + "\n".join(f"reproduction: {request.folder}" for request in requests))
    if status == "interrupted":
        return say_no(f"interrupted: the same command goes on with {given.out}", FAILED)
    return FINISHED if status == "finished" else FAILED


def _requests(given: argparse.Namespace) -> list[Request]:
    """What is asked for, checked: one of each name."""
    from parlay.compare import read_seeds
    from parlay.reproduce.request import Request, read_instead, read_names

    if not given.names:
        raise InputError(f"nothing is named: write one of {NAMES}")
    if given.rows and len(given.names) > 1:
        raise InputError("rows belong to one table: write a single name, or leave --rows out")
    instead, of_kind = read_instead(Path(given.recipe)) if given.recipe else ({}, {})
    return [
        Request(
            name,
            Path(given.out),
            tuple(read_seeds(given.seeds)),
            given.epochs,
            given.scale,
            given.data_dir,
            read_names(given.rows),
            given.at_once,
            instead,
            of_kind,
        )
        for name in dict.fromkeys(given.names)
    ]


def _serve(given: argparse.Namespace) -> int:
    """The next open rows of a queue, within a budget."""
    from parlay.reproduce.queue import Queue, as_text
    from parlay.reproduce.request import read_names

    if not given.queue:
        raise InputError("--minutes has no estimate to go by: write --queue FILE, whose rows have their minutes")
    if given.minutes is None or given.minutes <= 0:
        raise InputError(f"minutes is {given.minutes}: write a number above 0, the budget of --queue")
    if given.at_once < 1:
        raise InputError(f"at-once is {given.at_once}: write a number of at least 1")
    for name in ("names", "epochs", "seeds", "scale", "recipe", "out"):
        if getattr(given, name) not in ([], given.parser.get_default(name)):
            raise InputError(f"{name} stands in the commands of the queue: leave it out beside --queue")
    queue = Queue(Path(given.queue))
    chosen = queue.chosen(read_names(given.rows), given.minutes)
    from parlay.reproduce import runs
    from parlay.run.progress import for_terminal
    from parlay.run.records import dumps

    planned = [_planned(name, queue.entries[name].command, given.data_dir) for name in chosen]
    status = runs.serve(queue, planned, given.minutes, given.at_once, for_terminal())
    told = queue.standing(planned)
    print(dumps({"status": status, "rows": told}, indent=2) if given.json else as_text(told))
    if status == "interrupted":
        return say_no("interrupted: the same command goes on", FAILED)
    return FINISHED if status == "finished" else FAILED


def _planned(name: str, command: str, data_dir: str) -> Planned:
    """The run that a row's command makes."""
    from parlay.cli import make_parser
    from parlay.compare import Planned, Row
    from parlay.reproduce import runs
    from parlay.reproduce.request import selected

    try:
        words = shlex.split(command)
        if words[:1] != ["parlay"] or words[1:2] not in (["reproduce"], ["train"]):
            raise InputError(f"the command is '{command}': write one of parlay reproduce or parlay train")
        given = make_parser().parse_args(words[1:])
        if words[1] == "train":
            recipe = make_recipe(recipe_keys(given, None), given_keys(given))
            if recipe.out is None:
                raise InputError("its command has no run folder: write --out DIR")
            planned = [runs.as_it_was(Planned(Row(name, {}), replace(recipe, out=None), Path(recipe.out)))]
        else:
            planned = [one for request in _requests(given) for one in runs.planned_runs(request, selected(request))]
        if len(planned) != 1:
            raise InputError(
                f"its command makes {len(planned)} runs: write that of a single one, as with --rows serial-da"
            )
    except (InputError, ValueError) as error:
        raise InputError(f"{name}: {error}") from None
    return replace(planned[0], row=Row(name, {}), recipe=replace(planned[0].recipe, data_dir=data_dir))
