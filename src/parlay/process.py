"""This process: its signals, its freed memory, and what the environment says about it. No torch in this module."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from parlay.errors import InputError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCHER = "PARLAY_LAUNCHER"
"""Set to its own process id by whoever starts a process and wants it to end with itself."""
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


class Interrupt:
    """Inside the context, the first Ctrl-C or SIGTERM only counts, and a second one ends the process at once.

    Outside the main thread, which alone handles signals, none is counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        return self.count > 0

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.count += 1
        self.__exit__()


def keep_freed_memory() -> None:
    """Let glibc keep the memory that this process frees. Where it is another C library, nothing changes.

    By default activations go back to the system after each step and are paged in again in the next one.
    """
    with suppress(OSError, AttributeError):
        tell = ctypes.CDLL(None).mallopt
        tell(M_MMAP_THRESHOLD, 1 << 30)
        tell(M_TRIM_THRESHOLD, (1 << 31) - 1)


def end_with_launcher() -> None:
    """To be called first: where whoever started this process wants it so, the kernel ends it with that one."""
    launcher = os.environ.pop(LAUNCHER, None)  # it is meant for this process, and not for what it starts itself
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the line above
        os._exit(1)


def prepare_cuda() -> None:
    """To be called before CUDA starts: NCCL's kernels wait for neighbours, and no other may stand behind one."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def is_rank() -> bool:
    """Has somebody (the launcher, torchrun, SLURM) made this process one of several?"""
    return "RANK" in os.environ


def rank() -> int:
    return whole_number("RANK", 0)


def world_size() -> int:
    return whole_number("WORLD_SIZE", 1)


def restarted() -> bool:
    """Is this process a later attempt at a run that was begun?"""
    return whole_number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def whole_number(variable: str, default: int) -> int:
    """The value of an environment variable."""
    text = os.environ.get(variable, "")
    if text and not (text.strip().isdecimal() and len(text) < 19):
        raise InputError(f"the environment variable {variable} is '{text[:40]}': write a whole number, or unset it")
    return int(text) if text else default


def seconds(variable: str, default: float) -> float:
    """The value of an environment variable."""
    text, value = os.environ.get(variable, ""), 0.0
    with suppress(ValueError):
        value = float(text) if text else default
    if not 0 < value < float("inf"):
        raise InputError(f"the environment variable {variable} is '{text[:40]}': write a number of seconds above 0")
    return value
