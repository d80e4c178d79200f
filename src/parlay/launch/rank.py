"""A rank's own side: its position among the others, its heartbeat, and the report that it leaves at its exit."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from parlay import process, signs
from parlay.errors import InputError, StageLost
from parlay.launch.heartbeat import BeatFile, Heartbeat

HEARTBEATS = "PARLAY_HEARTBEATS"
"""Set by the launcher: the file that it reads the heartbeats from."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by the launcher, and by torchrun, which prints the message of the earliest report."""


@dataclass(frozen=True)
class Position:
    """One process among stages x replicas."""

    rank: int
    stages: int
    replicas: int = 1

    @property
    def stage(self) -> int:
        """Replicas of a stage have ranks beside each other: they average gradients at every step."""
        return self.rank // self.replicas

    @property
    def replica(self) -> int:
        return self.rank % self.replicas

    def __str__(self) -> str:
        replica = f", replica {self.replica} of {self.replicas}" if self.replicas > 1 else ""
        return f"stage {self.stage} of {self.stages}{replica}"


@dataclass(frozen=True)
class ExitReport:
    """How a rank ended, as it says itself."""

    code: int
    """What it exits with."""
    status: str = ""
    """Of the run; empty where it ended in an error."""
    message: str = ""
    lost: bool = False
    """The error is that another rank was gone, or was raised there first."""
    timestamp: int = field(default_factory=lambda: int(time.time()), compare=False)


def check_world(stages: int, replicas: int) -> None:
    """A world size that was given must be that of the recipe."""
    needed = stages * replicas
    given = process.whole_number("WORLD_SIZE", needed)
    if given != needed:
        product = f"{stages} stages" if replicas == 1 else f"{stages} stages x {replicas} replicas"
        hint = f", or write --stages {given // replicas}" if given % replicas == 0 else ""
        raise InputError(f"WORLD_SIZE is {given} and {product} need {needed}: start {needed} processes{hint}")


def supervised() -> bool:
    """Is this process a rank of the launcher?"""
    return HEARTBEATS in os.environ


def begin(stages: int, replicas: int) -> None:
    """To be called in a rank before it trains, and before it touches a GPU."""
    check_world(stages, replicas)
    process.prepare_cuda()
    if supervised():
        with suppress(OSError):  # standard error may be closed
            os.dup2(2, 1)  # the launcher's standard output is for the result
        signs.listen(Heartbeat(BeatFile(Path(os.environ[HEARTBEATS]), stages * replicas), process.rank()))


def leave(report: ExitReport) -> None:
    """Tell whoever started this rank; without the launcher an error goes to standard error too, with the rank."""
    if path := os.environ.get(ERROR_FILE):
        scratch = Path(path).with_suffix(".new")
        scratch.write_text(json.dumps(asdict(report)))
        scratch.replace(path)
    if report.message and not supervised():
        print(f"parlay: rank {os.environ.get('RANK', 0)}: {report.message}", file=sys.stderr)


def read_report(path: Path) -> ExitReport | None:
    """What a rank that has ended left behind."""
    try:
        return ExitReport(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def is_of_another(error: BaseException | None) -> bool:
    """Is another rank the cause? One that raises the error of another has a note with that one's rank."""
    of = [note for note in getattr(error, "__notes__", ()) if note.startswith("rank ")]
    return isinstance(error, StageLost) or (bool(of) and f"rank {os.environ.get('RANK', 0)}" not in of)


def end(code: int) -> NoReturn:
    """At once: the destructors of communication with lost processes may wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
