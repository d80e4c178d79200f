"""What a report is made of: run folders, folders of `compare`, JSON files of `bench`.

In: paths as they were given. Out: the run folders behind them, and the files, each checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.report.bench import Bench
from parlay.report.load import shown
from parlay.report.section import Section

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Given:
    folders: tuple[Path, ...] = ()
    timed: bool = False
    """Are these the runs of one comparison, made one after the other, so that their times can be compared?"""
    beside: bool = False
    """Were they made side by side, so that their times tell nothing?"""
    benches: tuple[Bench, ...] = ()
    sections: tuple[Section, ...] = ()


def sort_out(paths: Sequence[Path]) -> Given:
    folders: list[Path] = []
    comparisons = 0
    benches: list[Bench] = []
    for path in paths:
        if path.is_file() and path.suffix == ".json":
            benches.append(_bench(path))
        elif (path / COMPARISON).is_file():
            comparisons += 1
            folders += _compared(path)
        else:
            folders.append(path)
    timed = comparisons == 1 and len(paths) == 1 + len(benches)
    return Given(tuple(folders), timed, benches=tuple(benches))


def _bench(path: Path) -> Bench:
    content = _json(path)
    if not isinstance(content, dict) or "rows" not in content:
        raise InputError(f"{shown(path)} is of no use here: write a run folder, or the JSON of parlay bench")
    try:
        return Bench.read(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        word = shown(str(error.args[0])) if error.args else "value"
        raise InputError(f"{shown(path)} is damaged (no proper {word}): leave it out, or record it again") from None


def _compared(folder: Path) -> list[Path]:
    """The run folders of a comparison, in the order of its rows."""
    try:
        names = [str(name) for row in _json(folder / COMPARISON)["rows"] for name in row["folders"]]
    except (KeyError, TypeError):
        raise InputError(f"{shown(folder / COMPARISON)} is damaged: run parlay compare again") from None
    return [folder / Path(name).name for name in names]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {shown(path)} ({error.strerror}): make it readable, or leave it out") from None
    except ValueError:
        raise InputError(f"{shown(path)} is damaged (not JSON): leave it out, or record it again") from None
