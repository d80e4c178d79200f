"""What is recorded in results/: its archives, unpacked once, and the figures and tables that its pages are made of."""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
SHORT = ("table4", "figure4", "figure5")
"""Tables and figures that were made on a share of the images."""


@cache
def module(name: str) -> ModuleType:
    """`pages` or `records` of results/, which is no package."""
    sys.path.append(str(RESULTS))
    return importlib.import_module(name)


def unpacked(experiment: str) -> Path:
    """Its run folders; unpacked once, for all tests of this process."""
    folder: Path = module("records").runs(experiment)
    return folder


@cache
def figures(experiment: str) -> dict[str, float]:
    found: dict[str, float] = module("pages").experiment(experiment).figures()
    return found


@cache
def rows(table: str) -> dict[str, dict[str, Any]]:
    """The rows of one of the paper's tables or figures, by name."""
    out = unpacked("paper") / "short" if table in SHORT else unpacked("paper")
    content = json.loads((out / table / "reproduction.json").read_text())
    return {row["row"]: row for row in content["rows"]}
