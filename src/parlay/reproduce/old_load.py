"""For `reproduce` alone, until it leaves.

Run folders, read: `recipe.toml`, `records.jsonl` and `summary.json` of each become one checked `Run`.

The rest of the room may rely on the types here, so a damaged file is answered in this module and nowhere else. No
torch: a report can be made where nothing could be trained.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay import timeline
from parlay.errors import InputError
from parlay.report import pictures
from parlay.report.pictures import Reconstructions
from parlay.schedule import PARALLEL, SERIAL
from parlay.timeline import Span

TEST_SAMPLES = {"digits": 360, "mnist": 10_000, "cifar10": 10_000, "cifar100": 10_000}
"""For runs of before, whose summaries do not tell it."""

UNFINISHED = "unfinished"  # no summary yet: the run goes on, or was killed before it could write one


@dataclass(frozen=True)
class Epoch:
    """A line of `records.jsonl`. Values that were not finite are None."""

    number: int
    """From 1, as people count."""
    parallel: bool
    losses: tuple[float | None, ...]
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    violation: tuple[float | None, ...]
    """Per interface; empty in serial epochs."""
    violation_at_entry: tuple[float | None, ...]
    """How far the network had moved from the old states when a parallel phase began; empty elsewhere."""
    seconds: float | None
    refresh_seconds: float | None
    """Of these, for the pass that sets the states when a parallel phase begins."""
    learning_rate: float | None
    beta: float | None


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    status: str
    message: str
    recipe: Mapping[str, Any]
    recipe_text: str
    epochs: tuple[Epoch, ...]
    cuts: tuple[int, ...]
    parameters: int | None
    auxiliary_bytes: int | None
    total_seconds: float | None
    serial_epoch: float | None
    parallel_epoch: float | None
    environment: Mapping[str, Any]
    test_accuracy: float | None
    test_loss: float | None
    steps: int | None = None
    """Of an epoch."""
    processes: int = 1
    test_samples: int | None = None
    staleness: int | None = None
    """In steps, of the stage that waits longest, where the method has told it."""
    timeline: tuple[Span, ...] = ()
    """What every rank did when, where the run has recorded it."""
    reconstructions: Reconstructions | None = None
    """Of an auto-encoder."""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def devices(self) -> tuple[str, ...]:
        """One for each stage."""
        found = self.environment.get("devices")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def takes_turns(self) -> bool:
        """Do several stages share the cores of one process, so that its seconds tell nothing of a speed-up?"""
        on_cpu = any(device.startswith("cpu") for device in self.devices)
        return on_cpu and self.processes == 1 and self.number("stages", 1) > 1

    @property
    def trained_share(self) -> float | None:
        """Of an epoch's samples, the share that each stage trains on, on average over the run."""
        phases = "".join(PARALLEL if epoch.parallel else SERIAL for epoch in self.epochs)
        return trained_share(self.text("method"), self.number("stages", 1), self.text("order"), phases)

    def text(self, key: str, default: str = "") -> str:
        value = self.recipe.get(key)
        return default if value is None else str(value)

    def number(self, key: str, default: int) -> int:
        value = self.recipe.get(key)
        return value if isinstance(value, int) else default


def trained_share(method: str, stages: int, order: str, phases: str) -> float | None:
    """Half in a parallel epoch of the penalty in its red-black order, where neighbours take turns; else all."""
    if not phases:
        return None
    halved = method in ("penalty", "Penalty") and stages > 1 and order != "joint"
    return 1 - halved * phases.count(PARALLEL) / (2 * len(phases))


