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
    """By time per sample trained, against serial training in the same rounds."""
    wait_share: tuple[float, ...]
    """Of every stage's time, waiting for its neighbours."""
    samples: float
    """Of a step, on which each block is trained."""
    sample_us: float
    """Microseconds per sample trained."""
    speedup_per_step: float | None
    """The ratio of step times: of less work than serial training's where `samples` are not the whole batch."""


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
    baseline: str
    """The system that speed-ups are over."""

    @property
    def title(self) -> str:
        return f"{self.model}, batch {self.batch_size}"

    @property
    def over(self) -> str:
        """What speed-ups are over, with its note."""
        notes = [row.note for row in self.rows if row.system == self.baseline and row.note]
        return f"{self.baseline} ({notes[0]})" if notes else self.baseline

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
            baseline=str(content.get("baseline") or "serial"),
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
            "µs a sample",
            tuple(Cell(seconds(row.sample_us), row.sample_us) for row in bench.rows),
            "time of a step over the samples that each block is trained on in it",
        ),
        Column(
            "speed-up",
            tuple(
                Cell(_quartiles(row.speedup, _ratio), row.speedup[1]) if row.speedup else Cell(DASH)
                for row in bench.rows
            ),
            f"over {bench.over}, by time per sample trained, round by round: the median, quartiles in brackets",
        ),
        *(_per_step(bench) if any(row.samples < bench.batch_size for row in bench.rows) else ()),
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
            "samples_per_step": row.samples,
            "sample_us": row.sample_us,
            "speedup_per_step": row.speedup_per_step,
        }
        for row in bench.rows
    ]


def _per_step(bench: Bench) -> list[Column]:
    """For steps in which a stage trains on a part of the batch."""
    ratios = [row.speedup_per_step for row in bench.rows]
    return [
        Column(
            "speed-up per step",
            tuple(Cell(_ratio(ratio), ratio) if ratio is not None else Cell(DASH) for ratio in ratios),
            "ratio of the times of a step, in which some systems train on a part of the batch: not of the same work",
        ),
        Column(
            "samples a step",
            tuple(Cell(f"{row.samples:g}", row.samples) for row in bench.rows),
            "on which each block is trained",
        ),
    ]


def _timing(row: Mapping[str, Any]) -> Timing:
    """Files from before `samples_per_step` have none, and steps of whole batches."""
    ratio = [row.get(name) for name in ("speedup_low", "speedup", "speedup_high")]
    samples, step_ms = float(row.get("samples_per_step", row["batch_size"])), float(row["step_ms"])
    if not samples > 0:
        raise ValueError("samples_per_step")
    per_step = row.get("speedup_per_step", row.get("speedup"))
    return Timing(
        system=str(row["system"]),
        note=str(row.get("note") or ""),
        devices=int(row["stages"]),
        step=_three("step_ms", [row["step_ms_low"], row["step_ms"], row["step_ms_high"]]),
        speedup=None if None in ratio else _three("speedup", ratio),
        wait_share=tuple(float(share) for share in row.get("wait_share") or ()),
        samples=samples,
        sample_us=_finite("step_ms", 1000 * step_ms / samples),
        speedup_per_step=None if per_step is None else _finite("speedup_per_step", float(per_step)),
    )


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(name)
    return value


def _three(name: str, values: list[Any]) -> tuple[float, float, float]:
    low, middle, high = (_finite(name, float(value)) for value in values)
    return low, middle, high


def _quartiles(values: tuple[float, float, float], show: Any) -> str:
    low, middle, high = values
    return f"{show(middle)} [{show(low)}, {show(high)}]"


def _ratio(value: float) -> str:
    return f"{value:.2f}"
