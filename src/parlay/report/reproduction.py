"""A table or figure of the paper, run again: the `reproduction.json` of `parlay reproduce`, as the page shows it.

Its columns say of themselves what they are: measured here, projected, quoted from the paper, or a formula's. They are
never mixed, and the page writes the kind above each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.report import pictures
from parlay.report.simulate import Times, of_stages
from parlay.report.words import DASH, Cell, Column
from parlay.reproduce.old_load import shown, trained_share
from parlay.schedule import Schedule

FILE = "reproduction.json"
FINISHED = re.compile(r"\d+ finished")
SPEEDS, PER_SAMPLE = ("speedup_measured", "speedup_projected"), "_per_sample"
KINDS = {
    "row": "",
    "measured": "measured here",
    "projected": "projected for K devices",
    "quoted": "quoted from the paper",
    "formula": "by the paper's formula",
}


@dataclass(frozen=True)
class Picture:
    source: str
    """As a data URI: an SVG in an image runs no scripts and loads nothing."""
    caption: str


@dataclass(frozen=True)
class Reproduction:
    name: str
    title: str
    status: str
    labels: tuple[str, ...]
    """What was shortened, in words."""
    notes: tuple[str, ...]
    """What a reader of its columns must know."""
    facts: tuple[tuple[str, str, str], ...]
    """The numbers at its head: value, what it is, whose it is."""
    columns: tuple[Column, ...]
    """Those that have something to show."""
    kinds: tuple[str, ...]
    """Of each of them."""
    rows: tuple[dict[str, Any], ...]
    """Plain values by column, for a spreadsheet."""
    ours: tuple[bool, ...]
    """Rows that the paper does not have."""
    pictures: tuple[Picture, ...]
    times: dict[int, Times]
    """Of the stages, by their number."""
    hybrid: str
    """The schedule of its first hybrid row, if there is one."""
    command: str
    folders: tuple[Path, ...]

    @property
    def named_columns(self) -> list[Column]:
        """With their kinds in the titles, where there is no room above these."""
        pairs = zip(self.columns, self.kinds, strict=True)
        return [replace(column, title=f"{column.title} ({kind})" if kind else column.title) for column, kind in pairs]


def read(path: Path) -> Reproduction:
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return _read(content, file.parent)
    except OSError as error:
        raise InputError(f"cannot read {shown(file)} ({error.strerror}): leave it out, or make it readable") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        word = shown(str(error.args[0])) if error.args else "value"
        raise InputError(f"{shown(file)} is damaged ({word}): leave it out, or run parlay reproduce again") from None


def _read(content: Any, folder: Path) -> Reproduction:
    rows, heads = content["rows"], _with_samples(content)
    asked = [one for one in heads if _tells(one["key"], rows)]
    columns = tuple(
        Column(
            str(one.get("short") or one["title"]),
            tuple(_cell(row.get(one["key"]), one.get("digits")) for row in rows),
            str(one.get("note", "")),
        )
        for one in asked
    )
    serial = content.get("serial_ms")
    stage_ms: dict[str, list[float]] = content.get("stage_ms") or {}
    return Reproduction(
        name=str(content["name"]),
        title=str(content.get("title") or content["name"]),
        status=str(content.get("status") or ""),
        labels=tuple(map(str, content.get("labels") or ())),
        notes=tuple(map(str, content.get("notes") or ())),
        facts=tuple(_facts(rows, str(content.get("metric")) == "test_loss")),
        columns=columns,
        kinds=tuple(KINDS.get(str(one.get("kind")), str(one.get("kind"))) for one in asked),
        rows=tuple({str(one["key"]): row.get(one["key"]) for one in heads} for row in rows),
        ours=tuple(bool(row.get("ours")) for row in rows),
        pictures=tuple(_picture(folder, one) for one in content.get("figures") or () if _is_there(folder, one)),
        times={
            int(k): of_stages(ms, float(serial) if serial else None, _messages(content, k, ms))
            for k, ms in stage_ms.items()
            if ms
        },
        hybrid=next((str(row["schedule"]) for row in rows if row.get("ratio")), ""),
        command=str(content.get("command") or ""),
        folders=tuple(dict.fromkeys(folder / str(name) for row in rows for name in row.get("folders") or ())),
    )


def _with_samples(content: Any) -> list[Any]:
    """The columns. Records of before lack the speed-ups per sample trained; these follow from the schedule."""
    found: list[Any] = []
    known = [one["key"] for one in content["columns"]]
    for one in content["columns"]:
        found.append(one)
        if one["key"] in SPEEDS and one["key"] + PER_SAMPLE not in known:
            found[-1] = {**one, "short": "speed\N{NON-BREAKING HYPHEN}up over serial"}
            found.append({**one, "key": one["key"] + PER_SAMPLE, "short": "per sample trained"})
    for row in content["rows"]:
        for key in SPEEDS:
            share = _share(row, content) if _is_number(row.get(key)) else None
            row.setdefault(key + PER_SAMPLE, None if share is None else row[key] * share)
    return found


def _share(row: Any, content: Any) -> float | None:
    joint = any(str(label).startswith("order joint") for label in content.get("labels") or ())
    method, schedule = str(row.get("method")), str(row.get("schedule"))
    if method != "penalty" or joint:
        return 1.0
    if schedule == "adaptive":
        return None
    phases = Schedule.parse(schedule).phases(int(content["epochs"]))
    return trained_share(method, int(row["stages"]), "", phases)


def _facts(rows: Sequence[Any], by_loss: bool) -> list[tuple[str, str, str]]:
    """Serial training, the best row of the paper's methods and the best that is not in the paper, and their speeds."""
    found = []
    kinds = {
        "serial training": [row for row in rows if row.get("method") == "serial"],
        "best of the paper's methods": [row for row in rows if row.get("method") != "serial" and not row.get("ours")],
        "best that is not in the paper": [row for row in rows if row.get("ours")],
    }
    for name, some in kinds.items():
        ranked = sorted((row for row in some if _is_number(row.get("value"))), key=lambda row: float(row["value"]))
        if not ranked:
            continue
        best = ranked[0] if by_loss else ranked[-1]
        value = f"{best['value']:.4f}" if by_loss else f"{best['value']:.2f} %"
        speeds = [
            f"{best[key + PER_SAMPLE]:.2f} {kind}"
            for key, kind in zip(SPEEDS, ("measured here", "projected for K devices"), strict=True)
            if _is_number(best.get(key + PER_SAMPLE))
        ]
        whose = str(best.get("label", ""))
        if speeds:
            whose += f"; speed-up over serial per sample trained: {', '.join(speeds)}"
        found.append((value, name, whose))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _messages(content: Any, stages: str, stage_ms: Sequence[float]) -> list[float]:
    """None in records of before."""
    found = [float(ms) for ms in (content.get("message_ms") or {}).get(stages, [])]
    if found and len(found) != len(stage_ms):
        raise ValueError("message_ms")
    return found


