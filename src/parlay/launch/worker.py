"""The side of a process that another one has started: it ends when that one does; a rank also says how it ended."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from parlay import process
from parlay.errors import StageLost
from parlay.launch import heartbeat

FOLDER = "PARLAY_LAUNCH"
"""Set by the launcher: the folder that it shares with its ranks."""


@dataclass(frozen=True)
class Word:
    """How a rank ended, in its own words."""

    code: int
    """What it exits with."""
    status: str = ""
    """Of the run; empty where it ended in an error."""
    error: str = ""
    lost: bool = False
    """The error is that another rank was gone, or was raised there first."""

    @property
    def orderly(self) -> bool:
        return bool(self.status)


def supervised() -> bool:
    """Is this process a rank of the launcher?"""
    return FOLDER in os.environ


def begin(ranks: int) -> None:
    """To be called in a rank before it trains, and before it touches a GPU."""
    process.prepare_cuda()
    if supervised():
        heartbeat.start(Path(os.environ[FOLDER]), process.rank(), ranks)


def leave(word: Word) -> None:
    """Tell the launcher; where there is none, an error goes to standard error, with the rank."""
    if supervised():
        path = Path(os.environ[FOLDER]) / f"rank-{process.rank()}.json"
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(word)))
        scratch.replace(path)
    elif word.error:
        print(f"parlay: rank {os.environ.get('RANK', 0)}: {word.error}", file=sys.stderr)


def heard(folder: Path, rank: int) -> Word | None:
    """What a rank that has ended left behind."""
    try:
        return Word(**json.loads((folder / f"rank-{rank}.json").read_text()))
    except FileNotFoundError:
        return None


def is_of_another(error: BaseException | None) -> bool:
    """Is another rank to blame? One that raises the error of another has a note with that one's rank."""
    of = [note for note in getattr(error, "__notes__", ()) if note.startswith("rank ")]
    return isinstance(error, StageLost) or (bool(of) and f"rank {os.environ.get('RANK', 0)}" not in of)


def end(code: int) -> NoReturn:
    """At once: the destructors of communication with lost processes may wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
