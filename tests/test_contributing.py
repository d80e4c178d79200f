"""What CONTRIBUTING.md says is there: its files, the names in them, and a new method by one file."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import pytest
import torch
from torch import Tensor, nn

import parlay
from parlay.coupling import Pair
from parlay.coupling.base import penalty

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = (".", "src/parlay", "src/parlay/coupling", "src/parlay/models", "src/parlay/data", "tests")


def test_every_file_that_it_names_is_there() -> None:
    named = set(re.findall(r"`([\w./]+\.(?:py|md|txt))`", TEXT)) - {"src/parlay/coupling/NAME.py"}
    named -= {"src/parlay/models/NAME.py"}
    assert len(named) > 20
    assert [name for name in named if not any((ROOT / folder / name).is_file() for folder in FOLDERS)] == []


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("src/parlay/run.py", ["METHODS", "make_trainer"]),
        ("src/parlay/recipe.py", ["METHODS", "STREAMING", "DATASETS", "option"]),
        ("src/parlay/report/groups.py", ["METHODS"]),
        ("src/parlay/__init__.py", ["_HOMES", "__all__"]),
        ("src/parlay/models/__init__.py", ["_COMMON", "build", "is_vae"]),
        ("src/parlay/data/sources.py", ["NAMES", "_FACTS", "load"]),
        ("src/parlay/data/layouts.py", ["LAYOUTS"]),
        ("src/parlay/data/fetch.py", ["PUBLISHED"]),
        ("tests/test_api.py", ["NAMES"]),
        ("tests/test_couplings.py", ["METHODS"]),
        ("tests/test_transparency.py", ["METHODS"]),
        ("tests/runs.py", ["parlay", "answer"]),
    ],
)
def test_every_name_that_it_gives_stands_in_its_file(file: str, names: list[str]) -> None:
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for name in names:
        assert name in found
        assert f"`{name}`" in TEXT or name in TEXT


@final
@dataclass(frozen=True)
class Nudged(parlay.Coupling):
    """States go half of the way to their minimiser."""

    keeps_multipliers: ClassVar[bool] = False
    beta: float = 3.0

    def start(self, x: Tensor) -> Pair:
        return Pair(x, None)

    def local_loss(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        return penalty(x, pair.state, b)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        assert x is not None
        assert p is not None
        return Pair(pair.state.lerp(self.displaced(x, p, b, s2), 0.5), None)


def test_a_method_is_one_class_with_what_it_lists() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = (inputs.sum(1) > 0).long()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 2))
    stages = parlay.partition(model, 2, inputs[:2])
    trainer = parlay.Trainer(stages, nn.CrossEntropyLoss(), Nudged(), "parallel", batch_size=16, device="cpu")
    result = trainer.fit((inputs, targets), (inputs, targets), epochs=8)
    assert result.status == "finished"
    assert result.records[-1]["phase"] == "parallel"
    assert result.records[-1]["test_loss"] < result.records[0]["test_loss"]
