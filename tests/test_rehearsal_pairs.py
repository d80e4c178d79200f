"""Captured training equals eager training bit for bit, whatever two things come together.

    python tests/test_rehearsal_pairs.py --out results/rehearsal/pairs.json     all rows under 20 schedules

A row has one value of each factor. The rows are as many as it takes for every two values to meet in one of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import problems
from parlay import AugmentedLagrangian, Local, Penalty, Replay
from rehearsed import BATCH, Phases, difference, making, noisy, outcome, steps

METHODS = {"al": AugmentedLagrangian(), "penalty": Penalty(), "replay": Replay(), "local": Local()}
SAMPLES = 14 * BATCH + 4  # fourteen full batches and an incomplete one
FACTORS: dict[str, tuple[Any, ...]] = {
    "method": (*METHODS, "serial"),
    "stages": (2, 3, 6),
    "phases": ("one", "changing"),
    "resumed": (False, True),
    "store": ("device", "host", "file"),
    "clip": (None, 0.5),
    "precision": ("float32", "bfloat16"),
    "dropout": (False, True),
    "downsample": (1, 2),
    "schedule": ("latest", "forwards", "random-1"),
}
SCHEDULES = ["latest", "earliest", "forwards", "backwards", *(f"random-{n}" for n in range(1, 17))]
Row = dict[str, Any]


def rows() -> list[Row]:
    """Greedily: of fifty rows drawn at random, always the one with the most pairs that have not met yet."""
    dice, names = random.Random(0), list(FACTORS)
    left = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}
    found: list[Row] = []
    while left:
        drawn = [{name: dice.choice(values) for name, values in FACTORS.items()} for _ in range(50)]
        best = max(drawn, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        found.append(best)
    return found


def _pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))


def name_of(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items())


def rehearse(row: Row, schedules: list[str], folder: Path) -> dict[str, str]:
    """What differs from the eager engine, by schedule; nothing where all is equal."""
    serial = row["method"] == "serial"
    own: Phases = [("serial" if serial else "parallel", steps(SAMPLES, 2))]
    if row["phases"] == "changing":
        own = [("serial", steps(SAMPLES, 1)), *own]
    make = making(
        METHODS.get(row["method"], METHODS["al"]),
        row["stages"],
        problems.images(SAMPLES),
        folder,
        model=noisy if row["dropout"] else problems.with_norm,
        store=row["store"],
        clip=row["clip"],
        precision=row["precision"],
        store_dtype=row["precision"],
        downsample=row["downsample"],
    )
    stop = len([batch for _, batches in own for batch in batches]) - 9 if row["resumed"] else None
    wanted, losses, _ = outcome(make, own, None)
    found = {}
    for schedule in schedules:
        weights, other, _ = outcome(make, own, schedule, stop)
        found[schedule] = difference(weights, wanted) or ("" if other == losses else "losses differ")
    return {schedule: told for schedule, told in found.items() if told}


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=name_of)
def test_any_two_things_together(row: Row, tmp_path: Path) -> None:
    assert rehearse(row, [row["schedule"]], tmp_path) == {}


def test_every_two_values_meet_in_a_row() -> None:
    met = set().union(*map(_pairs, rows()))
    pairs = itertools.combinations(FACTORS.items(), 2)
    assert len(met) == sum(len(x) * len(y) for (_, x), (_, y) in pairs)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    given = ask.parse_args()
    kept, wrong = [], 0
    for count, row in enumerate(rows(), 1):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            told = rehearse(row, SCHEDULES, Path(folder))
        wrong += len(told)
        kept.append({**{name: value for name, value in row.items() if name != "schedule"}, "differ": told})
        print(
            f"{count} of {len(rows())}  {time.monotonic() - began:4.0f} s  {told or 'equal'}  {name_of(row)}",
            flush=True,
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"schedules": SCHEDULES, "rows": kept}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
