"""Which kind of store fits: bytes needed against bytes free on the device, on the host and on disk."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from parlay.errors import InputError

KINDS = ("device", "host", "file")  # the fastest first
DEVICE_RESERVE = 0.3  # of the GPU's memory, for weights, activations and CUDA graphs of the training itself
HOST_RESERVE = 0.2  # of the memory that is available, for the data set, the workers and everybody else


@dataclass(frozen=True)
class Free:
    """Bytes that stores may take in each place; what the training itself needs is already taken off."""

    device: int
    host: int
    disk: int


def free_space(device: torch.device, folder: Path) -> Free:
    """What is free now. On the CPU the device's memory is the host's."""
    host = int((1 - HOST_RESERVE) * _host_free())
    on_device = host
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        on_device = max(0, free - int(DEVICE_RESERVE * total))
    return Free(on_device, host, disk_free(folder))


def place(
    kind: str, needed: int, device: torch.device, folder: Path, free: Free | None = None, together: int | None = None
) -> str:
    """The kind of store that holds `needed` bytes: the one asked for, or with "auto" the first of `KINDS` that fits.

    `together`: what all processes of this host need, which share its memory and its disk.
    """
    if kind not in ("auto", *KINDS):
        raise InputError(f"no store on {kind!r}: write one of auto, {', '.join(KINDS)}")
    free = free or free_space(device, folder)
    room = {"device": free.device, "host": free.host, "file": free.disk}
    if together:  # the part of this process
        shared = [kind for kind in room if kind != "device" or device.type == "cpu"]
        room |= {kind: room[kind] * needed // together for kind in shared}
    asked = KINDS if kind == "auto" else (kind,)
    for candidate in asked:
        if needed <= room[candidate]:
            return candidate
    where = {"auto": "anywhere", "device": "on the device", "host": "on the host", "file": "in a file"}[kind]
    raise InputError(
        f"the stores need {size(needed)} and do not fit {where}: free for them are {size(free.device)} on the device, "
        f"{size(free.host)} on the host, {size(free.disk)} on disk at {folder}; {_advice(needed, room, asked)}"
    )


def _advice(needed: int, room: dict[str, int], asked: tuple[str, ...]) -> str:
    """Only what would really fit: each flag added alone to those of the run, or else all of them together."""
    fitting = [f"--store {kind}" for kind in KINDS if needed <= room[kind]]
    most = max(room[kind] for kind in asked)
    if needed <= 2 * most:
        fitting.append("--store-dtype bfloat16 (half of float32)")
    if needed <= 4 * most:
        fitting.append("--downsample 2 (a quarter)")
    if not fitting and needed <= 8 * max(room.values()):
        fitting.append("--store auto --store-dtype bfloat16 --downsample 2 (an eighth of float32)")
    if not fitting:
        fitting = ["--method serial, which stores no states", "fewer --stages", "--out on a larger disk"]
    return "write " + ", or ".join(fitting)


def size(count: int) -> str:
    """Bytes for people: exact, and in GiB."""
    return f"{count:,} bytes ({count / 2**30:.2f} GiB)"


def disk_free(path: Path) -> int:
    """At `path`, or where it will be made."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _host_free() -> int:
    return min([_memory_available(), *_cgroup_rooms()])


def _memory_available() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_rooms(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Limit less use of this process's control group (version 2) and of all above it; empty where there are none."""
    with contextlib.suppress(OSError):
        inner = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "/")
        group = root / inner.strip("/")
        groups = [group, *(above for above in group.parents if above.is_relative_to(root))]
        return [room for room in map(_cgroup_room, groups) if room is not None]
    return []


def _cgroup_room(group: Path) -> int | None:
    try:
        limit = int((group / "memory.max").read_text())  # the word "max", where there is none, is a ValueError
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files that nobody uses count as used, but are given up on demand.
        return max(0, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
