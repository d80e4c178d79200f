"""What CONTRIBUTING.md says is there: its files, the names in them, and a new method by one file."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = (".", "src/parlay", "src/parlay/methods", "src/parlay/models", "src/parlay/data", "tests")


def test_every_file_that_it_names_is_there() -> None:
    named = set(re.findall(r"`([\w./]+\.(?:py|md|txt))`", TEXT)) - {"src/parlay/methods/NAME.py"}
    named -= {"src/parlay/models/NAME.py"}
    assert len(named) > 20
    assert [name for name in named if not any((ROOT / folder / name).is_file() for folder in FOLDERS)] == []


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("src/parlay/run/setup.py", ["make_trainer"]),
        ("src/parlay/config/datasets.py", ["FACTS"]),
        ("src/parlay/config/keys.py", ["option"]),
        ("src/parlay/methods/__init__.py", ["register"]),
        ("src/parlay/__init__.py", ["_HOMES", "__all__"]),
        ("src/parlay/models/__init__.py", ["_COMMON", "build", "is_vae"]),
        ("src/parlay/data/sources.py", ["load"]),
        ("src/parlay/data/layouts.py", ["LAYOUTS"]),
        ("src/parlay/data/fetch.py", ["PUBLISHED"]),
        ("tests/test_api.py", ["NAMES"]),
        ("tests/test_twins.py", ["CASES", "MISTAKES"]),
        ("tests/test_rehearsal.py", ["CASES"]),
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


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("new_method", ROOT / "examples" / "new_method.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["new_method"] = found
    spec.loader.exec_module(found)
    return found


def test_a_method_of_ones_own_is_one_short_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((ROOT / "examples" / "new_method.py").read_text().splitlines()) <= 60
    _example().main(stages=3, epochs=3)
    assert float(re.findall(r"Averaged: ([\d.]+) %", capsys.readouterr().out)[0]) > 60


@pytest.mark.slow
def test_it_trains_over_two_processes_too() -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/new_method.py", "2"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(re.findall(r"Averaged: ([\d.]+) %", done.stdout)[0]) > 85
