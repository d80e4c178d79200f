"""What a run leaves in its folder: a line per epoch, a summary, the environment. Written, and read by one schema.

Whoever reads `records.jsonl` or `summary.json` reads it here: what is not what it was is refused in one line, and
behind these functions every value has its type. Keys that the schema does not know are left as they are. No torch.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from parlay.errors import InputError
from parlay.files import exists, read_bounded, shown, write_whole

Record = dict[str, Any]

RECORDS, SUMMARY = "records.jsonl", "summary.json"
LIMIT = 128 * 2**20  # bytes of a file: some 300,000 epochs
MOST_EPOCHS = 10_000_000
LARGEST = 2**63

NUMBER = (float, None)
"""Null where it was not finite."""
NUMBERS = ([NUMBER], None)
RECORD_KEYS: dict[str, Any] = {
    "epoch": int,
    "phase": ("serial", "parallel"),
    **dict.fromkeys(("losses", "violation", "violation_at_entry", "stage_cosines"), NUMBERS),
    **dict.fromkeys(("train_loss", "test_loss", "test_accuracy", "seconds", "refresh_seconds"), NUMBER),
    **dict.fromkeys(("learning_rate", "beta", "cosine"), NUMBER),
    "healthy": (bool, None),
}
SUMMARY_KEYS: dict[str, Any] = {
    "status": str,
    **dict.fromkeys(("message", "method", "model", "dataset", "schedule", "optimizer", "engine"), (str, None)),
    **dict.fromkeys(("stages", "downsample", "epochs", "steps_per_epoch", "parameters"), (int, None)),
    **dict.fromkeys(("test_samples", "auxiliary_bytes", "processes", "staleness"), (int, None)),
    **dict.fromkeys(("seed", "test_accuracy", "test_loss", "train_loss"), NUMBER),
    "cuts": ([int], None),
    **dict.fromkeys(("violation", "waited_seconds"), NUMBERS),
    "seconds": (dict.fromkeys(("total", "serial_epoch", "parallel_epoch"), NUMBER), None),
    "environment": (dict, None),
}


def fits(value: Any, kind: Any) -> bool:
    """Is a JSON value of this kind: a type or a value, [a kind], {key: a kind}, (one kind, or another), a function?

    Whole numbers are from 0 on, and none is larger than `LARGEST`.
    """
    if isinstance(kind, FunctionType):
        return bool(kind(value))
    if isinstance(kind, dict):
        return wrong_key(value, kind) is None
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, tuple):
        return any(fits(value, one) for one in kind)
    if type(value) is int:  # which `True` is not
        return abs(value) <= LARGEST and (kind is float or (kind is int and value >= 0))
    return type(value) is kind if isinstance(kind, type) else bool(value == kind)


def wrong_key(content: Any, schema: Mapping[str, Any]) -> str | None:
    """The first key of a JSON object that is not of its kind. A missing one counts as null."""
    if not isinstance(content, dict):
        return "JSON object"
    return next((key for key, kind in schema.items() if not fits(content.get(key), kind)), None)


def read_records(path: Path) -> list[Record]:
    """The records of a run; none where there is no file.

    A last line that was cut off in mid-write is left out: a run may be writing it at this moment.
    """
    raw = _read(path) or b""
    rows: list[Record] = []
    lines = raw.splitlines()
    for count, line in enumerate(lines, 1):
        try:
            row = _checked(path, line, RECORD_KEYS, f"line {count}: ")
        except InputError:
            if count == len(lines) and not raw.endswith(b"\n"):
                break
            raise
        if not (rows[-1]["epoch"] if rows else -1) < row["epoch"] < MOST_EPOCHS:
            raise damaged(path, f"line {count}: epoch {row['epoch']} does not follow the line before")
        rows.append(row)
    return rows


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a run; None where there is none yet."""
    raw = _read(path)
    return None if raw is None else _checked(path, raw, SUMMARY_KEYS)


def _read(path: Path) -> bytes | None:
    try:
        return read_bounded(path, LIMIT) if exists(path) else None
    except OSError as error:
        line = f"cannot read {shown(path)} ({error.strerror}): put it right, or leave this run out"
        raise InputError(line) from None


def _checked(path: Path, raw: bytes, schema: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    try:
        content: dict[str, Any] = loads(raw)
    except ValueError:
        raise damaged(path, f"{where}not JSON") from None
    if (wrong := wrong_key(content, schema)) is not None:
        raise damaged(path, f"{where}no proper {wrong}")
    return content


def loads(raw: bytes) -> Any:
    """JSON that another program may have written; ValueError for all that is none. Values not finite are None."""
    try:
        return json.loads(raw.decode(), parse_float=_finite_float, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _finite_float(digits: str) -> float | None:
    return value if math.isfinite(value := float(digits)) else None


def damaged(path: Path, what: str) -> InputError:
    return InputError(f"{shown(path)} is damaged ({what}): leave this run out, or train it again")


def is_begun(out: Path) -> bool:
    """Does this folder hold a run? A path that can be none is refused."""
    return exists(out / RECORDS)


class Records:
    """`records.jsonl` of a run folder: appended line by line, so that a stopped run keeps what it had."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / RECORDS if folder is not None else None
        self.rows: list[Record] = []

    def append(self, record: Record) -> None:
        self.rows.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(dumps(record) + "\n")

    def begin(self, epoch: int, recipe: str | None) -> list[Record]:
        """Keep the epochs before `epoch` of an earlier run; drop what that run did after its checkpoint."""
        if self.path is not None:
            self.rows = [row for row in read_records(self.path) if row["epoch"] < epoch]
            write_whole(self.path, "".join(dumps(row) + "\n" for row in self.rows))
            if recipe is not None:
                write_whole(self.path.with_name("recipe.toml"), recipe)
        return self.rows


def counted(epoch: int, epochs: int) -> str:
    """An epoch as people count: from 1. Records and code count from 0."""
    return f"epoch {epoch + 1} of {epochs}"


def summed_up(rows: list[Record], total_seconds: float | None = None) -> dict[str, Any]:
    """What a summary says that the records say as well."""
    last = rows[-1] if rows else {}

    def mean(phase: str) -> float | None:
        """Of an epoch's steps; the pass that sets the states when a parallel phase begins stands in the records."""
        found = [(r.get("seconds") or 0) - (r.get("refresh_seconds") or 0) for r in rows if r["phase"] == phase]
        return sum(found) / len(found) if found else None

    return {
        "epochs": len(rows),
        **{name: last.get(name) for name in ("test_accuracy", "test_loss", "train_loss")},
        "seconds": {"total": total_seconds, "serial_epoch": mean("serial"), "parallel_epoch": mean("parallel")},
        "violation": next((row["violation"] for row in reversed(rows) if row.get("violation")), []),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, dumps(content, indent=2) + "\n")


def dumps(content: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: values that are not finite become null."""
    return json.dumps(_finite(content), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def environment(devices: list[str]) -> dict[str, Any]:
    """Versions and hardware, so that a run proves itself."""
    import torch

    from parlay import __version__

    return {
        "parlay": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": devices,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
