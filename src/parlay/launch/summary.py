"""The summary of a run: rank 0's, and where that one was lost or knew less, what is known here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.launch.check import check
from parlay.launch.supervise import Launch, run
from parlay.partitioning import Partition
from parlay.run.records import environment, read_records, write_json

EMPTY: dict[str, Any] = {
    **dict.fromkeys(("test_accuracy", "test_loss", "train_loss", "auxiliary_bytes")),
    "seconds": dict.fromkeys(("total", "serial_epoch", "parallel_epoch")),
    "violation": [],
}


def train(launch: Launch) -> dict[str, Any]:
    """Check, start, watch, and give the summary."""
    if launch.recipe.method == "serial":  # it is not cut
        launch = replace(launch, recipe=replace(launch.recipe, stages=1, partition="even"))
    cut = check(launch.recipe)
    outcome = run(launch)
    if not outcome.status:
        raise InputError(outcome.message)
    path = launch.out / "summary.json"
    summary = _read(path)
    if not outcome.whole:
        epochs = len(read_records(launch.out / "records.jsonl"))
        status = {"status": outcome.status, "message": outcome.message, "epochs": epochs}
        summary = {**_known(launch.recipe, cut), **summary, **status}
    if outcome.slow:
        lines = [summary["message"], *(_slow_line(slow, launch.recipe.replicas) for slow in outcome.slow)]
        summary |= {"slow_stages": list(outcome.slow), "message": "; ".join(line for line in lines if line)}
    if (outcome.slow or not outcome.whole) and launch.out.is_dir():
        with suppress(OSError):  # a full disk may have been the reason: the line is told all the same
            write_json(path, summary)
    return summary


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
