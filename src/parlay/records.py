"""What a run leaves behind in its folder: a line per epoch, a summary, the environment it ran in."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parlay.checkpoint import atomic_write

Record = dict[str, Any]


class Records:
    """`records.jsonl` of a run folder: appended line by line, so that a stopped run keeps what it had."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Record] = []

    def append(self, record: Record) -> None:
        self.rows.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(dumps(record) + "\n")

    def restart(self, epoch: int) -> None:
        """Keep the epochs before `epoch` of an earlier run; drop what that run did after its checkpoint."""
        if self.path is not None:
            self.rows = [row for row in read(self.path) if row["epoch"] < epoch]
            atomic_write(self.path, "".join(dumps(row) + "\n" for row in self.rows))


def read(path: Path) -> list[Record]:
    """The records of a run. A last line that was cut off in mid-write is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    atomic_write(path, dumps(content, indent=2) + "\n")


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
