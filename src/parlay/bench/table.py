"""Rows for people: a table, and below it what the numbers say in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from parlay.bench.core import Row, baseline, sentences


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title=title(rows), title_justify="left", box=None, pad_edge=False)
    for n, name in enumerate(columns(rows)):
        table.add_column(name, justify="left" if n < 2 else "right", no_wrap=n == 0)
    for row in rows:
        table.add_row(*cells(row, with_share(rows)))
    console.print(table)
    for sentence in sentences(rows):
        console.print(sentence, markup=False)


def title(rows: Sequence[Row]) -> str:
    """The problem, and what the speed-ups are over."""
    first, base = rows[0], baseline(rows)
    problem = f"{first.model}, batch {first.batch_size}"
    if base is None:
        return f"{problem}: no serial training was timed"
    note = f" ({base.note})" if base.note else ""
    return f"{problem}: speed-up over {base.system}{note}, by time per sample trained; medians (quartiles)"


def with_share(rows: Sequence[Row]) -> bool:
    """Does a row train on a part of the batch? Its speed-up per step then stands beside that of the same work."""
    return any(row.share < 1 for row in rows)


def columns(rows: Sequence[Row]) -> list[str]:
    return [
        *("system", "", "devices", "ms a step", "µs a sample", "speed-up"),
        *(("speed-up per step", "samples a step") if with_share(rows) else ()),
        *("stages wait", "beyond imbalance"),
    ]


def cells(row: Row, share: bool = False) -> list[str]:
    """A row as text, column by column; `share`: with those on a part of the batch."""
    waits, beyond = row.extra.get("wait_share"), row.extra.get("wait_share_beyond_imbalance")
    per_step = row.per_step(row.speedup)
    return [
        row.system,
        row.note,
        str(row.stages),
        f"{_ms(row.step_ms)} ({_ms(row.step_ms_low)}–{_ms(row.step_ms_high)})",
        f"{row.sample_us:.0f}",
        f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})" if row.speedup is not None else "",
        *((f"{per_step:.2f}" if per_step is not None else "", f"{row.samples_per_step:g}") if share else ()),
        ", ".join(f"{wait:.0%}" for wait in waits) if waits else "",
        f"{beyond:.1%}" if beyond is not None else "",
    ]


def _ms(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
