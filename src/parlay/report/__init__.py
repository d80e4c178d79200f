"""Reports: run folders in, a comparison table and one HTML page out. No torch in this room.

inputs        what was given, sorted out             load      the files of a run folder, checked
groups        runs grouped by configuration          speed     times, where they can be compared
words         numbers as text, the headline          console   the table on standard output
figures       learning curves as inline SVG          costs     charts of memory and speed
spans         a measured timeline as bars            bench     what `parlay bench` has timed
section       what others add to the page            svg       the drawing kit
page          the HTML page
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.report import bench, console
from parlay.report.groups import Task, tasks
from parlay.report.inputs import Given, sort_out
from parlay.report.load import load, shown
from parlay.report.section import Section
from parlay.report.speed import rows

__all__ = ["Section", "report", "table", "write"]


def report(paths: Sequence[Path], output: Path | None) -> int:
    """Print the table, write the page, say where it is. The exit code is 0; wrong input is an InputError."""
    given = sort_out(paths)
    found = _tasks(given)
    if output is None:
        output = paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")
    _check(output)
    console.show(found)
    for one in given.benches:
        console.show_table(f"parlay bench: {one.title}, speed-up over {one.over}", bench.columns(one))
    _write(found, given, output, _title(found, given))
    console.say(f"report: {shown(output)}")
    return 0


def write(
    runs: Sequence[Path],
    output: Path,
    title: str,
    timed: bool = False,
    sections: Sequence[Section] = (),
) -> None:
    """The page of these run folders, into the file `output`.

    `timed`: they were made one after the other on the same devices, so that their times can be compared.
    `sections` stand before the runs, whose times tell nothing then: they may have been made side by side.
    """
    _check(output)
    given = Given(tuple(runs), timed, bool(sections), sections=tuple(sections))
    _write(_tasks(given), given, output, title)


def table(runs: Sequence[Path], timed: bool = False) -> list[dict[str, Any]]:
    """The comparison of these run folders: a row for every configuration, numbers as numbers, None where unknown."""
    return [row for task in tasks(load(runs), timed) for row in rows(task)]


def _tasks(given: Given) -> list[Task]:
    if not given.folders and (given.benches or given.sections):
        return []
    return tasks(load(given.folders), given.timed, given.beside)


def _write(found: Sequence[Task], given: Given, output: Path, title: str) -> None:
    from parlay.report.page import render  # matplotlib: only where a page is wanted

    page = render(found, given, title).encode("utf-8", "replace")  # JSON texts may hold halves of surrogate pairs
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


def _title(found: Sequence[Task], given: Given) -> str:
    if len(found) == 1 and len(found[0].groups) == 1:
        return f"{found[0].groups[0].label} on {found[0].dataset}, {found[0].model}"
    parts = [f"{task.dataset}, {task.model}" for task in found]
    parts += [f"bench of {one.title}" for one in given.benches]
    return "; ".join(dict.fromkeys(parts))
