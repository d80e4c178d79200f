"""The flags of `parlay reproduce`, and what it does with them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parlay import process
from parlay.cli import make_parser
from parlay.cli.exits import FAILED, FINISHED, say_no
from parlay.cli.flags import Parser, add_json, checked, given_keys, number, recipe_keys, refuse_word, whole_number
from parlay.compare import Planned, Row, read_seeds
from parlay.errors import InputError
from parlay_paper import methods
from parlay_paper.queue import Queue, as_text
from parlay_paper.request import Request, read_instead, read_names

NAMES = "table1..table5|figure4..figure8"


def main(words: Sequence[str]) -> int:
    """The words behind `parlay reproduce`."""
    methods.register()
    given, unknown = parser().parse_known_args(words)
    if unknown:
        refuse_word(parser(), given, unknown[0])
    if process.is_rank():
        raise InputError("reproduce starts its processes itself: write parlay reproduce without torchrun")
    if given.queue or given.minutes is not None:
        return _serve(given)
    return _reproduce(given, shlex.join(["parlay", "reproduce", *words]))


def parser() -> Parser:
    made = Parser(prog="parlay reproduce", description="the paper's tables and figures", allow_abbrev=False)
    flag = made.add_argument
    flag("names", nargs="*", metavar=NAMES, help="what to reproduce; of several, all runs come first")
    flag("--epochs", type=whole_number, metavar="E", help="epochs of every run (default: the paper's)")
    flag("--seeds", default="0", metavar="N,N", help="every row is trained with each of them (default: 0)")
    flag("--scale", type=number, default=1.0, metavar="F", help="share of the training samples used (default: 1)")
    flag("--rows", metavar="ROW,ROW", help="only these rows, as in serial-da,sph-al-k3-1to4")
    flag("--at-once", type=whole_number, default=1, metavar="N", help="runs side by side on one GPU (default: 1)")
    flag("--recipe", metavar="FILE", help="TOML file with keys in the place of the paper's, as in model")
    flag("--data-dir", default="data", metavar="DIR", help="folder of the data sets (default: data)")
    flag("--out", default="runs/reproduce", metavar="DIR", help="folder of the results (default: runs/reproduce)")
    flag("--queue", metavar="FILE", help="TOML file of rows; the next open ones are run, each by its command")
    flag("--minutes", type=number, metavar="M", help="budget of --queue; what it cuts off can go on later")
    add_json(made)
    return made


def requests(given: argparse.Namespace) -> list[Request]:
    """What is asked for, checked: one of each name."""
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


def _reproduce(given: argparse.Namespace, line: str) -> int:
    asked = requests(given)
    from parlay.cli.train import fit_any
    from parlay.run.progress import for_terminal
    from parlay.run.records import dumps
    from parlay_paper import runs, writer

    progress = for_terminal()
    status = runs.carry_out(asked, fit_any, progress)
    written = [writer.write(request, status, line, progress.line) for request in asked]
    if given.json:
        print(dumps(written[0] if len(written) == 1 else {"reproductions": written}, indent=2))
    else:
        sys.stdout.write("\n".join((request.folder / f"{request.name}.md").read_text() for request in asked))
        print("\n" + "\n".join(f"reproduction: {request.folder}" for request in asked))
    return _ended(status, f"interrupted: the same command goes on with {given.out}")


def _serve(given: argparse.Namespace) -> int:
    """The next open rows of a queue, within a budget."""
    if not given.queue:
        raise InputError("--minutes has no estimate to go by: write --queue FILE, whose rows have their minutes")
    if given.minutes is None or given.minutes <= 0:
        raise InputError(f"minutes is {given.minutes}: write a number above 0, the budget of --queue")
    if given.at_once < 1:
        raise InputError(f"at-once is {given.at_once}: write a number of at least 1")
    for name in ("names", "epochs", "seeds", "scale", "recipe", "out"):
        if getattr(given, name) not in ([], parser().get_default(name)):
            raise InputError(f"{name} stands in the commands of the queue: leave it out beside --queue")
    queue = Queue(Path(given.queue))
    chosen = queue.chosen(read_names(given.rows), given.minutes)
    from parlay.run.progress import for_terminal
    from parlay.run.records import dumps
    from parlay_paper import runs

    planned = [_planned(name, queue.entries[name].command, given.data_dir) for name in chosen]
    status = runs.serve(queue, planned, given.minutes, given.at_once, for_terminal())
    rows = queue.standing(planned)
    print(dumps({"status": status, "rows": rows}, indent=2) if given.json else as_text(rows))
    return _ended(status, "interrupted: the same command goes on")


def _ended(status: str, interrupted: str) -> int:
    if status == "interrupted":
        return say_no(interrupted, FAILED)
    return FINISHED if status == "finished" else FAILED


def _planned(name: str, command: str, data_dir: str) -> Planned:
    """The run that a row's command makes."""
    from parlay_paper import runs

    try:
        words = shlex.split(command)
        if words[:2] == ["parlay", "train"]:
            given = make_parser().parse_args(words[1:])
            recipe = checked(recipe_keys(given, None), given_keys(given))
            if recipe.out is None:
                raise InputError("its command has no run folder: write --out DIR")
            found = [runs.as_it_was(Planned(Row(name, {}), replace(recipe, out=None), Path(recipe.out)))]
        elif words[:2] == ["parlay", "reproduce"]:
            asked = requests(parser().parse_args(words[2:]))
            found = [one for request in asked for one in runs.planned_runs(request, request.selected)]
        else:
            raise InputError(f"the command is '{command}': write one of parlay reproduce or parlay train")
        if len(found) != 1:
            raise InputError(
                f"its command makes {len(found)} runs: write that of a single one, as with --rows serial-da"
            )
    except (InputError, ValueError) as error:
        raise InputError(f"{name}: {error}") from None
    return replace(found[0], row=Row(name, {}), recipe=replace(found[0].recipe, data_dir=data_dir))
