"""The columns of a reproduced table. Each has one kind of number: measured here, projected, by formula, or quoted.

In: the lines of an experiment, their runs, what was timed. Out: a plain row for each line; what is not known is None,
and never filled in from another column.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from parlay.reproduce.old_load import Run
from parlay.reproduce.paper import Line
from parlay.schedule import PARALLEL, SERIAL

GIB = 1 << 30
PER_SAMPLE = "_per_sample"
MEASURED, PROJECTED, FORMULA, QUOTED, SAID = "measured", "projected", "formula", "quoted", "row"


@final
@dataclass(frozen=True)
class Column:
    key: str
    title: str
    kind: str
    digits: int = 2
    short: str = ""
    """Its title where the kind stands above it."""


def columns(loss: bool) -> list[Column]:
    """In the order in which they stand; `loss`: the rows have no accuracy."""
    what, digits = ("test loss", 4) if loss else ("test accuracy, %", 2)
    return [
        Column("label", "method", SAID),
        Column("stages", "K", SAID, 0),
        Column("schedule", "schedule", SAID),
        Column("value", what, MEASURED, digits),
        Column("spread", "± over seeds", MEASURED, digits),
        Column("seeds", "seeds", MEASURED, 0),
        Column("paper_value", f"{what}, paper", QUOTED, 3 if loss else 2, short=what),
        Column("memory_gib", "memory, GiB", MEASURED),
        Column("formula_gib", "memory by formula, GiB", FORMULA, short="memory, GiB"),
        Column("paper_memory", "memory, paper", QUOTED, short="memory, GiB"),
        *_speeds("measured", MEASURED, "measured"),
        *_speeds("projected", PROJECTED, "projected for K devices"),
        Column("paper_speedup", "speed-up, paper", QUOTED, short="speed\N{NON-BREAKING HYPHEN}up"),
        Column("status", "runs", SAID),
    ]


def _speeds(name: str, kind: str, how: str) -> list[Column]:
    """Per epoch, as the paper counts, and per sample trained, where a stage leaves samples out."""
    epoch, sample = "speed\N{NON-BREAKING HYPHEN}up over serial", "per sample trained"
    return [
        Column(f"speedup_{name}", f"speed-up over serial, {how}", kind, short=epoch),
        Column(f"speedup_{name}_per_sample", f"{sample}, {how}", kind, short=sample),
    ]


def telling(found: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns with something to show: not those per sample where every stage trains on all samples."""

    def tells(column: Column) -> bool:
        values = [row[column.key] for row in rows]
        if column.key.endswith(PER_SAMPLE):
            return values != [row[column.key.removesuffix(PER_SAMPLE)] for row in rows]
        return any(cell(value, column) for value in values)

    return [column for column in found if tells(column)]


@final
@dataclass(frozen=True)
class Facts:
    """What is known of a line beside its runs."""

    schedule: str
    formula_bytes: int | None = None
    speedup_measured: float | None = None
    speedup_projected: float | None = None


def row(line: Line, runs: Sequence[Run], facts: Facts, loss: bool) -> dict[str, Any]:
    """Values of finished runs alone count; the others show in the status."""
    finished = [run for run in runs if run.finished]
    values = [value for run in finished if (value := run.test_loss if loss else run.test_accuracy) is not None]
    kept = [run.auxiliary_bytes for run in finished if run.auxiliary_bytes is not None]
    keeps = line.method != "serial"
    share = next((run.trained_share for run in finished), None)
    return {
        "row": line.name,
        "label": line.label,
        "ours": line.ours,
        "method": line.method,
        "stages": line.stages if keeps else None,
        "downsample": line.downsample,
        "ratio": line.ratio or None,
        "schedule": facts.schedule,
        "value": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "seeds": len(values),
        "paper_value": line.quoted.value,
        "memory_gib": max(kept) / GIB if kept and keeps else None,
        "formula_gib": facts.formula_bytes / GIB if facts.formula_bytes is not None and keeps else None,
        "paper_memory": line.quoted.memory,
        "trained_share": share,
        "speedup_measured": facts.speedup_measured,
        "speedup_measured_per_sample": _times(facts.speedup_measured, share),
        "speedup_projected": facts.speedup_projected,
        "speedup_projected_per_sample": _times(facts.speedup_projected, share),
        "paper_speedup": line.quoted.speedup,
        "status": _status(runs),
        "values": values,
    }


def phases(runs: Sequence[Run]) -> str:
    """The phases that a finished run has had: of an adaptive one they are not known before."""
    done = next((run for run in runs if run.finished), None)
    return "".join(PARALLEL if epoch.parallel else SERIAL for epoch in done.epochs) if done is not None else ""


def cell(value: Any, column: Column) -> str:
    """For people."""
    if value is None or value == "":
        return ""
    if isinstance(value, float) or (isinstance(value, int) and column.digits):
        return f"{value:.{column.digits}f}"
    return str(value)


def as_json(found: Sequence[Column]) -> list[Mapping[str, Any]]:
    return [
        {"key": c.key, "title": c.title, "short": c.short or c.title, "kind": c.kind, "digits": c.digits} for c in found
    ]


def _times(speedup: float | None, share: float | None) -> float | None:
    return speedup * share if speedup is not None and share is not None else None


def _status(runs: Sequence[Run]) -> str:
    if not runs:
        return "not run"
    counts = {status: sum(run.status == status for run in runs) for status in dict.fromkeys(run.status for run in runs)}
    return ", ".join(f"{count} {status}" for status, count in counts.items())