def _tells(key: str, rows: Sequence[Any]) -> bool:
    """Is there anything to show in a column? That all runs have finished is not, nor that every sample was trained."""
    values = [row.get(key) for row in rows]
    if key.endswith(PER_SAMPLE) and values == [row.get(key.removesuffix(PER_SAMPLE)) for row in rows]:
        return False
    if key == "status":
        return not all(FINISHED.fullmatch(str(value)) for value in values)
    return any(value is not None for value in values)


def _cell(value: Any, digits: int | None) -> Cell:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Cell(DASH)
    if not _is_number(value):
        return Cell(str(value), str(value).lower())
    if digits is None:  # losses need four, percents, speeds and GiB two
        digits = 0 if isinstance(value, int) else 2 if abs(value) >= 0.5 or value == 0 else 4
    return Cell(f"{value:.{int(digits)}f}", value)


def _is_there(folder: Path, figure: Any) -> bool:
    return (folder / Path(str(figure["file"])).name).is_file()


def _picture(folder: Path, figure: Any) -> Picture:
    path = folder / Path(str(figure["file"])).name
    kind = {".svg": "image/svg+xml", ".png": "image/png"}.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"{path.name} is neither SVG nor PNG")
    return Picture(pictures.uri(path.read_bytes(), kind), str(figure.get("caption", "")))
