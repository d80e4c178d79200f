"""A table that was run again, as people read it: its `reproduction.json` as a section of Parlay's page, as Markdown
and as CSV. Its columns say of themselves whether they were measured here, projected, quoted, or follow from a formula.
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
from parlay_paper.columns import PER_SAMPLE, QUOTED, SPEEDS, Column, Row, cell, is_number, recorded, telling
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


def read(path: Path) -> Table:
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        title, names = str(content["title"]), [name for row in content["rows"] for name in row.get("folders") or ()]
        folders = tuple(dict.fromkeys(file.parent / str(name) for name in names))
        return Table(title, Section(title, section(content, file.parent)), as_markdown(content), folders)
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror}): leave it out, or make it readable") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        word = error.args[0] if error.args else "value"
        raise InputError(f"{file} is damaged ({word}): leave it out, or run parlay reproduce again") from None


def write(tables: Sequence[Table], others: Sequence[Path], output: Path) -> None:
    """The page of tables and runs. The runs' seconds tell nothing: several may have been made at once."""
    titles = [table.title for table in tables]
    title = titles[0] if len(titles) == 1 else ", ".join(title.partition(":")[0] for title in titles)
    folders = [folder for table in tables for folder in table.folders if folder.is_dir()]
    report.write([*folders, *others], output, title, sections=[table.section for table in tables])


def show(paths: Sequence[Path], output: Path | None) -> int:
    """What `parlay report` does where one of the paths is a table; the others are run folders."""
    of_tables = [path for path in paths if path.name == FILE or (path / FILE).is_file()]
    tables = [read(path) for path in of_tables]
    if output is None:
        output = paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")
    write(tables, [path for path in paths if path not in of_tables], output)
    print("\n".join(table.markdown for table in tables))
    print(f"report: {output}")
    return 0


def section(content: Row, folder: Path) -> Markup:
    heads, rows = recorded(content)
    shown = telling(heads, rows)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    kinds = groupby(KINDS.get(head.kind, head.kind) for head in shown)
    body = environment.get_template("section.html.j2").render(
        **{key: str(content.get(key) or "") for key in ("name", "title", "status", "command")},
        **{key: [str(text) for text in content.get(key) or ()] for key in ("labels", "notes")},
        facts=_facts(rows, content.get("metric") == "test_loss"),
        kinds=[(kind, len(list(same))) for kind, same in kinds],
        columns=[(head.short or head.title, _is_numeric(head, rows)) for head in shown],
        rows=[(row.get("ours"), [_cell(row.get(head.key), head) for head in shown]) for row in rows],
        csv=_uri(as_csv(heads, rows).encode("utf-8-sig", "replace"), "text/csv;charset=utf-8"),
        pictures=[_picture(folder, one) for one in content.get("figures") or () if (folder / _name(one)).is_file()],
        timelines=[_timeline(content, stages) for stages, ms in (content.get("stage_ms") or {}).items() if len(ms) > 1],
        zip=zip,
    )
    return Markup(body)


def as_markdown(content: Row) -> str:
    heads, rows = recorded(content)
    heads = telling(heads, rows)
    seeds, devices = ", ".join(map(str, content["seeds"])), ", ".join(content["environment"]["devices"])
    lines = [f"# {content['title']}", "", f"`{content['command']}`; seeds {seeds}; {devices}.", ""]
    if content["labels"]:
        lines += [f"**Not the paper's experiment:** {'; '.join(content['labels'])}.", ""]
    lines.append("| " + " | ".join(head.title for head in heads) + " |")
    lines.append("|" + "|".join("---" if head.key == "label" else "--:" for head in heads) + "|")
    for row in rows:
        texts = [(cell(row.get(head.key), head), head.kind == QUOTED) for head in heads]
        cells = [f"*{text}*" if text and quoted else text for text, quoted in texts]
        cells[0] += " (not in the paper)" if row.get("ours") else ""
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- {note}" for note in content["notes"])]
    lines += [f"\n![{figure['caption']}]({figure['file']})" for figure in content["figures"]]
    return "\n".join(lines) + "\n"


def as_csv(heads: Sequence[Column], rows: Sequence[Row]) -> str:
    """Numbers in full; the name of a row, by which `--rows` knows it, in front."""
    text = io.StringIO()
    names = ["row", *(head.key for head in heads)]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def times_of(content: Row, stages: str) -> Times:
    """Of so many stages, as timed in isolation."""
    stage_ms, serial = content["stage_ms"][stages], content.get("serial_ms")
    messages = [float(ms) for ms in (content.get("message_ms") or {}).get(stages, ())]
    if messages and len(messages) != len(stage_ms):
        raise ValueError("message_ms")
    return of_stages(stage_ms, float(serial) if serial else None, messages)


def _timeline(content: Row, stages: str) -> tuple[str, list[tuple[int, str]], Markup]:
    """Caption, legend and drawing, by the schedule of the first hybrid row."""
    times = times_of(content, stages)
    drawn = ways(times, next((str(row["schedule"]) for row in content["rows"] if row.get("ratio")), ""))
    sent = " and what crosses between them" if times.messages else ""
    caption = f"{int(stages)} stages, by their times as measured alone{sent}"
    return caption, legend(drawn), draw(drawn, times.stages, f"{content['name']} {stages}")


def _facts(rows: Sequence[Row], by_loss: bool) -> list[tuple[str, str, str]]:
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
        speeds = [(best.get(key + PER_SAMPLE), KINDS[kind]) for key, (kind, _) in SPEEDS.items()]
        ratios = ", ".join(f"{ratio:.2f} {kind}" for ratio, kind in speeds if is_number(ratio))
        whose = str(best.get("label", "")) + (f"; speed-up over serial per sample trained: {ratios}" if ratios else "")
        found.append((f"{best['value']:.4f}" if by_loss else f"{best['value']:.2f} %", name, whose))
    return found


def _cell(value: Any, column: Column) -> tuple[str, Any]:
    """Text, and what the column is sorted by."""
    text = cell(value, column)
    return (text, value if is_number(value) else text.lower()) if text else (DASH, "")


def _is_numeric(column: Column, rows: Sequence[Row]) -> bool:
    return all(row.get(column.key) is None or is_number(row[column.key]) for row in rows)


def _name(figure: Mapping[str, Any]) -> str:
    """Of its file: a figure lies beside the table."""
    return Path(str(figure["file"])).name


def _picture(folder: Path, figure: Mapping[str, Any]) -> tuple[str, str]:
    """As a data URI, and its caption: an SVG in an image runs no scripts and loads nothing."""
    path = folder / _name(figure)
    return _uri(path.read_bytes(), TYPES[path.suffix]), str(figure.get("caption", ""))


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
