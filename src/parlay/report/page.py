"""The HTML page: tasks, and what else was given, in; one self-contained text out. It asks no network for anything."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from parlay.report import bench, costs, figures, spans, speed, words
from parlay.report.bench import Bench
from parlay.report.groups import Group, Task, epoch_rows, run_rows, to_csv
from parlay.report.inputs import Given
from parlay.report.load import Run
from parlay.report.words import Column

MEASURED = 3
"""Timelines of so many configurations stand in the open; the others stand with their runs."""


@dataclass(frozen=True)
class Picture:
    svg: Markup
    caption: str
    swatch: Markup


@dataclass(frozen=True)
class Timeline:
    caption: str
    svg: Markup
    legend: list[tuple[Markup, str]]


@dataclass(frozen=True)
class Row:
    """Of a table that sorts."""

    cells: list[words.Cell]
    number: int | None = None
    swatch: str = ""
    mark: str = ""
    """unfinished"""


@dataclass(frozen=True)
class Download:
    """A table as a file that lies in the page itself."""

    name: str
    content: str

    @property
    def uri(self) -> str:
        # the byte order mark tells spreadsheets that this is UTF-8
        return (
            "data:text/csv;charset=utf-8;base64,"
            + base64.b64encode(self.content.encode("utf-8-sig", "replace")).decode()
        )


def render(tasks: Sequence[Task], given: Given, title: str) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    added = [(f"section-{n}", one) for n, one in enumerate(given.sections, 1)]
    sections = [_section(task, n) for n, task in enumerate(tasks, 1)]
    benches = [_bench(one, n) for n, one in enumerate(given.benches, 1)]
    alone = len(sections) == 1 and not added
    if alone:  # the speed stands behind the headline, not below all the charts
        sections[0]["benches"] = benches
    contents = [(id, one.title) for id, one in added]
    contents += [(one["id"], f"Runs: {one['task']}") for one in sections]
    contents += [(one["id"], f"Bench: {one['title']}") for one in benches]
    return environment.get_template("page.html.j2").render(
        title=title,
        contents=contents,
        added=added,
        sections=sections,
        benches=[] if alone else benches,
        zip=zip,
    )


def _section(task: Task, number: int) -> dict[str, Any]:
    looks = figures.looks(task)
    numbers = {group.label: n for n, group in enumerate(task.groups, 1)}
    swatches = {label: figures.swatch(look) for label, look in looks.items()}
    few = len(task.groups) <= figures.LINES
    lines = _lines(task)
    table = words.columns(task)
    name = f"{task.dataset}-{task.model}"
    shown = _with_timelines(task)
    return {
        "id": f"task-{number}",
        "task": f"{task.dataset} · {task.model}",
        "headline": words.headline(task),
        "names": words.names(task),
        "facts": words.facts(task),
        "columns": table,
        "rows": [
            Row([c.cells[n - 1] for c in table], n, swatches[group.label], "" if group.finished else "unfinished")
            for n, group in enumerate(task.groups, 1)
        ],
        "notes": words.notes(task),
        "benches": [],
        "measure": "Test accuracy" if task.by_accuracy else "Test loss",
        "better": "above" if task.by_accuracy else "below",
        "has_serial": any(group.serial and group.finished for group in task.groups),
        "csv": Download(f"{name}-comparison.csv", to_csv(speed.rows(task))),
        "runs_csv": Download(f"{name}-runs.csv", to_csv(run_rows(task.groups))),
        "ranking": figures.ranking(task) if len(task.groups) > 1 else None,
        "memory": costs.against_memory(task, numbers),
        "front_only": len(task.groups) > costs.NUMBERED,
        "speed": costs.against_speed(task, numbers) if task.timed else None,
        "legend": [(numbers[group.label], swatches[group.label], group.label) for group in lines],
        "left_out": len([group for group in task.groups if _has_epochs(group)]) - len(lines),
        "curves": [
            figures.curves(task, lines, figures.test_of(task), figures.heading(task, "test"), not task.by_accuracy),
            figures.curves(task, lines, figures.train_of, figures.heading(task, "train"), True),
        ]
        if lines
        else [],
        "few": few,
        "panels": _panels(task, swatches, few),
        "interfaces": _interfaces(task),
        "entries": any(e.violation_at_entry for group in task.groups for run in group.runs for e in run.epochs),
        "timelines": [_timeline(group, run) for group, run in shown],
        "runs": [
            _run(group, run, swatches[group.label], run not in [other for _, other in shown])
            for group in task.groups
            for run in group.runs
        ],
    }


def _lines(task: Task) -> list[Group]:
    """The groups of the common charts: all, or the best ones and a serial one to hold them against."""
    drawn = [group for group in task.ranked() if _has_epochs(group)]
    chosen = drawn[: figures.LINES]
    serial = [group for group in drawn if group.serial]
    if serial and not any(group.serial for group in chosen):
        chosen[-1] = serial[0]
    return [group for group in task.groups if group in chosen]


def _panels(task: Task, swatches: dict[str, Markup], few: bool) -> list[Picture]:
    """Each configuration on its own. Where the common charts show them all, only the violation is left to show."""
    kinds = ["violation"] if few else ["test", "train", "violation"]
    found = []
    for group in task.groups:
        own = [kind for kind in kinds if kind != "violation" or figures.interfaces(group)]
        if own and _has_epochs(group):
            found.append(Picture(figures.panel(task, group, own), group.label, swatches[group.label]))
    return found


def _interfaces(task: Task) -> list[tuple[Markup, str]]:
    count = max((figures.interfaces(group) for group in task.groups), default=0)
    return [(figures.swatch(figures.interface_look(k)), f"interface {k + 1}") for k in range(count)]


def _with_timelines(task: Task) -> list[tuple[Group, Run]]:
    """The first run with a timeline, of the first few configurations that have one."""
    found = [(group, next((run for run in group.runs if run.timeline), None)) for group in task.groups]
    return [(group, run) for group, run in found if run is not None][:MEASURED]


def _timeline(group: Group, run: Run) -> Timeline:
    caption = f"{group.label}, run {run.name}: who did what when, in its last recorded steps"
    return Timeline(caption, spans.timeline(run.timeline, run.name), spans.legend(run.timeline))


def _bench(one: Bench, number: int) -> dict[str, Any]:
    return {
        "id": f"bench-{number}",
        "title": one.title,
        "over": one.over,
        **_table(bench.columns(one)),
        "picture": costs.speeds([(row.system, row.speedup) for row in one.rows if row.speedup], one.title),
        "says": one.says,
        "how": f"{one.rounds} rounds of {one.steps} steps" if one.rounds else "",
        "command": one.command,
        "facts": [(str(key), text) for key, value in one.environment.items() if (text := _value(value))],
        "csv": Download(f"bench-{one.model}-{one.batch_size}.csv", to_csv(bench.table(one))),
    }


def _table(columns: Sequence[Column]) -> dict[str, Any]:
    count = len(columns[0].cells) if columns else 0
    rows = [Row([c.cells[n] for c in columns]) for n in range(count)]
    return {"columns": columns, "rows": rows}


def _run(group: Group, run: Run, swatch: Markup, with_timeline: bool) -> dict[str, Any]:
    facts = [
        ("seed", run.text("seed", words.DASH)),
        ("epochs", str(len(run.epochs))),
        ("test accuracy", f"{words.points(run.test_accuracy)} %" if run.test_accuracy is not None else ""),
        ("test loss", words.loss(run.test_loss) if run.test_loss is not None else ""),
        ("time", words.duration(run.total_seconds)),
        ("parameters", f"{run.parameters:,}" if run.parameters is not None else ""),
        ("cuts before blocks", ", ".join(map(str, run.cuts))),
        *((str(key), _value(value)) for key, value in run.environment.items()),
    ]
    return {
        "name": run.name,
        "label": group.label,
        "swatch": swatch,
        "status": run.status,
        "message": run.message,
        "facts": [(key, value) for key, value in facts if value],
        "recipe": run.recipe_text.strip(),
        "timelines": [_timeline(group, run)] if run.timeline and with_timeline else [],
        "csv": Download(f"{run.name}-epochs.csv", to_csv(epoch_rows(run))) if run.epochs else None,
    }


def _value(value: Any) -> str:
    """Lists with their repetitions counted: a device per stage reads cpu × 3."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    names = [str(item) for item in value]
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{name} × {count}" for name, count in counts.items())


def _has_epochs(group: Group) -> bool:
    return any(run.epochs for run in group.counted)
