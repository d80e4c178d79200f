"""`parlay data`: list, fetch and check the data sets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.exits import FINISHED
from parlay.cli.flags import add_command, add_json
from parlay.config.datasets import DATASETS, FACTS
from parlay.config.keys import nearest, said
from parlay.errors import InputError

if TYPE_CHECKING:
    from parlay.cli.flags import Commands


def add(commands: Commands) -> None:
    sub = add_command(commands, "data", _data, "list, fetch, check the data sets")
    sub.add_argument("what", metavar="list|fetch|check")
    sub.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DATASETS))
    sub.add_argument("--data-dir", default="data", metavar="DIR", help="folder of the data sets (default: data)")
    add_json(sub, "with list and check: one JSON object")


def _data(given: argparse.Namespace) -> int:
    doings = {"list": _data_list, "fetch": _data_fetch, "check": _data_check}
    if given.what not in doings:
        raise InputError(f"unknown word '{said(given.what)}': write parlay data {nearest(given.what, doings)}")
    return doings[given.what](given)


def _data_list(given: argparse.Namespace) -> int:
    if given.json:
        sizes = {
            name: {"shape": f.shape, "classes": f.classes, "train": f.train_size, "test": f.test_size}
            for name, f in FACTS.items()
        }
        print(json.dumps(sizes))
        return FINISHED
    for name, f in FACTS.items():
        shape = "x".join(map(str, f.shape))
        how_many = f"{f.train_size:>6} training and {f.test_size:>6} test samples"
        print(f"{name:<10} {how_many}, {shape:<8}, {f.classes:>3} classes")
    return FINISHED


def _data_fetch(given: argparse.Namespace) -> int:
    names = _names(given)
    from parlay import data

    for name in names:
        data.fetch(name, Path(given.data_dir), _show_bytes)
        print(data.check(name, Path(given.data_dir)))
    return FINISHED


def _data_check(given: argparse.Namespace) -> int:
    names = _names(given)
    from parlay import data

    found = {name: data.check(name, Path(given.data_dir)) for name in names}
    print(json.dumps(found) if given.json else "\n".join(found.values()))
    return FINISHED


def _names(given: argparse.Namespace) -> list[str]:
    found: list[str] = given.names
    for name in found:
        if name not in DATASETS:
            raise InputError(f"unknown data set '{said(name)}': write one of {', '.join(DATASETS)}")
    if not found:
        raise InputError(f"no data set named: write one or more of {', '.join(DATASETS)}")
    return found


def _show_bytes(name: str, done: int, total: int | None) -> None:
    if sys.stderr.isatty():
        share = f"{done / total:4.0%} of {total / 1e6:.0f} MB" if total else f"{done / 1e6:.0f} MB"
        print(f"\r{name}: {share}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        print(f"{name}: {done / 1e6:.0f} MB", file=sys.stderr)
