"""The folder of a demo: taken for itself, and freed of what an earlier demo wrote. Nothing else in it is deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.files import FolderLock
from parlay.run.records import write_json

MARK = "demo.json"
"""Says that the folder is a demo's. It is there from the start, so that a demo that was killed can be replaced too."""
FILES = ("plan.json", "bench.json", "report.html")
OF_A_RUN = ("recipe.toml", "records.jsonl", "summary.json", "model.safetensors", ".lock")
CHECKPOINTS = "checkpoints"


@contextmanager
def taken(out: Path, runs: Iterable[str]) -> Iterator[Path]:
    """The folder, empty of an earlier demo and locked against another one; `runs` are the names of its run folders."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: write --out with a folder")
    ours, others = is_demo(out), others_in(out)
    if others and not ours:
        raise InputError(
            f"{out} holds {others[0]}, which no demo wrote: write --out with a new folder, or move it away"
        )
    with FolderLock(out):
        if ours:
            clear(out, runs)
        write(out, {"status": "begun"})
        yield out


def write(out: Path, told: Mapping[str, Any]) -> None:
    """What the demo has found so far, in the file that marks its folder."""
    write_json(out / MARK, {"made_by": "parlay demo", **told})


def is_demo(out: Path) -> bool:
    try:
        content = json.loads((out / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("made_by") == "parlay demo"


def others_in(out: Path) -> list[str]:
    """The names of all that lies there, but for the lock that a refused demo leaves."""
    return sorted(path.name for path in out.iterdir() if path.name != ".lock") if out.is_dir() else []


def clear(out: Path, runs: Iterable[str]) -> None:
    """Delete by name what a demo writes. A folder in which something else lies stays, with that."""
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    for folder in (out / name for name in runs):
        for name in OF_A_RUN:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        if folder.is_dir() and not any(folder.iterdir()):
            os.rmdir(folder)
