"""The comparison table on standard output: drawn by rich on a terminal, aligned plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from parlay.report import speed
from parlay.report.groups import Task, tasks
from parlay.report.load import load
from parlay.report.words import Cell, Column, columns, rule

EPOCHS = ("serial epoch, s", "parallel epoch, s")
DISPENSABLE = ("K", "downsampled by", *EPOCHS, "schedule", "epochs", "runs", "memory for states")
"""What a narrow terminal does without, in this order; the names of the configurations hold K and DS."""
LEFT_TO_THE_PAGE = ("configuration", "K", "downsampled by", "schedule", "epochs", *EPOCHS)


def show(found: Sequence[Task]) -> None:
    for task in found:
        show_table(f"{task.dataset}, {task.model}", columns(task))
        _explain(task)


def _explain(task: Task) -> None:
    """What a reader must know of the gaps and times above."""
    told = [text for text in (rule(task), speed.note(task)) if text]
    if told:
        say("\n".join(told) + "\n")


def show_table(title: str, table: Sequence[Column]) -> None:
    if sys.stdout.isatty():
        _rich(title, table)
    else:
        say(f"{title}\n{plain(table)}\n")


def compare(runs: Mapping[Path, str]) -> None:
    """The table of a comparison: how good, how fast, at what price. The page has the rest.

    `runs` has the rows' own names, which stand there in its order.
    """
    names = {folder.resolve().name: name for folder, name in runs.items()}
    rank = {name: n for n, name in enumerate(dict.fromkeys(runs.values()))}
    for task in tasks(load(list(runs)), timed=True):
        own = [names[group.runs[0].name] for group in task.groups]
        order = sorted(range(len(own)), key=lambda n: rank[own[n]])
        rows = [Column("method", tuple(Cell(name, name) for name in own)), *columns(task)]
        table = [
            Column(column.title, tuple(column.cells[n] for n in order), column.note)
            for column in rows
            if column.title not in LEFT_TO_THE_PAGE
        ]
        show_table(f"{task.dataset}, {task.model}, {task.groups[0].epochs} epochs", table)
        _explain(task)


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
