"""`parlay reproduce`: a table or figure of the paper."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.exits import FAILED, FINISHED, say_no
from parlay.cli.flags import add_command, add_json, number, whole_number
from parlay.cli.train import fit_any
from parlay.errors import InputError
from parlay.launch import places

if TYPE_CHECKING:
    from parlay.cli.flags import Commands

NAMES = "table1..table5|figure4..figure8"


def add(commands: Commands) -> None:
    sub = add_command(commands, "reproduce", _reproduce, "the paper's tables and figures")
    sub.add_argument("names", nargs="+", metavar=NAMES, help="what to reproduce; of several, all runs come first")
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
    add_json(sub)


def _reproduce(given: argparse.Namespace) -> int:
    if places.is_worker():
        raise InputError("reproduce starts its processes itself: write parlay reproduce without torchrun")
    from parlay.compare import read_seeds
    from parlay.reproduce.request import Request, read_instead, read_names

    if given.rows and len(given.names) > 1:
        raise InputError("rows belong to one table: write a single name, or leave --rows out")
    instead, of_kind = read_instead(Path(given.recipe)) if given.recipe else ({}, {})
    requests = [
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
    from parlay.progress import for_terminal
    from parlay.records import dumps
    from parlay.reproduce import runs, writer

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
