"""How a command ends: exit codes, and the one line on standard error that says why."""

from __future__ import annotations

import sys

from parlay import process
from parlay.launch import rank

FINISHED, FAILED, WRONG = 0, 1, 2
EXIT_CODES = {"finished": FINISHED, "interrupted": FAILED, "diverged": FAILED, "failed": FAILED}


class OutOfMemory(Exception):
    """With what would take less."""


def say_no(line: str, code: int, error: BaseException | None = None) -> int:
    line = " ".join(line.split())
    if process.is_rank():
        rank.leave(rank.ExitReport(code, message=line, lost=rank.is_of_another(error)))
    else:
        print(f"parlay: {line}", file=sys.stderr)
    return code
