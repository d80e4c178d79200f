"""A table or figure that was run again, as people read it: its `reproduction.json` as a section of Parlay's page, as
Markdown and as CSV.

Its columns say of themselves what they are: measured here, projected, quoted from the paper, or a formula's.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, final

import jinja2
from markupsafe import Markup

from parlay import report
from parlay.errors import InputError
from parlay.report import Section
from parlay_paper.columns import PER_SAMPLE, QUOTED, SPEEDS, Column, cell, is_number, recorded, telling
from parlay_paper.timelines import Times, draw, legend, of_stages, ways

FILE = "reproduction.json"
DASH = "–"
KINDS = {
    "row": "",
    "measured": "measured here",
    "projected": "projected for K devices",
    "quoted": "quoted from the paper",
    "formula": "by the paper's formula",
}
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@final
@dataclass(frozen=True)
class Table:
    """What was found in a file."""

    title: str
    section: Section
    markdown: str
    folders: tuple[Path, ...]
    """Of its runs."""


def is_table(path: Path) -> bool:
    return path.name == FILE or (path / FILE).is_file()


def read(path: Path) -> Table:
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        names = [str(name) for row in content["rows"] for name in row.get("folders") or ()]
        folders = tuple(dict.fromkeys(file.parent / name for name in names))
        return Table(str(content["title"]), section(content, file.parent), as_markdown(content), folders)
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror}): leave it out, or make it readable") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        word = " ".join(str(error.args[0] if error.args else "value").split())
        raise InputError(f"{file} is damaged ({word}): leave it out, or run parlay reproduce again") from None


def write(tables: Sequence[Table], others: Sequence[Path], output: Path) -> None:
    """The page of tables and their runs. The runs' seconds tell nothing: several may have been made at once."""
    titles = [table.title for table in tables]  # of several the short ones; the contents have them in full
    title = titles[0] if len(titles) == 1 else ", ".join(title.partition(":")[0] for title in titles)
    folders = [folder for table in tables for folder in table.folders if folder.is_dir()]
    report.write([*folders, *others], output, title, beside=True, sections=[table.section for table in tables])


def show(paths: Sequence[Path], output: Path | None) -> int:
    """What `parlay report` does where one of the paths is a table; the others are run folders."""
    tables = [read(path) for path in paths if is_table(path)]
    if output is None:
        output = paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")
    write(tables, [path for path in paths if not is_table(path)], output)
    print("\n".join(table.markdown for table in tables))
    print(f"report: {output}")
    return 0


def section(content: Mapping[str, Any], folder: Path) -> Section:
    heads, rows = recorded(content)
    shown = telling(heads, rows)
    kinds = [KINDS.get(head.kind, head.kind) for head in shown]
    timelines = [_timeline(content, int(k), ms) for k, ms in (content.get("stage_ms") or {}).items() if len(ms) > 1]
    body = _template().render(
        name=str(content["name"]),
        title=str(content["title"]),
        status=str(content.get("status") or ""),
        labels=[str(label) for label in content.get("labels") or ()],
        notes=[str(note) for note in content.get("notes") or ()],
        facts=_facts(rows, content.get("metric") == "test_loss"),
        kinds=[(kind, len(list(same))) for kind, same in groupby(kinds)],
        columns=[{"title": head.short or head.title, "numeric": _is_numeric(head, rows)} for head in shown],
        rows=[
            {"ours": bool(row.get("ours")), "cells": [_cell(row.get(head.key), head) for head in shown]} for row in rows
        ],
        csv=_uri(as_csv(heads, rows).encode("utf-8-sig", "replace"), "text/csv;charset=utf-8"),
        pictures=[_picture(folder, one) for one in content.get("figures") or () if (folder / _file(one)).is_file()],
        timelines=timelines,
        command=str(content.get("command") or ""),
        zip=zip,
    )
    return Section(str(content["title"]), Markup(body))


