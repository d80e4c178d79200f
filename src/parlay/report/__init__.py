"""Reports: run folders in, a comparison table and one HTML page out. No torch in this room.

load      the files of a run folder, checked          words     numbers as text, the headline
groups    runs grouped by configuration               figures   charts as inline SVG
console   the table on standard output                page      the HTML page
speed     times, where they can be compared           spans     the timeline of a run as bars
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.report import console
from parlay.report.groups import Task, tasks
from parlay.report.load import load, shown
from parlay.report.speed import rows

__all__ = ["report", "table", "write"]


def report(runs: Sequence[Path], output: Path | None) -> int:
    """Print the table, write the page, say where it is. The exit code is 0; wrong input is an InputError."""
    found = tasks(load(runs))
    if output is None:
        output = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    _check(output)
    console.show(found)
    _write(found, output, _title(found))
    console.say(f"report: {shown(output)}")
    return 0


def write(runs: Sequence[Path], output: Path, title: str, timed: bool = False) -> None:
    """The page of these run folders, into the file `output`.

    `timed`: they were made one after the other on the same devices, so that their times can be compared.
    """
    _check(output)
    _write(tasks(load(runs), timed), output, title)


def table(runs: Sequence[Path], timed: bool = False) -> list[dict[str, Any]]:
    """The comparison of these run folders: a row for every configuration, numbers as numbers, None where unknown."""
    return [row for task in tasks(load(runs), timed) for row in rows(task)]


def _write(found: Sequence[Task], output: Path, title: str) -> None:
    from parlay.report.page import render  # matplotlib: only where a page is wanted

    page = render(found, title).encode("utf-8", "replace")  # JSON texts may hold halves of surrogate pairs
    part = output.with_name(output.name + ".part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(page)
        os.replace(part, output)  # a page that is open in a browser is the old one or the new one, never half of one
    except OSError as error:
        raise InputError(f"cannot write {shown(output)} ({error.strerror}): write -o with another file") from None


def _check(output: Path) -> None:
    """Before the work, not after it."""
    if output.is_dir():
        raise InputError(
            f"{shown(output)} is a folder: write -o with a file in it, as in {shown(output / 'report.html')}"
        )


def _title(found: Sequence[Task]) -> str:
    if len(found) == 1 and len(found[0].groups) == 1:
        return f"{found[0].groups[0].label} on {found[0].dataset}, {found[0].model}"
    return "; ".join(f"{task.dataset}, {task.model}" for task in found)
