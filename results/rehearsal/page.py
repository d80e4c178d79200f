"""Tables and figures of this page, from pairs.json."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from scores import markdown

HERE = Path(__file__).parent
FACTORS = ("method", "stages", "phases", "resumed", "store", "clip", "precision", "dropout", "downsample")


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "pairs.json").read_text())
    return found


def word(value: Any) -> str:
    if value is None or value is False:
        return ""
    return "yes" if value is True else str(value)


def tables() -> dict[str, str]:
    told = read()
    every = len(told["schedules"])
    rows = [
        (*(word(row[name]) for name in FACTORS), f"{every - len(row['differ'])} of {every}") for row in told["rows"]
    ]
    return {"pairs": markdown((*FACTORS, "schedules equal"), rows)}


def figures() -> dict[str, float]:
    told = read()
    return {
        "rows": len(told["rows"]),
        "schedules": len(told["schedules"]),
        "runs": len(told["rows"]) * len(told["schedules"]),
        "differ": sum(len(row["differ"]) for row in told["rows"]),
    }