def as_markdown(content: Mapping[str, Any]) -> str:
    heads, rows = recorded(content)
    lines = [f"# {content['title']}", ""]
    seeds = ", ".join(map(str, content["seeds"]))
    lines += [f"`{content['command']}`; seeds {seeds}; {', '.join(content['environment']['devices'])}.", ""]
    if content["labels"]:
        lines += [f"**Not the paper's experiment:** {'; '.join(content['labels'])}.", ""]
    heads = telling(heads, rows)
    lines.append("| " + " | ".join(head.title for head in heads) + " |")
    lines.append("|" + "|".join("---" if head.key == "label" else "--:" for head in heads) + "|")
    for row in rows:
        cells = [cell(row.get(head.key), head) for head in heads]
        if row.get("ours"):
            cells[0] += " (not in the paper)"
        italic = [
            f"*{text}*" if text and head.kind == QUOTED else text for text, head in zip(cells, heads, strict=True)
        ]
        lines.append("| " + " | ".join(italic) + " |")
    lines += ["", *(f"- {note}" for note in content["notes"])]
    lines += [f"\n![{figure['caption']}]({figure['file']})" for figure in content["figures"]]
    return "\n".join(lines) + "\n"


def as_csv(heads: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Numbers in full; the name of a row, by which `--rows` knows it, in front."""
    text = io.StringIO()
    names = ["row", *(head.key for head in heads)]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _facts(rows: Sequence[Mapping[str, Any]], by_loss: bool) -> list[tuple[str, str, str]]:
    """Serial training, the best row of the paper's methods, the best that is not in the paper, and their speeds."""
    found = []
    groups = {
        "serial training": [row for row in rows if row.get("method") == "serial"],
        "best of the paper's methods": [row for row in rows if row.get("method") != "serial" and not row.get("ours")],
        "best that is not in the paper": [row for row in rows if row.get("ours")],
    }
    for name, group in groups.items():
        known = [row for row in group if is_number(row.get("value"))]
        if not known:
            continue
        best = (min if by_loss else max)(known, key=lambda row: float(row["value"]))
        value = f"{best['value']:.4f}" if by_loss else f"{best['value']:.2f} %"
        speeds = [
            f"{best[key + PER_SAMPLE]:.2f} {KINDS[kind]}"
            for key, (kind, _) in SPEEDS.items()
            if is_number(best.get(key + PER_SAMPLE))
        ]
        told = [f"speed-up over serial per sample trained: {', '.join(speeds)}"] if speeds else []
        found.append((value, name, "; ".join([str(best.get("label", "")), *told])))
    return found


def _timeline(content: Mapping[str, Any], stages: int, stage_ms: Sequence[float]) -> tuple[str, Any, Markup]:
    """Caption, legend and drawing, by the schedule of the first hybrid row."""
    times = times_of(content, str(stages), stage_ms)
    drawn = ways(times, next((str(row["schedule"]) for row in content["rows"] if row.get("ratio")), ""))
    sent = " and what crosses between them" if any(times.messages) else ""
    caption = f"{stages} stages, by their times as measured alone{sent}"
    return caption, legend(drawn), draw(drawn, times.stages, f"{content['name']} {stages}")


def times_of(content: Mapping[str, Any], stages: str, stage_ms: Sequence[float]) -> Times:
    messages = [float(ms) for ms in (content.get("message_ms") or {}).get(stages, [])]
    if messages and len(messages) != len(stage_ms):
        raise ValueError("message_ms")
    return of_stages(stage_ms, float(content["serial_ms"]) if content.get("serial_ms") else None, messages)


def _cell(value: Any, column: Column) -> tuple[str, Any]:
    """Text, and what the column is sorted by."""
    text = cell(value, column)
    if not text or (isinstance(value, float) and not is_number(value)):
        return DASH, ""
    return text, value if is_number(value) else text.lower()


def _is_numeric(column: Column, rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(row.get(column.key) is None or is_number(row[column.key]) for row in rows)


def _file(figure: Mapping[str, Any]) -> str:
    """Its name: a figure lies beside the table."""
    return Path(str(figure["file"])).name


def _picture(folder: Path, figure: Mapping[str, Any]) -> tuple[str, str]:
    """As a data URI, and its caption: an SVG in an image runs no scripts and loads nothing."""
    path = folder / _file(figure)
    if path.suffix not in TYPES:
        raise ValueError(f"{path.name} is neither SVG nor PNG")
    return _uri(path.read_bytes(), TYPES[path.suffix]), str(figure.get("caption", ""))


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    undefined = jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("section.html.j2")
