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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.files import naming_a_full_disk, sync_folder
from parlay.run.checkpoint import (
    Check,
    Checkpoint,
    Damage,
    Entries,
    Tensors,
    check_parts,
    packed,
    part_file,
    size,
    verified,
    write_file,
    write_manifest,
)

NEW, OLD, GONE = ".new-", ".old-", ".gone-"
STEP_NAME = re.compile(r"[0-9]{10,18}")


def save(root: Path, step: int, parts: Mapping[str, Tensors], meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint and return its folder; a kill or an error at any point leaves the ones before as they were.

    `meta` is anything JSON can say (tuples come back as lists, keys as strings). Afterwards the newest `keep` up to
    `step` remain. Those of later steps go too: the run went back behind them, because they were damaged or because it
    started anew, and a resumed run would take them for its own.
    """
    check_parts(parts)
    try:
        begin(root, step, size(parts))
        return finish(root, step, write_parts(root, step, parts), meta, keep)
    except BaseException:
        give_up(root)
        raise


def begin(root: Path, step: int, needed: int = 0) -> None:
    """The first of three steps of a save, by one process; then each writes its parts, then the first finishes it.

    `needed` bytes are what the message about a full disk says.
    """
    if not 0 <= step < 10**18:
        raise InputError(f"no checkpoint of step {step}: write a step from 0 on")
    with naming_a_full_disk(root / _name(step), needed):
        root.mkdir(parents=True, exist_ok=True)
        _tidy(root)
        _new(root, step).mkdir()


def write_parts(root: Path, step: int, parts: Mapping[str, Tensors]) -> Entries:
    """The second: parts, by as many processes as there are. What it gives goes into the manifest."""
    check_parts(parts)
    with naming_a_full_disk(root / _name(step), size(parts)):
        return {name: write_file(part_file(_new(root, step), name), packed(part)) for name, part in parts.items()}


def finish(root: Path, step: int, entries: Entries, meta: Mapping[str, Any], keep: int = 2) -> Path:
    """The third: the manifest of all parts makes them a checkpoint, which is put in its place."""
    path, new, old = root / _name(step), _new(root, step), root / f"{OLD}{_name(step)}"
    with naming_a_full_disk(path, sum(entry["bytes"] for entry in entries.values())):
        write_manifest(new, step, entries, meta)
        # A folder cannot be replaced in one call. Between these two `.old-` stands in for it, see _candidates.
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
        sync_folder(root)
    if old.exists():
        _discard(old)
    saved = sorted(filter(_is_checkpoint, root.iterdir()), key=_step)
    up_to_now = [other for other in saved if _step(other) <= step]
    for other in set(saved) - set(up_to_now[-keep:]):
        _discard(other)
    return path


def give_up(root: Path) -> None:
    """Clear away what a save that failed has left."""
    if root.is_dir():
        _tidy(root)


def newest(root: Path, warn: Callable[[str], None], check: Check = lambda _: None) -> Checkpoint | None:
    """The newest checkpoint that is whole and whose meta is right. Each one passed over is named by a line to `warn`.

    It only reads: beside a running save it must not remove that one's work.
    """
    refused: list[str] = []
    found: Checkpoint | None = None
    for path in _candidates(root):
        try:
            found = verified(path, check)
            break
        except Damage as damage:
            refused.append(f"checkpoint {path} is damaged: {damage}")
    instead = f"{found.path} is taken instead" if found else "there is no whole one to take instead"
    for line in refused:
        warn(f"{line}; {instead}")
    return found


def _name(step: int) -> str:
    return f"{step:010d}"


def _new(root: Path, step: int) -> Path:
    return root / f"{NEW}{_name(step)}"


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
