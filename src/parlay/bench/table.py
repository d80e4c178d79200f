"""Rows for people: a table, and below it what the numbers say in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from parlay.bench.core import Row, sentences


def show(rows: Sequence[Row], console: Console) -> None:
    first = rows[0]
    table = Table(title=f"{first.model}, batch {first.batch_size}", title_justify="left", box=None, pad_edge=False)
    for name in ("system", ""):
        table.add_column(name, no_wrap=True)
    for name in ("devices", "ms a step (quartiles)", "speed-up (quartiles)", "stages wait", "beyond imbalance"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for sentence in sentences(rows):
        console.print(sentence, markup=False)


def cells(row: Row) -> list[str]:
    """A row as text: name, note, devices, time and ratio with their quartiles, waits."""
    waits, beyond = row.extra.get("wait_share"), row.extra.get("wait_share_beyond_imbalance")
    return [
        row.system,
        row.note,
        str(row.stages),
        f"{row.step_ms:.1f} ({row.step_ms_low:.1f}–{row.step_ms_high:.1f})",
        f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})" if row.speedup is not None else "",
        ", ".join(f"{share:.0%}" for share in waits) if waits else "",
        f"{beyond:.1%}" if beyond is not None else "",
    ]
