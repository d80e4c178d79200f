"""The columns of a reproduced table. Each has one kind of number: measured here, projected, by formula, or quoted.

In: a line of the paper's table, its runs, what was timed. Out: plain values by the columns' keys. What is not known is
None, and never filled in from another column. Tables that were recorded before are read by the same columns.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from parlay.config.schedule import PARALLEL, Schedule
from parlay_paper.runs import Run
from parlay_paper.tables import Line

GIB = 1 << 30
PER_SAMPLE = "_per_sample"
MEASURED, PROJECTED, FORMULA, QUOTED, ABOUT = "measured", "projected", "formula", "quoted", "row"
SPEEDS = {"speedup_measured": (MEASURED, "measured"), "speedup_projected": (PROJECTED, "projected for K devices")}
FINISHED = re.compile(r"\d+ finished")
SPEEDUP = "speed\N{NON-BREAKING HYPHEN}up"

Row = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Column:
    key: str
    title: str
    kind: str
    digits: int | None = 2
    """None: as many as a number of its size needs."""
    short: str = ""
    """Its title where the kind stands above it."""


def columns(loss: bool) -> list[Column]:
    """In the order in which they stand; `loss`: the rows have no accuracy."""
    what, digits = ("test loss", 4) if loss else ("test accuracy, %", 2)
    return [
        Column("label", "method", ABOUT),
        Column("stages", "K", ABOUT, 0),
        Column("schedule", "schedule", ABOUT),
        Column("value", what, MEASURED, digits),
        Column("spread", "± over seeds", MEASURED, digits),
        Column("seeds", "seeds", MEASURED, 0),
        Column("paper_value", f"{what}, paper", QUOTED, 3 if loss else 2, what),
        Column("memory_gib", "memory, GiB", MEASURED),
        Column("formula_gib", "memory by formula, GiB", FORMULA, short="memory, GiB"),
        Column("paper_memory", "memory, paper", QUOTED, short="memory, GiB"),
        *(column for key in SPEEDS for column in _speeds(key)),
        Column("paper_speedup", "speed-up, paper", QUOTED, short=SPEEDUP),
        Column("status", "runs", ABOUT),
    ]


def _speeds(key: str) -> list[Column]:
    """Per epoch, as the paper counts, and per sample trained, where a stage leaves samples out."""
    kind, how = SPEEDS[key]
    return [
        Column(key, f"speed-up over serial, {how}", kind, short=f"{SPEEDUP} over serial"),
        Column(key + PER_SAMPLE, f"per sample trained, {how}", kind, short="per sample trained"),
    ]


def row(
    line: Line,
    runs: Sequence[Run],
    loss: bool,
    schedule: str = "",
    formula_bytes: int | None = None,
    speedups: tuple[float | None, float | None] = (None, None),
) -> dict[str, Any]:
    """Values of finished runs alone count; the others show in the status. `speedups`: measured, projected."""
    ended = [run.summary for run in runs if run.finished]
    score = "test_loss" if loss else "test_accuracy"
    values = [one[score] for one in ended if one.get(score) is not None]
    kept = [one["auxiliary_bytes"] for one in ended if one.get("auxiliary_bytes") is not None]
    apart = line.method != "serial"
    joint = any(run.recipe.get("order") == "joint" for run in runs)
    share = trained_share(line.method, line.stages, phases(runs), joint)
    speeds = dict(zip(SPEEDS, speedups, strict=True))
    return {
        "row": line.name,
        "label": line.label,
        "ours": line.ours,
        "method": line.method,
        "stages": line.stages if apart else None,
        "downsample": line.downsample,
        "ratio": line.ratio or None,
        "schedule": schedule,
        "value": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "seeds": len(values),
        "paper_value": line.quoted.value,
        "memory_gib": max(kept) / GIB if kept and apart else None,
        "formula_gib": formula_bytes / GIB if formula_bytes is not None and apart else None,
        "paper_memory": line.quoted.memory,
        "trained_share": share,
        **speeds,
        **{key + PER_SAMPLE: _times(speedup, share) for key, speedup in speeds.items()},
        "paper_speedup": line.quoted.speedup,
        "status": _status(runs),
        "values": values,
    }


def phases(runs: Sequence[Run]) -> str:
    """Those of a finished run: of an adaptive one they are not known before."""
    return next((run.phases for run in runs if run.finished), "")


def trained_share(method: str, stages: int, phases: str, joint: bool) -> float | None:
    """Of an epoch's samples, the share that each stage trains on, on average over these phases.

    Half in a parallel epoch of penalty, where neighbours take turns (red-black); all in its joint order, and elsewhere.
    """
    halved = method == "penalty" and stages > 1 and not joint
    return 1 - halved * phases.count(PARALLEL) / (2 * len(phases)) if phases else None


def recorded(content: Row) -> tuple[list[Column], list[dict[str, Any]]]:
    """Columns and rows of a `reproduction.json`. Old ones get the speed-ups per sample trained from the schedule."""
    heads: list[Column] = []
    known = {one["key"] for one in content["columns"]}
    for one in content["columns"]:
        if one["key"] in SPEEDS and one["key"] + PER_SAMPLE not in known:
            heads += _speeds(one["key"])
            continue
        digits = one.get("digits")
        if digits is not None and digits not in range(10):
            raise ValueError("digits")
        heads.append(Column(str(one["key"]), str(one["title"]), str(one["kind"]), digits, str(one.get("short") or "")))
    rows = [dict(one) for one in content["rows"]]
    for one in rows:
        for key in SPEEDS:
            if key + PER_SAMPLE not in one:
                one[key + PER_SAMPLE] = _times(one[key], _old_share(one, content)) if is_number(one.get(key)) else None
    return heads, rows


def _old_share(row: Row, content: Row) -> float | None:
    method, schedule = str(row.get("method")), str(row.get("schedule"))
    if method != "penalty":
        return 1.0
    if schedule == "adaptive":
        return None
    joint = any(str(label).startswith("order joint") for label in content.get("labels") or ())
    return trained_share(method, int(row["stages"]), Schedule.parse(schedule).phases(int(content["epochs"])), joint)


def telling(found: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns with something to show: not that all runs have finished, nor that every sample was trained."""

    def tells(column: Column) -> bool:
        values = [row.get(column.key) for row in rows]
        if column.key.endswith(PER_SAMPLE):
            return values != [row.get(column.key.removesuffix(PER_SAMPLE)) for row in rows]
        if column.key == "status":
            return not all(FINISHED.fullmatch(str(value)) for value in values)
        return any(value not in (None, "") for value in values)

    return [column for column in found if tells(column)]


def cell(value: Any, column: Column) -> str:
    """For people."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if not is_number(value):
        return str(value)
    digits = column.digits
    if digits is None:  # losses need four, percents, speeds and GiB two
        digits = 0 if isinstance(value, int) else 2 if abs(value) >= 0.5 or value == 0 else 4
    return f"{value:.{digits}f}"


def is_number(value: Any) -> bool:
    """Finite, as JSON may hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _times(speedup: float | None, share: float | None) -> float | None:
    return speedup * share if speedup is not None and share is not None else None


def _status(runs: Sequence[Run]) -> str:
    every = [run.status for run in runs]
    return ", ".join(f"{every.count(one)} {one}" for one in dict.fromkeys(every)) or "not run"
