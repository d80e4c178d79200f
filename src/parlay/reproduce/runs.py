"""The rows as run folders: made by the runner of comparisons, in this process, or side by side as processes of it.

A row that is there already is not made again, and the same row of another table is the same folder.
"""

from __future__ import annotations

import gc
import math
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from parlay import compare, plan
from parlay.checkpoint import newest
from parlay.compare import Fit, Planned
from parlay.coupling import Streaming
from parlay.errors import InputError
from parlay.filters import downsample
from parlay.progress import Progress
from parlay.recipe import STREAMING, Recipe, flag
from parlay.reproduce import beside
from parlay.reproduce.old_load import Run, load
from parlay.reproduce.paper import Line
from parlay.reproduce.queue import Budget, Queue
from parlay.reproduce.request import Request, selected
from parlay.run import Setup, set_up
from parlay.schedule import Schedule
from parlay.trainer import spread

BESIDE = 8 << 30  # bytes of a process without its states: weights, activations, recorded steps, CUDA itself
ROOM = 0.9  # of the GPU's memory


def carry_out(requests: Sequence[Request], fit: Fit, progress: Progress) -> str:
    """Make the runs that are missing, of all that is asked for; the status of the whole: finished, interrupted or
    failed.
    """
    planned = _each_once([one for request in requests for one in planned_runs(request, selected(request))])
    at_once = requests[0].at_once
    if at_once == 1:
        return compare.carry_out(planned, fit, progress)
    return beside.carry_out(planned, at_once, _room(planned[0].recipe), _bytes, progress)


def serve(queue: Queue, planned: Sequence[Planned], minutes: float, at_once: int, progress: Progress) -> str:
    """The rows of a queue that there is time for; what becomes of them stands in its file. The status of the whole."""
    over = [one for one in planned if compare.is_over(one)]
    left = [one for one in planned if one not in over]
    for one in left:
        _refuse_other_checkpoint(one)
    budget = Budget(queue, left, minutes)
    for one in over:
        queue.note(one)
    if not left:
        return "finished"
    try:
        return beside.carry_out(left, at_once, _room(left[0].recipe), _bytes, progress, budget)
    finally:
        for one in left:
            queue.note(one)


def _refuse_other_checkpoint(one: Planned) -> None:
    """Its recipe and its checkpoint come from another machine, maybe by hand: do they belong together?"""
    found = newest(one.folder / "checkpoints", lambda line: None)  # noqa: ARG005
    if found is None:
        return
    setup = set_up(one.recipe)
    ours: dict[str, Any] = {"seed": setup.recipe.seed, "cuts": list(setup.partition.cuts)}
    theirs = {"seed": found.meta["made_with"]["seed"], "cuts": found.meta["cuts"]}
    schedule = Schedule.parse(setup.recipe.schedule)
    if schedule.kind != "adaptive":
        ours["phases"], theirs["phases"] = schedule.phases(setup.recipe.epochs), found.meta["phases"]
    for name, value in ours.items():
        if theirs[name] != value:
            raise InputError(
                f"{found.path} is of another row (its {name} differ): take it away, or bring that of {one.row.text}"
            )


def _room(recipe: Recipe) -> int | None:
    """Bytes for runs side by side; None where nobody counts."""
    if spread(recipe.device, 1)[0].type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()  # what planning took is for the runs
    return int(ROOM * torch.cuda.mem_get_info()[0])


def _each_once(planned: Sequence[Planned]) -> list[Planned]:
    """Tables and figures share rows."""
    return list({one.folder: one for one in planned}.values())


def planned_runs(request: Request, lines: Sequence[Line]) -> list[Planned]:
    """All seeds of these lines. Whatever can be refused is refused here."""
    planned = compare.plan([request.row(line) for line in lines], request.seeds, request.keys(), request.runs)
    return [as_it_was(one) for one in planned]


def as_it_was(one: Planned) -> Planned:
    """A run that is there, compiled or not, is not another one for that: its seconds are no timings here. Nor is one
    that has been cut by cost before."""
    if not (one.folder / "recipe.toml").is_file():
        return one
    theirs = compare.kept(one.folder)
    measured = ("partition",) if one.recipe.partition == "cost" else ()
    same = {key: theirs[key] for key in ("compile", "capture", *measured) if key in theirs}
    return replace(one, recipe=replace(one.recipe, **same))


def there(request: Request, line: Line) -> list[Path]:
    """The run folders of a line that hold something already."""
    return [folder for folder in request.folders(line) if (folder / "records.jsonl").is_file()]


def loaded(folders: Sequence[Path]) -> list[Run]:
    return load(folders) if folders else []


def recipe_of(request: Request, line: Line) -> Recipe:
    """Of the line's first run where there is one, which knows its cuts; otherwise as it would be made."""
    for folder in there(request, line):
        names = {flag(key.name): key.name for key in fields(Recipe)}
        kept = tomllib.loads((folder / "recipe.toml").read_text())
        return Recipe(**{names[name]: value for name, value in kept.items()})
    return Recipe(**{**request.keys(), **request.row(line).keys})


def formula_bytes(recipe: Recipe) -> int:
    """N · Σ D / r² · bytes · (1, or 2 with multipliers), for the whole data set; of a streaming method, its queues."""
    cut = "even" if recipe.partition == "cost" else recipe.partition  # of a run that is not there yet
    size = recipe.batch_size if recipe.method in STREAMING else 1  # stores do not depend on it
    setup = set_up(replace(recipe, train_samples=0, partition=cut, batch_size=size))
    if isinstance(setup.method, Streaming):
        return _queue_bytes(setup, setup.method)
    return plan.auxiliary_bytes(setup)


def _queue_bytes(setup: Setup, method: Streaming) -> int:
    """In single precision; activations, and networks beside the stages, are not in it."""
    reduce = downsample(setup.recipe.downsample)
    sizes = [math.prod(setup.facts.shape), *(math.prod(reduce.shape(shape)) for shape in setup.partition.shapes), 0]
    batches = [method.kept(k, len(setup.partition)) for k in range(len(setup.partition))]
    elements = sum(i * sizes[k] + o * sizes[k + 1] for k, (i, o) in enumerate(batches))
    return 4 * min(setup.recipe.batch_size, setup.facts.train_size) * elements


def _bytes(one: Planned) -> int:
    return BESIDE + plan.auxiliary_bytes(set_up(one.recipe))
