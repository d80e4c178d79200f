"""Results for people: a table, and below it what the numbers say in plain sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from parlay.bench.core import Result, baseline, quartiles, sentences


def show(results: Sequence[Result], console: Console) -> None:
    rows = cells(results)
    table = Table(title=title(results), title_justify="left", box=None, pad_edge=False)
    for n, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if n < 2 else "right", no_wrap=n == 0)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    for sentence in sentences(results):
        console.print(sentence, markup=False)


def title(results: Sequence[Result]) -> str:
    """The problem, and what the speed-ups are over."""
    problem, base = results[0].problem, baseline(results)
    if base is None:
        return f"{problem}: no serial training was timed"
    note = f" ({base.note})" if base.note else ""
    return f"{problem}: speed-up over {base.system}{note}, by time per sample trained; medians (quartiles)"


def cells(results: Sequence[Result]) -> list[dict[str, str]]:
    """The text of each row by column. Where some train on a part of the batch, the speed-up per step stands beside."""
    return [_cells(one, any(other.share < 1 for other in results)) for one in results]


def _cells(one: Result, partly: bool) -> dict[str, str]:
    found = {"system": one.system, "": one.note, "devices": str(one.stages)}
    found["ms a step"] = _spread([1000 * value for value in one.seconds], _ms)
    found["µs a sample"] = f"{one.sample_us:.0f}"
    found["speed-up"] = _spread(one.speedups, _two)
    if partly:
        found["speed-up per step"] = _two(one.speedup_per_step) if one.speedup_per_step is not None else ""
        found["samples a step"] = f"{one.samples_per_step:g}"
    beyond = one.extra.get("wait_share_beyond_imbalance")
    found["stages wait"] = ", ".join(f"{wait:.0%}" for wait in one.extra.get("wait_share", []))
    found["beyond imbalance"] = f"{beyond:.1%}" if beyond is not None else ""
    return found


def _spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    if not values:
        return ""
    low, middle, high = quartiles(values)
    return f"{text(middle)} ({text(low)}–{text(high)})"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _ms(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
