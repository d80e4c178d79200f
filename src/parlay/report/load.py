"""What a page is made of, read and checked: run folders, folders of `parlay compare`, the JSON of `parlay bench`.

The rest of this room relies on the types here, so a damaged file is answered here and in `run.records`.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay import timeline
from parlay.errors import InputError
from parlay.files import read_bounded, shown
from parlay.run import records
from parlay.timeline import Span

LARGEST = 1e30
LISTS = ("violation", "violation_at_entry")  # of a record; empty where there is none
RECIPE, COMPARISON = "recipe.toml", "comparison.json"
TEST_SAMPLES = {"digits": 360, "mnist": 10_000, "cifar10": 10_000, "cifar100": 10_000}
"""For old runs, whose summaries lack it."""


POSITIVE = ("stages", "batch_size", "step_ms", "step_ms_low", "step_ms_high")
TIMING: dict[str, Any] = {
    **dict.fromkeys(("system", "model"), str),
    **dict.fromkeys(POSITIVE, float),
    **dict.fromkeys(("samples_per_step", "speedup", "speedup_low", "speedup_high", "speedup_per_step"), records.NUMBER),
    "wait_share": records.NUMBERS,
    "note": (str, None),
}
BENCH: dict[str, Any] = {
    "rows": [TIMING],
    "says": ([str], None),
    **dict.fromkeys(("baseline", "command"), (str, None)),
    "environment": (dict, None),
}
Content = Mapping[str, Any]
"""A JSON object that was checked; what it lacks is None."""


@dataclass(frozen=True)
class Run:
    """A run folder."""

    name: str
    recipe: Content
    recipe_text: str
    epochs: Sequence[Content]
    summary: Content
    timeline: Sequence[Span]

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stages(self) -> int:
        return self.number("stages", 1)

    @property
    def devices(self) -> str:
        found = self.summary["environment"].get("devices")
        return ", ".join(dict.fromkeys(map(str, found))) if isinstance(found, list) else ""

    def text(self, key: str, default: str = "") -> str:
        value = self.recipe.get(key)
        return default if value is None else str(value)

    def number(self, key: str, default: int) -> int:
        value = self.recipe.get(key)
        return value if isinstance(value, int) else default


@dataclass(frozen=True)
class Inputs:
    runs: Sequence[Run]
    timed: bool
    """They are those of one comparison, made one after the other on the same devices."""
    benches: Sequence[Content] = ()


def sort_out(paths: Sequence[Path]) -> Inputs:
    """What `parlay report` was given. Files are told apart by what they hold, not by their names."""
    folders, benches, comparisons = list[Path](), list[Content](), 0
    for path in paths:
        if path.suffix == ".json" and os.path.isfile(path):
            benches.append(read_bench(_json(path), path))
        elif os.path.isfile(path / COMPARISON):
            comparisons += 1
            folders += _compared(path / COMPARISON)
        else:
            folders.append(path)
    return Inputs(load(folders), comparisons == 1 and len(paths) == 1 + len(benches), benches)


def load(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders, each once, in this order."""
    for folder in folders:
        if not os.path.isdir(folder):
            what = "is a file" if os.path.exists(folder) else "does not exist"
            raise InputError(f"{shown(folder)} {what}: write a run folder, the --out of parlay train")
    once = {folder.resolve(): folder for folder in reversed(folders)}
    return [_run(folder) for folder in reversed(once.values())]


def read_bench(content: Any, path: Path) -> Content:
    if not isinstance(content, dict) or "rows" not in content:
        raise InputError(f"{shown(path)} is of no use here: write a run folder, or the JSON of parlay bench")
    if (key := records.wrong_key(content, BENCH)) is not None or not content["rows"]:
        raise records.damaged(path, f"no proper {key or 'rows'}")
    rows = [{name: row.get(name) for name in TIMING} for row in content["rows"]]
    if (low := next((key for row in rows for key in POSITIVE if row[key] <= 0), None)) is not None:
        raise records.damaged(path, f"no proper {low}")
    for row in rows:  # files from before `samples_per_step` have steps of whole batches
        row["samples_per_step"] = row["samples_per_step"] or row["batch_size"]
    return {name: content.get(name) for name in BENCH} | {"rows": rows}


def _run(folder: Path) -> Run:
    if not any((folder / name).is_file() for name in (RECIPE, records.RECORDS, records.SUMMARY)):
        raise InputError(f"{shown(folder)} is no run folder: write the --out of parlay train")
    rows = records.read_records(folder / records.RECORDS)
    epochs = [_known(row, records.RECORD_KEYS) | {name: row.get(name) or () for name in LISTS} for row in rows]
    told, spans = records.read_summary(folder / records.SUMMARY), folder / timeline.FILE
    if told is None:  # the run goes on, or was killed
        told = {"status": "unfinished"} | {name: epochs[-1][name] for name in ("test_accuracy", "test_loss") if epochs}
    recipe_text = _read(folder / RECIPE) if (folder / RECIPE).is_file() else ""
    try:
        recipe = tomllib.loads(recipe_text)
    except (ValueError, RecursionError):
        raise records.damaged(folder / RECIPE, "not TOML") from None
    if not recipe:  # a run of a user's own model, started from Python: its summary says what is known
        known = ("method", "model", "dataset", "stages", "schedule", "downsample", "epochs", "seed")
        recipe = {name: told[name] for name in known if told.get(name) is not None}
    summary = _known(told, records.SUMMARY_KEYS) | {name: told.get(name) or {} for name in ("seconds", "environment")}
    summary["test_samples"] = told.get("test_samples") or TEST_SAMPLES.get(str(recipe.get("dataset")))
    steps = timeline.read(spans) if spans.is_file() and _read(spans) else []
    steps = [span for span in steps if math.isfinite(span.begin) and math.isfinite(span.end)]
    return Run(shown(folder.resolve().name), recipe, recipe_text.strip(), epochs, summary, steps)


def _known(content: Content, names: Iterable[str]) -> dict[str, Any]:
    """Numbers of a run that went astray count as not finite: no axis and no sum takes them."""
    values = {name: content.get(name) for name in names}
    return {name: None if isinstance(v, int | float) and abs(v) > LARGEST else v for name, v in values.items()}


def _compared(path: Path) -> list[Path]:
    """The run folders of a comparison, in the order of its rows."""
    try:
        return [path.with_name(Path(str(name)).name) for row in _json(path)["rows"] for name in row["folders"]]
    except (KeyError, TypeError, ValueError):
        raise records.damaged(path, "no proper rows") from None


def _json(path: Path) -> Any:
    try:
        return records.loads(_read(path).encode())
    except ValueError:
        raise records.damaged(path, "not JSON") from None


def _read(path: Path) -> str:
    try:
        return read_bounded(path, records.LIMIT).decode()
    except UnicodeDecodeError:
        raise records.damaged(path, "not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read {shown(path)} ({error.strerror}): make it readable, or leave it out") from None
