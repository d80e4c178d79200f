"""The comparison table on standard output: drawn by rich on a terminal, aligned plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from parlay.report.groups import Task
from parlay.report.words import Column, columns

DISPENSABLE = ("K", "r", "serial epoch, s", "parallel epoch, s", "schedule", "epochs", "runs", "aux. memory")
"""What a narrow terminal does without, in this order; the names of the configurations hold K and tell of r."""


def show(tasks: Sequence[Task]) -> None:
    for task in tasks:
        title = f"{task.dataset}, {task.model}"
        if sys.stdout.isatty():
            _rich(title, columns(task))
        else:
            say(f"{title}\n{plain(columns(task))}\n")


def plain(table: Sequence[Column]) -> str:
    """Aligned columns, numbers to the right, two spaces between them."""
    lines = [[column.title, *(cell.text for cell in column.cells)] for column in table]
    widths = [max(len(text) for text in texts) for texts in lines]
    padded = [
        [text.rjust(width) if column.numeric else text.ljust(width) for text in texts]
        for column, texts, width in zip(table, lines, widths, strict=True)
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def fitting(table: Sequence[Column], width: int) -> Sequence[Column]:
    """The columns that a narrow terminal has room for; the page has them all."""
    for title in DISPENSABLE:
        needed = sum(3 + max(len(text) for text in (c.title, *(cell.text for cell in c.cells))) for c in table)
        if needed <= width:
            break
        table = [column for column in table if column.title != title]
    return table


def say(text: str) -> None:
    """Print, with question marks for what the terminal's encoding lacks: a dash must not end in a traceback."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _rich(title: str, table: Sequence[Column]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console()
    table = fitting(table, out.width)
    drawn = Table(box=SIMPLE_HEAD, title=Text(title, style="bold"), title_justify="left", pad_edge=False)
    for column in table:
        drawn.add_column(Text(column.title), justify="right" if column.numeric else "left", no_wrap=True)
    for row in zip(*(column.cells for column in table), strict=True):
        drawn.add_row(*(Text(cell.text) for cell in row))  # as Text, brackets in names are no markup
    out.print(drawn)
