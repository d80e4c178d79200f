"""`parlay reproduce`: the door to the reproduction of the paper, a package of its own beside this one."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from parlay.errors import InputError

if TYPE_CHECKING:
    from parlay.cli.flags import Commands


def add(commands: Commands) -> None:
    """All its words, flags too, are for that package, which knows them."""
    sub = commands.add_parser("reproduce", help="the paper's tables and figures", add_help=False, prefix_chars="\0")
    sub.add_argument("words", nargs="*")
    sub.set_defaults(run=_reproduce, parser=sub)


def _reproduce(given: argparse.Namespace) -> int:
    return int(room("command").main(given.words))


def room(name: str) -> Any:
    """A module of that package."""
    if find_spec("parlay_paper") is None:
        raise InputError(
            "the reproduction of the paper is not in the wheel: in a checkout of Parlay `make` installs it, or write "
            "pip install -e paper there"
        )
    return import_module(f"parlay_paper.{name}")
