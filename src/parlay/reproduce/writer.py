"""What a reproduction leaves behind: `reproduction.json`, the table as CSV and Markdown, pictures, the report page."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from markupsafe import Markup

from parlay import report
from parlay.checkpoint import atomic_write
from parlay.recipe import Recipe
from parlay.records import write_json
from parlay.reproduce import columns, runs
from parlay.reproduce.columns import QUOTED, Column, Facts
from parlay.reproduce.figures import Shown, draw, save
from parlay.reproduce.old_load import Run
from parlay.reproduce.paper import MISPRINTS
from parlay.reproduce.request import Request
from parlay.reproduce.speed import Timing, Timings, speedups

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
NO_TIMES: dict[str, Any] = {"serial_ms": None, "stage_ms": {}, "message_ms": {}}
OF_PRINT = "Columns headed paper are quoted from it."
OF_MISPRINTS = " Of its memory {printed} are misprints ({meant})."


@final
@dataclass(frozen=True)
class Found:
    """What there is of an experiment: everything in the order of its lines."""

    folders: list[list[Path]]
    runs: list[list[Run]]
    recipes: list[Recipe]
    timings: list[Timing | None]
    environment: Mapping[str, Any]
    """Of the timings, or where there are none of the first run that has finished."""
    rows: list[dict[str, Any]]


def write(request: Request, status: str, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that can be said of the runs that are there; the object of `--json`.

    What is missing is timed first, now that all is quiet, where speeds are shown, but not after an interrupt.
    """
    found = _found(request, say if request.experiment.shows_speed and status != "interrupted" else None)
    request.folder.mkdir(parents=True, exist_ok=True)
    heads = columns.columns(request.loss)
    told = {
        "name": request.name,
        "title": request.experiment.title,
        "status": status,
        "workload": request.experiment.workload,
        "model": found.recipes[0].model,
        "dataset": found.recipes[0].dataset,
        "epochs": request.keys()["epochs"],
        "paper_epochs": request.workload.epochs,
        "scale": request.scale,
        "seeds": list(request.seeds),
        "labels": request.labels(),
        "notes": _notes(request, found),
        "metric": "test_loss" if request.loss else "test_accuracy",
        "columns": columns.as_json(heads),
        "rows": found.rows,
        "figures": _drawn(request, found),
        **(_stage_times(found) if request.experiment.shows_speed else NO_TIMES),
        "command": command,
        "environment": found.environment,
    }
    write_json(request.folder / "reproduction.json", told)
    atomic_write(request.folder / f"{request.name}.csv", as_csv(heads, found.rows))
    atomic_write(request.folder / f"{request.name}.md", as_markdown(told, heads, found.rows))
    made = [folder for each in found.folders for folder in each]
    if made:
        text = Markup("<pre>{}</pre>").format(as_markdown(told, heads, found.rows))
        sections = [report.Section(request.experiment.title, text)]
        report.write(made, request.folder / "report.html", request.experiment.title, sections=sections)
    return told


def _found(request: Request, say: Callable[[str], None] | None) -> Found:
    lines, timings = request.lines, Timings(request.runs / "timings.json", Recipe(**request.keys()).device)
    folders = [runs.there(request, line) for line in lines]
    made = [runs.loaded(each) for each in folders]
    recipes = [runs.recipe_of(request, line) for line in lines]
    if say is not None:
        timings.add([r for r, each in zip(recipes, made, strict=True) if any(run.finished for run in each)], say)
    rows = []
    for line, recipe, each, paths in zip(lines, recipes, made, folders, strict=True):
        apart = line.method != "serial"
        measured, projected = speedups(timings.of(recipe), columns.phases(each))
        needed = runs.formula_bytes(recipe) if apart else None
        facts = Facts(recipe.schedule if apart else "serial", needed, measured, projected)
        relative = [os.path.relpath(path, request.folder) for path in paths]
        rows.append({**columns.row(line, each, facts, request.loss), "folders": relative})
    known = [timings.of(recipe) for recipe in recipes]
    of_runs = next((run.environment for each in made for run in each if run.finished), timings.environment)
    return Found(folders, made, recipes, known, timings.environment if any(known) else of_runs, rows)


def _notes(request: Request, found: Found) -> list[str]:
    printed = [line.quoted.memory for line in request.lines]
    wrong = [memory for memory in MISPRINTS if memory in printed]
    told = OF_PRINT
    if wrong:
        told += OF_MISPRINTS.format(printed=_listed(wrong), meant=_listed(MISPRINTS[memory] for memory in wrong))
    halves = any((row["trained_share"] or 1) < 1 for row in found.rows)
    of_speed = (*OF_SPEED, *([OF_HALVES] if halves else ())) if request.experiment.shows_speed else ()
    return [*of_speed, told]


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


def _drawn(request: Request, found: Found) -> list[dict[str, str]]:
    shown = Shown(request.lines, found.rows, found.runs, found.folders, request.keys()["epochs"], request.loss)
    pictures = [one for kind in request.experiment.figures for one in draw(kind, shown, request.name)]
    return [{"file": save(one, request.folder)[0].name, "caption": one.caption} for one in pictures]


def _stage_times(found: Found) -> dict[str, Any]:
    """By the number of stages, of the method that computes whole batches, for a timeline of them."""
    known = [(r, t) for r, t in zip(found.recipes, found.timings, strict=True) if t is not None and r.method == "al"]
    return {
        "serial_ms": known[0][1].serial_ms if known else None,
        "stage_ms": {str(recipe.stages): timing.stage_ms for recipe, timing in reversed(known)},
        "message_ms": {str(recipe.stages): timing.message_ms for recipe, timing in reversed(known)},
    }


def as_csv(heads: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Numbers in full; the name of a row, by which `--rows` knows it, in front."""
    text = io.StringIO()
    names = ["row", *(head.key for head in heads)]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(told: Mapping[str, Any], heads: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"# {told['title']}", ""]
    seeds = ", ".join(map(str, told["seeds"]))
    lines += [f"`{told['command']}`; seeds {seeds}; {', '.join(told['environment']['devices'])}.", ""]
    if told["labels"]:
        lines += [f"**Not the paper's experiment:** {'; '.join(told['labels'])}.", ""]
    heads = columns.telling(heads, rows)
    lines.append("| " + " | ".join(head.title for head in heads) + " |")
    lines.append("|" + "|".join("---" if head.key == "label" else "--:" for head in heads) + "|")
    for row in rows:
        cells = [columns.cell(row[head.key], head) for head in heads]
        if row["ours"]:
            cells[0] += " (not in the paper)"
        italic = [
            f"*{text}*" if text and head.kind == QUOTED else text for text, head in zip(cells, heads, strict=True)
        ]
        lines.append("| " + " | ".join(italic) + " |")
    lines += ["", *(f"- {note}" for note in told["notes"])]
    lines += [f"\n![{figure['caption']}]({figure['file']})" for figure in told["figures"]]
    return "\n".join(lines) + "\n"
