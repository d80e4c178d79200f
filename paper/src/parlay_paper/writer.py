"""What a reproduction leaves behind: `reproduction.json`, the table as CSV and Markdown, pictures, the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from parlay.config.recipe import Recipe, make_recipe
from parlay.files import write_whole
from parlay.run.records import write_json
from parlay_paper import columns, page, runs
from parlay_paper.figures import Scene, Shown, draw, save
from parlay_paper.request import Request
from parlay_paper.speed import Timing, Timings, speedups
from parlay_paper.tables import MISPRINTS, Line

OF_SPEED = (
    "Baseline of every speed-up here: serial training of the same network, with the same batch and the same engine.",
    "Measured speed-up: a parallel step against a serial one, in turn in one process on the devices at hand; hybrids "
    "by their share of serial epochs. Empty on a CPU, whose cores all stages of a process share.",
    "Projected speed-up: a device for each stage, from stages timed alone and what crosses the interfaces, by the "
    "paper's formulas.",
)
OF_HALVES = (
    "In a parallel epoch a stage of Penalty trains on half of the samples (order red-black). "
    "Its speed-up over serial counts epochs; the column beside it counts samples trained."
)


def write(request: Request, status: str, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that can be said of the runs that are there; the object of `--json`.

    What is missing is timed first, now that all is quiet, where speeds are shown, but not after an interrupt.
    """
    made = {line: runs.there(request, line) for line in request.lines}
    recipes = {line: runs.recipe_of(request, line, made[line]) for line in request.lines}
    ended = [run for each in made.values() for run in each if run.finished]
    timings = Timings(request.runs / "timings.json", make_recipe(request.keys(), {}).device)
    speeds = request.experiment.shows_speed
    if speeds and status != "interrupted":
        timings.add([recipes[line] for line in made if any(run.finished for run in made[line])], say)
    known = {line: timing for line, recipe in recipes.items() if (timing := timings.of(recipe)) is not None}
    rows = [_row(request, line, recipes[line], made[line], known.get(line)) for line in request.lines]
    environment = ended[0].summary["environment"] if ended and not known else timings.environment
    request.folder.mkdir(parents=True, exist_ok=True)
    keys, first = request.keys(), recipes[request.lines[0]]
    shown = [Shown(line, row, made[line]) for line, row in zip(request.lines, rows, strict=True)]
    scene = Scene(request.name, shown, keys["epochs"], request.loss, request.data_dir)
    drawn = [one for kind in request.experiment.figures for one in draw(kind, scene)]
    heads = columns.columns(request.loss)
    content = {
        "name": request.name,
        "title": request.experiment.title,
        "status": status,
        "workload": request.experiment.workload,
        "model": first.model,
        "dataset": first.dataset,
        "epochs": keys["epochs"],
        "paper_epochs": request.workload.epochs,
        "scale": request.scale,
        "seeds": list(request.seeds),
        "labels": request.labels(),
        "notes": _notes(request, rows),
        "metric": "test_loss" if request.loss else "test_accuracy",
        "columns": [{**asdict(head), "short": head.short or head.title} for head in heads],
        "rows": rows,
        "figures": [{"file": save(one, request.folder)[0].name, "caption": one.caption} for one in drawn],
        **_stage_times(known if speeds else {}),
        "command": command,
        "environment": environment,
    }
    write_json(request.folder / page.FILE, content)
    write_whole(request.folder / f"{request.name}.csv", page.as_csv(heads, rows))
    write_whole(request.folder / f"{request.name}.md", page.as_markdown(content))
    if any(made.values()):
        page.write([page.read(request.folder)], [], request.folder / "report.html")
    return content


def _row(
    request: Request, line: Line, recipe: Recipe, made: Sequence[runs.Run], timing: Timing | None
) -> dict[str, Any]:
    apart = line.method != "serial"
    needed = runs.formula_bytes(recipe) if apart and not line.ours else None
    schedule, speeds = recipe.schedule if apart else "serial", speedups(timing, columns.phases(made))
    folders = [os.path.relpath(run.folder, request.folder) for run in made]
    return {**columns.row(line, made, request.loss, schedule, needed, speeds), "folders": folders}


def _notes(request: Request, rows: Iterable[dict[str, Any]]) -> list[str]:
    printed = [line.quoted.memory for line in request.lines]
    wrong = {memory: meant for memory, meant in MISPRINTS.items() if memory in printed}
    quoted = "Columns headed paper are quoted from it."
    if wrong:
        numbers, meant = (", ".join(f"{one:.2f}" for one in each) for each in (wrong, wrong.values()))
        quoted += f" Of its memory {numbers} are misprints ({meant})."
    halves = any((row["trained_share"] or 1) < 1 for row in rows)
    of_speed = (*OF_SPEED, *([OF_HALVES] if halves else ())) if request.experiment.shows_speed else ()
    return [*of_speed, quoted]


def _stage_times(known: dict[Line, Timing]) -> dict[str, Any]:
    """By the number of stages, of the method that computes whole batches, for a timeline of them."""
    of_al = [(str(line.stages), timing) for line, timing in known.items() if line.method == "al"]
    return {
        "serial_ms": of_al[0][1].serial_ms if of_al else None,
        "stage_ms": {stages: timing.stage_ms for stages, timing in reversed(of_al)},
        "message_ms": {stages: timing.message_ms for stages, timing in reversed(of_al)},
    }
