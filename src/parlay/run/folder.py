"""The run folder, while a run has it for itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parlay.engine.world import World
from parlay.errors import InputError
from parlay.files import FolderLock, scratch_folder


@contextmanager
def claimed(out: Path | None, world: World) -> Iterator[Path]:
    """`out`, for this run alone; without one, a passing place for what does not fit into memory."""
    if out is None:
        with scratch_folder() as scratch:
            yield scratch
    elif world.size > 1:
        with _shared_folder(out, world):
            yield out
    else:
        with FolderLock(out):
            yield out


@contextmanager
def _shared_folder(out: Path, world: World) -> Iterator[None]:
    """The leader holds the lock; the others must see its folder, because each writes its part of a checkpoint there."""
    lock = FolderLock(out)
    world.by_leader(lambda: lock.__enter__() and None)
    try:
        mark = world.by_leader(lambda: lock.path.read_text())
        seen = world.gather(lambda: _appears(lock.path, mark))
        if not all(seen):
            raise InputError(
                f"{out} is not the same folder on all hosts (process {seen.index(False)} does not see it): "
                "write --out on a file system that they share"
            )
        yield
    finally:
        if world.leads:
            lock.__exit__(None, None, None)


def _appears(path: Path, text: str) -> bool:
    """Is this what the file says? A network file system may show it some seconds late."""
    until = time.monotonic() + 3
    while not (path.exists() and path.read_text() == text):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
