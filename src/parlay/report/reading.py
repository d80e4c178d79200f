"""Stands in for `parlay.run.records` and `parlay.files` until the branch `run` is merged; then it goes."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parlay.errors import InputError

SHOWN = 300  # characters of a path in a message
Record = dict[str, Any]
Kind = Callable[[Any], bool]
"""Is a value of this kind?"""

RECORDS, SUMMARY = "records.jsonl", "summary.json"
LIMIT = 128 * 2**20  # bytes of a file: some 300,000 epochs
LARGEST = 2**63
MOST_EPOCHS = 10_000_000


def whole(value: Any) -> bool:
    """From 0 on. `True` is an int for Python, but no number here."""
    return type(value) is int and 0 <= value <= LARGEST


def real(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST)


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def optional(fits: Kind) -> Kind:
    return lambda value: value is None or fits(value)


def row_of(fits: Kind) -> Kind:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def mapping_of(schema: Mapping[str, Kind]) -> Kind:
    return lambda value: wrong_key(value, schema) is None


number = optional(real)
"""A value that was not finite is null."""
numbers = optional(row_of(number))

RECORD_KEYS: dict[str, Kind] = {
    "epoch": lambda value: whole(value) and value < MOST_EPOCHS,
    "phase": lambda value: value in ("serial", "parallel"),
    **dict.fromkeys(("losses", "violation", "violation_at_entry", "stage_cosines"), numbers),
    **dict.fromkeys(("train_loss", "test_loss", "test_accuracy", "seconds", "refresh_seconds"), number),
    **dict.fromkeys(("learning_rate", "beta", "cosine"), number),
    "healthy": optional(flag),
}
SUMMARY_KEYS: dict[str, Kind] = {
    "status": text,
    **dict.fromkeys(("message", "method", "model", "dataset", "schedule", "optimizer", "engine"), optional(text)),
    **dict.fromkeys(("stages", "downsample", "epochs", "steps_per_epoch", "seed", "parameters"), optional(whole)),
    **dict.fromkeys(("test_samples", "auxiliary_bytes", "processes", "staleness"), optional(whole)),
    **dict.fromkeys(("test_accuracy", "test_loss", "train_loss"), number),
    "cuts": optional(row_of(whole)),
    **dict.fromkeys(("violation", "waited_seconds"), numbers),
    "seconds": optional(mapping_of(dict.fromkeys(("total", "serial_epoch", "parallel_epoch"), number))),
    "environment": optional(mapping_of({})),
}


def wrong_key(content: Any, schema: Mapping[str, Kind]) -> str | None:
    """The first key of a JSON object that is not of its kind. A missing one counts as null."""
    if not isinstance(content, dict):
        return "JSON object"
    return next((key for key, fits in schema.items() if not fits(content.get(key))), None)


def read_records(path: Path) -> list[Record]:
    """The records of a run; none where there is no file.

    A last line that was cut off in mid-write is left out: a run may be writing it at this moment.
    """
    lines = (_read(path) or b"").rstrip(b"\n").split(b"\n")
    rows: list[Record] = []
    for count, line in enumerate(lines, 1):
        try:
            row = loads(line)
        except ValueError:
            if count == len(lines):
                break
            raise damaged(path, f"line {count} is not JSON") from None
        if (key := wrong_key(row, RECORD_KEYS)) is not None:
            raise damaged(path, f"line {count} has no proper {key}")
        if rows and row["epoch"] <= rows[-1]["epoch"]:
            raise damaged(path, f"line {count} is of epoch {row['epoch']}, which does not follow the line before")
        rows.append(row)
    return rows


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a run; None where there is none yet."""
    content = _read(path)
    if content is None:
        return None
    try:
        summary: dict[str, Any] = loads(content)
    except ValueError:
        raise damaged(path, "not JSON") from None
    if (key := wrong_key(summary, SUMMARY_KEYS)) is not None:
        raise damaged(path, f"no proper {key}")
    return summary


def _read(path: Path) -> bytes | None:
    try:
        return read_bounded(path, LIMIT) if exists(path) else None
    except OSError as error:
        line = f"cannot read {shown(path)} ({error.strerror}): put it right, or leave this run out"
        raise InputError(line) from None


def loads(raw: bytes) -> Any:
    """JSON that another program may have written; ValueError for all that is none. Values not finite are None."""
    try:
        return json.loads(raw.decode(), parse_float=_finite_float, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _finite_float(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def damaged(path: Path, what: str) -> InputError:
    return InputError(f"{shown(path)} is damaged ({what}): leave this run out, or train it again")


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; OSError for all else, so that no read waits or grows.

    A FIFO would wait for a writer that never comes, and a device has no end.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL character", str(path)) from None
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(limit + 1) if os.fstat(number).st_size <= limit else b""
        if len(content) > limit or os.fstat(number).st_size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
        return content


def exists(path: Path) -> bool:
    """Is anything there? A path that no file can have is refused: the usual question answers it with an OSError."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds a NUL character"
        raise InputError(f"{shown(path)} is no usable path ({reason}): write another --out") from None
    return True


def shown(path: Path | str) -> str:
    """A path as one line of proper text, cut to a readable length: no line breaks, no bytes that are not UTF-8."""
    text = str(path).encode("utf-8", "replace").decode("utf-8")
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2]}...{line[-SHOWN // 2 :]}"
