"""What came out, read from a folder of runs: the recorded ones or those made at home. No torch.

A `Cell` is a row of a problem with its seeds. Only seeds of which every row has been made count, so that all rows of a
problem stand on the same ones.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from home_rows import PROBLEMS, ROWS, SEEDS, Job


@dataclass(frozen=True)
class Cell:
    """The runs of a row, by seed."""

    scores: dict[int, float]
    """Of the runs that have finished."""
    lost: dict[int, str]
    """What became of the others: diverged."""
    kept: int
    """Bytes of states, multipliers, activations and weights that the method keeps."""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores.values()) if self.scores and not self.lost else None

    @property
    def error(self) -> float | None:
        """Of the mean: one standard error."""
        return None if self.lost else standard_error(list(self.scores.values()))

    def minus(self, other: "Cell") -> tuple[float, float] | None:
        """Points above the other row and their standard error, seed by seed."""
        if self.lost or len(self.scores) < 2 or not other.scores.keys() >= self.scores.keys():
            return None
        gaps = [score - other.scores[seed] for seed, score in self.scores.items()]
        return statistics.fmean(gaps), standard_error(gaps) or 0.0


@dataclass(frozen=True)
class Table:
    """Of one folder."""

    seeds: dict[str, tuple[int, ...]]
    """Of a problem: those that are whole."""
    cells: dict[tuple[str, str], Cell]
    """By problem and row."""
    costs: dict[str, list[dict[str, Any]]]
    """Of a problem: what its runs have cost, with commit, processor and version of torch."""
    times: dict[str, dict[str, Any]]
    """Of a problem: what was timed, as in `time-PROBLEM.json`."""

    def timed(self, problem: str, system: str) -> dict[str, Any] | None:
        rows = self.times.get(problem, {}).get("rows", [])
        return next((row for row in rows if row["system"] == system), None)

    def environments(self) -> list[str]:
        """All there are: records of several machines or versions say so."""
        told = [cost for costs in self.costs.values() for cost in costs]
        keys = ("processor", "cores", "platform", "torch", "python", "commit")
        return list(
            dict.fromkeys(
                "{}, {} cores ({}), torch {}, Python {}, commit {}".format(*(c[k] for k in keys)) for c in told
            )
        )


def read(folder: Path) -> Table:
    seeds, cells, costs, times = {}, {}, {}, {}
    for problem in PROBLEMS:
        every = {(row, seed): folder / Job(problem, row, seed).name for row in ROWS for seed in SEEDS}
        there = {key: path for key, path in every.items() if (path / "cost.json").exists()}
        whole = tuple(seed for seed in SEEDS if all((row, seed) in there for row in ROWS))
        if whole:
            seeds[problem] = whole
            summaries = {key: _json(path / "summary.json") for key, path in there.items() if key[1] in whole}
            cells |= {(problem, row): _cell({s: summaries[row, s] for s in whole}) for row in ROWS}
            costs[problem] = [
                {**_json(there[key] / "cost.json"), **summary["environment"]} for key, summary in summaries.items()
            ]
        if (folder / f"time-{problem}.json").exists():
            times[problem] = _json(folder / f"time-{problem}.json")
    return Table(seeds, cells, costs, times)


def _cell(summaries: dict[int, dict[str, Any]]) -> Cell:
    ended = {seed: found for seed, found in summaries.items() if found["status"] == "finished"}
    return Cell(
        {seed: found["test_accuracy"] for seed, found in ended.items()},
        {seed: found["status"] for seed, found in summaries.items() if seed not in ended},
        max(found["auxiliary_bytes"] for found in summaries.values()),
    )


def standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
