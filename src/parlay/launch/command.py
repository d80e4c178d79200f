"""`parlay train --engine distributed`, from a recipe to the summary of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.launch.check import check
from parlay.launch.supervisor import Ending, Launch, run
from parlay.partitioning import Partition
from parlay.recipe import Recipe
from parlay.run.records import environment, read_records, write_json

EMPTY: dict[str, Any] = {
    **dict.fromkeys(("test_accuracy", "test_loss", "train_loss", "auxiliary_bytes")),
    "seconds": dict.fromkeys(("total", "serial_epoch", "parallel_epoch")),
    "violation": [],
}


def train(launch: Launch) -> dict[str, Any]:
    """Check, start, watch. The summary is rank 0's; where that one was lost, or knew less, what is known here."""
    if launch.recipe.method == "serial":  # it is not cut
        launch = replace(launch, recipe=replace(launch.recipe, stages=1, partition="even"))
    cut = check(launch.recipe)
    ending = run(launch)
    if not ending.status:
        raise InputError(ending.message)
    path = launch.out / "summary.json"
    found = _read(path)
    summary = found if ending.whole else {**_known(launch.recipe, cut), **found, **_of(ending, launch.out)}
    if ending.slow:
        told = [summary["message"], *(_slow_line(slow, launch.recipe.replicas) for slow in ending.slow)]
        summary |= {"slow_stages": list(ending.slow), "message": "; ".join(part for part in told if part)}
    if (ending.slow or not ending.whole) and launch.out.is_dir():
        with suppress(OSError):  # a full disk may have been the reason: the line is told all the same
            write_json(path, summary)
    return summary


def _of(ending: Ending, out: Path) -> dict[str, Any]:
    return {"status": ending.status, "message": ending.message, "epochs": len(read_records(out / "records.jsonl"))}


def _known(recipe: Recipe, cut: Partition) -> dict[str, Any]:
    names = ("method", "model", "dataset", "stages", "schedule", "downsample", "seed", "optimizer")
    return {
        **{name: getattr(recipe, name) for name in names},
        "cuts": list(cut.cuts),
        "parameters": sum(w.numel() for w in cut.model.parameters()),
        **EMPTY,
        "environment": environment([]),
    }


def _slow_line(slow: Mapping[str, Any], replicas: int) -> str:
    who = f"stage {slow['stage']}" + (f", replica {slow['replica']}," if replicas > 1 else "")
    return f"slow stage: the steps of {who} took {slow['times']} times as long as those of the others"


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content
