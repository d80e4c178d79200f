"""Faults on demand, to test what a run does when one comes: `PARLAY_FAULT=stage1:step37:kill`.

    stageS   the stage that it strikes; with all stages in one process, that process
    stepN    the step, counted through all epochs from 0
    kill     SIGKILL to itself              stop   SIGSTOP to itself
    exit     end with exit code 3           hang   sleep for ever
    slow     from there on every step takes SLOWER seconds more
    nan      the stage's loss of that step is not a number

A fourth word says where in the step: `step` (before it, the default), `exchange` (between two communications) or
`save` (within a checkpoint, this process's part being written and the whole not yet valid).
A run that was restarted is left in peace. Unset, it costs a comparison with None.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parlay.errors import InputError
from parlay.process import restarted

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "PARLAY_FAULT"
KINDS = ("kill", "stop", "slow", "nan", "exit", "hang")
POINTS = ("step", "exchange", "save")
EXIT_CODE = 3  # none of those that a run ends with by itself
SLOWER = 0.2  # seconds: many times a step of the small networks of the tests

_FORM = re.compile(r"stage(\d{1,9}):step(\d{1,9}):([a-z]+)(?::([a-z]+))?")


@dataclass(frozen=True)
class Fault:
    """One fault: whom, when, what, and at which point of a step."""

    stage: int
    step: int
    kind: str
    point: str = "step"


def parse(text: str) -> Fault:
    found = _FORM.fullmatch(text)
    if found is None:
        raise InputError(f"{VARIABLE} is '{text}': write it as in stage1:step37:kill")
    stage, step, kind, point = found[1], found[2], found[3], found[4] or "step"
    if kind not in KINDS:
        raise InputError(f"unknown fault '{kind}' in {VARIABLE}: write one of {', '.join(KINDS)}")
    if point not in POINTS:
        raise InputError(f"unknown point '{point}' in {VARIABLE}: write one of {', '.join(POINTS)}")
    if kind in ("slow", "nan") and point != "step":
        raise InputError(f"the fault '{kind}' has no point '{point}' in {VARIABLE}: leave the point out")
    return Fault(int(stage), int(step), kind, point)


def from_environment() -> Fault | None:
    """The fault asked for; None in a run that was restarted after one."""
    text = os.environ.get(VARIABLE)
    return parse(text) if text and not restarted() else None


_fault: Fault | None = None
_step = -1


def arm(stages: int) -> None:
    """Take the fault from the environment, for a run of so many stages."""
    global _fault, _step
    _fault, _step = from_environment(), -1
    if _fault is not None and _fault.stage >= stages:
        raise InputError(
            f"{VARIABLE} is for stage {_fault.stage} and the last of {stages} stages is {stages - 1}: write that one"
        )


def reach(step: int | None, stages: Collection[int], point: str = "step") -> None:
    """This process, with these stages, has come to that point of a step; None for the step it is in."""
    global _step
    if _fault is None:
        return
    _step = _step if step is None else step
    if _fault.stage not in stages or _fault.point != point:
        return
    if _fault.kind == "slow" and _step >= _fault.step:
        time.sleep(SLOWER)
    elif _step == _fault.step:
        _strike(_fault.kind)


def spoil(stage: int, loss: Tensor) -> Tensor:
    """The loss of a stage in this step; not a number where the fault wants it so."""
    if _fault is not None and (_fault.kind, _fault.stage, _fault.step) == ("nan", stage, _step):
        return loss * float("nan")
    return loss


def _strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exit":
        os._exit(EXIT_CODE)
    while kind == "hang":
        time.sleep(3600)
