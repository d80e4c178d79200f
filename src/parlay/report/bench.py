"""The rows of `parlay bench --json`: systems timed in one run, as a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parlay.report.words import DASH, Cell, Column, seconds


@dataclass(frozen=True)
class Timing:
    """One system: medians over the rounds, with their quartiles."""

    system: str
    note: str
    devices: int
    step: tuple[float, float, float]
    """Milliseconds: low, median, high."""
    speedup: tuple[float, float, float] | None
    """Against serial training in the same rounds."""
    wait_share: tuple[float, ...]
    """Of every stage's time, waiting for its neighbours."""


@dataclass(frozen=True)
class Bench:
    model: str
    batch_size: int
    rows: tuple[Timing, ...]
    says: tuple[str, ...]
    command: str
    environment: Mapping[str, Any]
    rounds: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.model}, batch {self.batch_size}"

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Bench:
        rows = content["rows"]
        if not rows:
            raise ValueError("rows")
        return cls(
            model=str(rows[0]["model"]),
            batch_size=int(rows[0]["batch_size"]),
            rows=tuple(_timing(row) for row in rows),
            says=tuple(map(str, content.get("says", []))),
            command=str(content.get("command", "")),
            environment=dict(content.get("environment") or {}),
            rounds=int(content.get("rounds", 0)),
            steps=int(content.get("steps", 0)),
        )


def columns(bench: Bench) -> list[Column]:
    found = [
        Column("system", tuple(Cell(row.system, row.system) for row in bench.rows)),
        Column("", tuple(Cell(row.note, row.note) for row in bench.rows), minor=True),
        Column("devices", tuple(Cell(str(row.devices), row.devices) for row in bench.rows)),
        Column(
            "ms a step",
            tuple(Cell(_quartiles(row.step, seconds), row.step[1]) for row in bench.rows),
            "median over the rounds, quartiles in brackets",
        ),
        Column(
            "speed-up",
            tuple(
                Cell(_quartiles(row.speedup, _ratio), row.speedup[1]) if row.speedup else Cell(DASH)
                for row in bench.rows
            ),
            "over serial training, round by round: the median, quartiles in brackets",
        ),
        Column(
            "stages wait",
            tuple(
                Cell(", ".join(f"{share:.1%}" for share in row.wait_share) or DASH, max(row.wait_share, default=None))
                for row in bench.rows
            ),
            "share of every stage's time in which it waits for its neighbours",
        ),
    ]
    return [column for column in found if any(cell.text not in ("", DASH) for cell in column.cells)]


def table(bench: Bench) -> list[dict[str, Any]]:
    """Plain values, for a spreadsheet."""
    return [
        {
            "system": row.system,
            "note": row.note,
            "devices": row.devices,
            **dict(zip(("step_ms_low", "step_ms", "step_ms_high"), row.step, strict=True)),
            **dict(zip(("speedup_low", "speedup", "speedup_high"), row.speedup or (None,) * 3, strict=True)),
        }
        for row in bench.rows
    ]


def _timing(row: Mapping[str, Any]) -> Timing:
    ratio = [row.get(name) for name in ("speedup_low", "speedup", "speedup_high")]
    return Timing(
        system=str(row["system"]),
        note=str(row.get("note") or ""),
        devices=int(row["stages"]),
        step=_three("step_ms", [row["step_ms_low"], row["step_ms"], row["step_ms_high"]]),
        speedup=None if None in ratio else _three("speedup", ratio),
        wait_share=tuple(float(share) for share in row.get("wait_share") or ()),
    )


def _three(name: str, values: list[Any]) -> tuple[float, float, float]:
    low, middle, high = map(float, values)
    if not all(math.isfinite(value) for value in (low, middle, high)):
        raise ValueError(name)
    return low, middle, high


def _quartiles(values: tuple[float, float, float], show: Any) -> str:
    low, middle, high = values
    return f"{show(middle)} [{show(low)}, {show(high)}]"


def _ratio(value: float) -> str:
    return f"{value:.2f}"