def load(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders, each once, in this order."""
    if not folders:
        raise InputError("no run to report on: write at least one run folder")
    once = {folder.resolve(): folder for folder in reversed(folders)}
    return [_run(folder) for folder in reversed(once.values())]


def shown(path: Path | str) -> str:
    """A path as one line of proper text: no line breaks, and no bytes that are not UTF-8."""
    text = str(path).encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _run(folder: Path) -> Run:
    here = shown(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{here} {what}: write a run folder, the --out of parlay train")
    names = ("recipe.toml", "records.jsonl", "summary.json")
    if not any((folder / name).is_file() for name in names):
        hint = (
            f"one of the runs in it, as in {here}/NAME" if any(_looks_like_run(folder)) else "the --out of parlay train"
        )
        raise InputError(f"{here} is no run folder (it has no {', '.join(names[:2])} or {names[2]}): write {hint}")
    recipe_text = _text(folder / "recipe.toml")
    summary = _json(folder / "summary.json")
    recipe = _toml(folder / "recipe.toml", recipe_text) if recipe_text else _recipe_of(summary)
    rows = _rows(folder / "records.jsonl")
    try:
        epochs = tuple(_epoch(row) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder / "records.jsonl", f"a line without a proper {_word(error)}") from None
    try:
        return _assemble(folder, recipe, recipe_text, summary, epochs)
    except (TypeError, ValueError) as error:
        raise _damaged(folder / "summary.json", f"no proper {_word(error)}") from None


def _assemble(
    folder: Path, recipe: dict[str, Any], recipe_text: str, summary: dict[str, Any], epochs: tuple[Epoch, ...]
) -> Run:
    seconds = _mapping(summary, "seconds")
    last = epochs[-1] if epochs else None

    def mean(parallel: bool) -> float | None:
        times = [e.seconds for e in epochs if e.parallel is parallel and e.seconds is not None]
        return sum(times) / len(times) if times else None

    def value(name: str, from_records: float | None) -> float | None:
        return _number(summary, name) if summary else from_records

    status = summary.get("status") if summary else UNFINISHED
    if not isinstance(status, str):
        raise TypeError("status")
    cuts = _numbers(summary, "cuts")
    return Run(
        name=shown(folder.resolve().name),
        status=status,
        message=str(summary.get("message") or ""),
        recipe=recipe,
        recipe_text=recipe_text,
        epochs=epochs,
        cuts=tuple(int(cut) for cut in cuts if cut is not None),
        parameters=_whole(summary, "parameters"),
        auxiliary_bytes=_whole(summary, "auxiliary_bytes"),
        total_seconds=_number(seconds, "total"),
        serial_epoch=_number(seconds, "serial_epoch") if summary else mean(False),
        parallel_epoch=_number(seconds, "parallel_epoch") if summary else mean(True),
        environment=_mapping(summary, "environment"),
        test_accuracy=value("test_accuracy", last.test_accuracy if last else None),
        test_loss=value("test_loss", last.test_loss if last else None),
        steps=_whole(summary, "steps_per_epoch"),
        processes=_whole(summary, "processes") or 1,
        test_samples=_whole(summary, "test_samples") or TEST_SAMPLES.get(str(recipe.get("dataset"))),
        staleness=_whole(summary, "staleness"),
        timeline=tuple(timeline.read(folder / timeline.FILE)) if (folder / timeline.FILE).is_file() else (),
        reconstructions=_reconstructions(folder / pictures.FILE),
    )


def _epoch(row: dict[str, Any]) -> Epoch:
    number = row.get("epoch")
    if not isinstance(number, int):
        raise TypeError("epoch")
    return Epoch(
        number=number + 1,
        parallel=row.get("phase") == "parallel",
        losses=_numbers(row, "losses"),
        train_loss=_number(row, "train_loss"),
        test_loss=_number(row, "test_loss"),
        test_accuracy=_number(row, "test_accuracy"),
        violation=_numbers(row, "violation"),
        violation_at_entry=_numbers(row, "violation_at_entry"),
        seconds=_number(row, "seconds"),
        refresh_seconds=_number(row, "refresh_seconds"),
        learning_rate=_number(row, "learning_rate"),
        beta=_number(row, "beta"),
    )


def _recipe_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of a user's own model, started from Python, have no recipe: the summary says what is known of it."""
    names = ("method", "model", "dataset", "stages", "schedule", "downsample", "epochs", "seed")
    return {name: summary[name] for name in names if summary.get(name) is not None}


def _rows(path: Path) -> list[dict[str, Any]]:
    """The records. A last line that was cut off in mid-write is left out: the run may be writing it at this moment."""
    lines = _text(path).rstrip("\n").split("\n") if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise _damaged(path, f"line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise _damaged(path, f"line {number} is no JSON object")
        rows.append(row)
    return rows


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    if not path.is_file():
        return {}
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, f"not JSON, {error}") from None
    if not isinstance(content, dict) or not content:
        raise _damaged(path, "no JSON object")
    return content


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _damaged(path, f"not TOML, {error}") from None


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _damaged(path, "not UTF-8 text") from None
    except OSError as error:
        raise InputError(
            f"cannot read {shown(path)} ({error.strerror}): make it readable, or leave this run out"
        ) from None


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{shown(path)} is damaged ({shown(what)}): leave this run out, or train it again")


def _word(error: Exception) -> str:
    return str(error.args[0]) if error.args else "value"


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    if value is not None and not isinstance(value, dict):
        raise TypeError(name)
    return value or {}


def _number(content: Mapping[str, Any], name: str) -> float | None:
    value = content.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(name)
    return value if math.isfinite(value) else None


def _whole(content: Mapping[str, Any], name: str) -> int | None:
    value = _number(content, name)
    return None if value is None else int(value)


def _numbers(content: Mapping[str, Any], name: str) -> tuple[float | None, ...]:
    value = content.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise TypeError(name)
    return tuple(_number({name: item}, name) for item in value)


def _reconstructions(path: Path) -> Reconstructions | None:
    if not path.is_file():
        return None
    try:
        return pictures.read(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def _looks_like_run(folder: Path) -> list[bool]:
    try:
        return [(sub / "records.jsonl").is_file() or (sub / "summary.json").is_file() for sub in folder.iterdir()]
    except OSError:
        return []
