"""`parlay report`: run folders to one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.flags import add_command
from parlay.cli.reproduce import room

if TYPE_CHECKING:
    from parlay.cli.flags import Commands

TABLE = "reproduction.json"


def add(commands: Commands) -> None:
    sub = add_command(commands, "report", _report, "run folders to one HTML page and a table")
    sub.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folders, folders of parlay compare, JSON files of parlay bench",
    )
    sub.add_argument("-o", "--output", metavar="FILE", help="the page; report.html in a single folder by default")


def _report(given: argparse.Namespace) -> int:
    paths, output = [Path(run) for run in given.runs], Path(given.output) if given.output else None
    if any(path.name == TABLE or (path / TABLE).is_file() for path in paths):  # a table of parlay reproduce
        return int(room("page").show(paths, output))
    from parlay.report import report

    return report(paths, output)
