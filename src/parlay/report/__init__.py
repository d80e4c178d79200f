"""Reports: run folders in, a table on the terminal and one HTML page out. No torch in this room.

load      files, checked                          groups    which runs compare
times     what can be said of their speed         tables    rows of text, and sentences
charts    curves and bars as inline SVG           svg       the drawing kit
page      the HTML page                           section   what others put on it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.files import shown
from parlay.report import groups, tables
from parlay.report.load import Inputs, load, sort_out
from parlay.report.section import Section

__all__ = ["Section", "report", "show", "table", "write"]


def report(paths: Sequence[Path], output: Path | None) -> int:
    """Print the tables, write the page, say where it is. The exit code is 0; wrong input is an InputError."""
    given = sort_out(paths)
    if output is None:
        output = paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")
    _check(output)
    found = groups.compare(given.runs, given.timed)
    for one in found:
        tables.show(one.title, tables.comparison(one), tables.notes(one))
    for bench in given.benches:
        title, over = tables.bench_title(bench)
        tables.show(f"parlay bench: {title}, speed-up over {over}", tables.bench(bench))
    titles = [one.title for one in found] + [f"bench of {tables.bench_title(one)[0]}" for one in given.benches]
    _write(found, given, output, "; ".join(dict.fromkeys(titles)))
    tables.say(f"report: {shown(output)}")
    return 0


def show(runs: Mapping[Path, str], timed: bool = False) -> None:
    """The comparison of these run folders on the terminal, by the names of their rows."""
    names = {folder.resolve().name: name for folder, name in runs.items()}
    for one in groups.compare(load(list(runs)), timed):
        cells = tuple(tables.Cell(names[each.runs[0].name], "") for each in one.configurations)
        columns = [tables.Column("method", cells), *tables.comparison(one)[1:]]
        tables.show(one.title, columns, tables.notes(one))


def write(
    runs: Sequence[Path], output: Path, title: str, timed: bool = False, sections: Sequence[Section] = ()
) -> None:
    """The page of these run folders, into the file `output`; `sections` stand above them.

    `timed`: they were made one after the other on the same devices, so that their times can be compared.
    """
    _check(output)
    given = Inputs(load(runs), timed)
    _write(groups.compare(given.runs, timed), given, output, title, sections)


def table(runs: Sequence[Path], timed: bool = False) -> list[dict[str, Any]]:
    """The comparison of these run folders: a row for every configuration, numbers as numbers, None where unknown."""
    return [row for one in groups.compare(load(runs), timed) for row in one.rows]


def _write(
    found: Sequence[groups.Comparison], given: Inputs, output: Path, title: str, sections: Sequence[Section] = ()
) -> None:
    from parlay.report.page import render  # matplotlib: only where a page is wanted

    page = render(found, given, title, sections).encode("utf-8", "replace")  # JSON may hold halves of surrogate pairs
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
        here = shown(output)
        raise InputError(f"{here} is a folder: write -o with a file in it, as in {here}/report.html")
