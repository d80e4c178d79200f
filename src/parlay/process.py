"""This process: its signals, its freed memory, and what the environment says about it. No torch in this module."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from parlay.errors import InputError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FOR_NCCL = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # its kernels wait for neighbours: no other may stand behind one
LAUNCHER = "PARLAY_LAUNCHER"
"""Set to its own process id by whoever starts a process and wants it to end with itself."""
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


class Interrupt:
    """Inside the context, `requested()` says whether Ctrl-C or SIGTERM has come; a second one ends the process at once.

    Outside the main thread, which alone can handle signals, it never says so.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        return self._came

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._came = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def keep_freed_memory() -> None:
    """Let glibc keep the memory that this process frees. Where it is another C library, nothing changes.

    By default activations go back to the system after each step and are paged in again in the next one.
    """
    with contextlib.suppress(OSError, AttributeError):
        tell = ctypes.CDLL(None).mallopt
        tell(M_MMAP_THRESHOLD, 1 << 30)
        tell(M_TRIM_THRESHOLD, (1 << 31) - 1)


def end_with_launcher() -> None:
    """To be called first: where whoever started this process wants it so, it ends with that one, however that ends."""
    launcher = os.environ.pop(LAUNCHER, None)  # it is meant for this process, and not for what it starts itself
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # by the kernel, when the parent dies
    if os.getppid() != int(launcher):  # it died before the line above
        os._exit(1)


def prepare_cuda() -> None:
    """Set what CUDA reads when it starts, in a process that trains one of several stages. What is set already stays."""
    for name, value in FOR_NCCL.items():
        os.environ.setdefault(name, value)


def is_rank() -> bool:
    """Has somebody (the launcher, torchrun, SLURM) made this process one of several?"""
    return "RANK" in os.environ


def rank() -> int:
    """Of this process; 0 where there is only one."""
    return whole_number("RANK", 0)


def world_size() -> int:
    return whole_number("WORLD_SIZE", 1)


def restarted() -> bool:
    """Is this process a later attempt at a run that was begun?"""
    return whole_number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def whole_number(variable: str, default: int) -> int:
    """The value of an environment variable."""
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.strip().isdecimal() or len(text) > 18:
        raise InputError(f"the environment variable {variable} is '{text[:40]}': write a whole number, or unset it")
    return int(text)


def seconds(variable: str, default: float) -> float:
    """The value of an environment variable."""
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"the environment variable {variable} is '{text[:40]}': write a number of seconds above 0")
    return value
