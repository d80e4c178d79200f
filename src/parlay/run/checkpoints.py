"""The folder of checkpoints, `OUT/checkpoints`: after any kill, full disk or flipped bit, the newest one that is whole.

0000000120/         a checkpoint, named by its step
.new-0000000160/    a save on its way, or the leftover of a killed one
.old-0000000120/    the former save of a step that is saved again, until the new one stands
.gone-0000000080/   one on its way out
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from parlay import faults
from parlay.engine.world import World
from parlay.files import naming_a_full_disk, sync_folder
from parlay.run import checkpoint
from parlay.run.checkpoint import Check, Checkpoint, Damage, Entries, Tensors

NEW, OLD, GONE = ".new-", ".old-", ".gone-"
KEPT = 2
STEP_NAME = re.compile(r"[0-9]{10,18}")


def save(
    root: Path,
    step: int,
    parts: Mapping[str, Tensors],
    meta: Mapping[str, Any],
    world: World | None = None,
    stages: Collection[int] = (),
) -> Path:
    """Write a checkpoint and return its folder; a kill or an error at any point leaves the ones before as they were.

    Each process of the world, with these stages, writes its own parts; when all stand the leader makes a checkpoint of
    them. `meta` is anything JSON can say. Afterwards the newest `KEPT` up to `step` remain. Those of later steps go
    too: the run went back behind them, and a resumed one would take them for its own.
    """
    world = world or World(1)
    path, new, needed = root / f"{step:010d}", root / f"{NEW}{step:010d}", checkpoint.size(parts)

    def begin() -> None:
        with naming_a_full_disk(path, needed):
            root.mkdir(parents=True, exist_ok=True)
            _tidy(root)
            new.mkdir()

    def write() -> Entries:
        with naming_a_full_disk(path, needed):
            entries = {name: checkpoint.write_part(new, name, part) for name, part in parts.items()}
        faults.reach(None, stages, "save")
        return entries

    def finish() -> None:
        with naming_a_full_disk(path, needed):
            checkpoint.write_manifest(new, step, entries, meta)
            _put_in_place(new, path)
        saved = sorted(filter(_is_checkpoint, root.iterdir()), key=_step)
        up_to_now = [other for other in saved if _step(other) <= step]
        for other in set(saved) - set(up_to_now[-KEPT:]):
            _discard(other)

    try:
        world.by_leader(begin)
        entries = {name: entry for own in world.gather(write) for name, entry in own.items()}
        world.by_leader(finish)
    except BaseException:
        if world.leads and root.is_dir():
            _tidy(root)
        raise
    return path


def newest(root: Path, warn: Callable[[str], None], check: Check = lambda _: None) -> Checkpoint | None:
    """The newest checkpoint that is whole and whose meta is right. Each one passed over is named by a line to `warn`.

    It only reads: beside a running save it must not remove that one's work.
    """
    refused: list[str] = []
    found: Checkpoint | None = None
    for path in _candidates(root):
        try:
            found = checkpoint.verified(path, check)
            break
        except Damage as damage:
            refused.append(f"checkpoint {path} is damaged: {damage}")
    instead = f"{found.path} is taken instead" if found else "there is no whole one to take instead"
    for line in refused:
        warn(f"{line}; {instead}")
    return found


def _put_in_place(new: Path, path: Path) -> None:
    # A folder cannot be replaced in one call. Between these two `.old-` stands in for it, see _candidates.
    old = path.with_name(f"{OLD}{path.name}")
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    sync_folder(path.parent)
    if old.exists():
        _discard(old)


def _tidy(root: Path) -> None:
    """Remove what killed saves left, and put the former save of a step back if its successor never came to stand."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(OLD) and not (root / path.name.removeprefix(OLD)).exists():
            os.rename(path, root / path.name.removeprefix(OLD))
        elif path.name.startswith(OLD):
            _discard(path)
        elif path.name.startswith((NEW, GONE)):
            shutil.rmtree(path)


def _discard(path: Path) -> None:
    """Out of sight first: a checkpoint that is half removed would read as a damaged one."""
    gone = path.with_name(f"{GONE}{path.name.removeprefix(OLD)}")
    os.rename(path, gone)
    shutil.rmtree(gone)


def _is_checkpoint(path: Path) -> bool:
    return STEP_NAME.fullmatch(path.name.removeprefix(OLD)) is not None and path.is_dir()


def _step(path: Path) -> int:
    return int(path.name.removeprefix(OLD))


def _candidates(root: Path) -> list[Path]:
    """Newest first; of one step the former save comes behind its successor."""
    if not root.is_dir():
        return []
    found = filter(_is_checkpoint, root.iterdir())
    return sorted(found, key=lambda path: (_step(path), not path.name.startswith(OLD)), reverse=True)
