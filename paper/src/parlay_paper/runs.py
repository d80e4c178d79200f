"""The rows as run folders: which are there, which are missing, and what they hold.

A row that is there already is not made again, and the same row of another table is the same folder.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from parlay import compare, methods, plan
from parlay.compare import Fit, Planned
from parlay.config.recipe import Recipe, make_recipe, read_recipe
from parlay.config.schedule import Schedule
from parlay.errors import InputError
from parlay.run.checkpoints import newest
from parlay.run.progress import Progress
from parlay.run.records import RECORDS, SUMMARY, read_records, read_summary
from parlay.run.setup import set_up
from parlay.stage.precision import chosen_device
from parlay_paper import side_by_side
from parlay_paper.queue import Budget, Queue
from parlay_paper.request import Request
from parlay_paper.tables import Line

PROCESS = 8 << 30  # bytes of a process without its states: weights, activations, captured steps, CUDA itself
ROOM = 0.9  # of the GPU's memory


@final
@dataclass(frozen=True)
class Run:
    """A run folder, as far as a table or a figure needs it."""

    folder: Path
    recipe: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]]
    """The lines of `records.jsonl`."""
    summary: Mapping[str, Any]
    """Empty while the run goes on."""

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unfinished"))

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def phases(self) -> str:
        """Those that it has had: P or S for each epoch."""
        return "".join(str(epoch["phase"])[0].upper() for epoch in self.epochs)


def load(folder: Path) -> Run:
    return Run(folder, compare.kept(folder), read_records(folder / RECORDS), read_summary(folder / SUMMARY) or {})


def carry_out(requests: Sequence[Request], fit: Fit, progress: Progress) -> str:
    """Make the runs that are missing, of all requests. Gives finished, interrupted or failed."""
    every = [one for request in requests for one in planned_runs(request, request.selected)]
    planned = list({one.folder: one for one in every}.values())  # tables and figures share rows
    at_once = requests[0].at_once
    if at_once == 1:
        return compare.carry_out(planned, fit, progress)
    return side_by_side.carry_out(planned, at_once, _room(planned[0].recipe), _bytes, progress)


def serve(queue: Queue, planned: Sequence[Planned], minutes: float, at_once: int, progress: Progress) -> str:
    """Make the rows of a queue that there is time for, and write to its file what became of each."""
    left = [one for one in planned if not compare.is_over(one)]
    for one in left:
        _refuse_other_checkpoint(one)
    budget = Budget(queue, left, minutes)
    try:
        if not left:
            return "finished"
        return side_by_side.carry_out(left, at_once, _room(left[0].recipe), _bytes, progress, budget)
    finally:
        for one in planned:
            queue.note(one)


def planned_runs(request: Request, lines: Sequence[Line]) -> list[Planned]:
    """All seeds of these lines. Whatever can be refused is refused here."""
    planned = compare.plan([request.row(line) for line in lines], request.seeds, request.keys(), request.runs)
    return [as_it_was(one) for one in planned]


def as_it_was(one: Planned) -> Planned:
    """A run that is there is kept whether it was compiled or not: its seconds are no timings. So are measured cuts."""
    if not (one.folder / "recipe.toml").is_file():
        return one
    theirs = compare.kept(one.folder)
    measured = ("partition",) if one.recipe.partition == "cost" else ()
    same = {key: theirs[key] for key in ("compile", "capture", *measured) if key in theirs}
    return replace(one, recipe=replace(one.recipe, **same))


def there(request: Request, line: Line) -> list[Run]:
    """The runs of a line, as far as they have come."""
    return [load(folder) for folder in request.folders(line) if (folder / "records.jsonl").is_file()]


def recipe_of(request: Request, line: Line, made: Sequence[Run]) -> Recipe:
    """That of the line's first run, which knows its cuts; otherwise as it would be made."""
    if made:
        return recipe_in(made[0].folder)
    left_out = set(methods.every_option()) - set(methods.option_names(line.method))
    keys = {name: value for name, value in request.keys().items() if name not in left_out}
    return make_recipe(keys, request.row(line).keys)


def recipe_in(folder: Path) -> Recipe:
    return make_recipe(read_recipe(folder / "recipe.toml", methods.every_option()), {})


def formula_bytes(recipe: Recipe) -> int:
    """The paper's formula, for the whole data set: N · Σ D / r² · bytes · (1, or 2 with multipliers)."""
    cut = "even" if recipe.partition == "cost" else recipe.partition  # of a run that is not there yet
    return plan.auxiliary_bytes(set_up(replace(recipe, train_samples=0, partition=cut, batch_size=1)))


def _refuse_other_checkpoint(one: Planned) -> None:
    """Recipe and checkpoint may come from another machine, copied by hand: do they belong together?"""
    found = newest(one.folder / "checkpoints", lambda line: None)  # noqa: ARG005
    if found is None:
        return
    setup = set_up(one.recipe)
    schedule = Schedule.parse(setup.recipe.schedule)
    ours = {"seed": setup.recipe.seed, "cuts": list(setup.partition.cuts)}
    theirs = {"seed": found.meta["made_with"]["seed"], **found.meta}
    if schedule.kind != "adaptive":
        ours["phases"] = schedule.phases(setup.recipe.epochs)
    for name in (name for name, value in ours.items() if theirs[name] != value):
        other = f"{found.path} is of another row (its {name} differ)"
        raise InputError(f"{other}: take it away, or bring that of {one.row.text}")


def _room(recipe: Recipe) -> int | None:
    """Bytes for runs side by side; None on a CPU, where nobody counts."""
    if chosen_device(recipe.device).type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()  # what planning took is for the runs
    return int(ROOM * torch.cuda.mem_get_info()[0])


def _bytes(one: Planned) -> int:
    return PROCESS + plan.auxiliary_bytes(set_up(one.recipe))
