"""A run outlives those who read what it prints: a closed pipe, a closed or a full standard error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from runs import SMALL

TRAIN = f'"{sys.executable}" -m parlay.cli train {" ".join(SMALL)} --method al --stages 2 --epochs 3 --out run'


SEVERAL = f"{TRAIN} --engine distributed"


def slow(shell: str, name: str) -> ParameterSet:
    return pytest.param(shell, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(f"{TRAIN} 2>&1 | head -1", id="a reader who leaves"),
        slow(f"{TRAIN} 2>/dev/full", "full"),
        slow(f"{TRAIN} 2>&-", "closed"),
        slow(f"{TRAIN} >&-", "no output"),
        slow(f"{TRAIN} --json >/dev/full", "full output"),
        slow(f"{SEVERAL} 2>&1 | head -1", "several processes"),
        slow(f"{SEVERAL} 2>&-", "closed for several processes"),
    ],
)
def test_a_run_goes_on_when_nobody_reads_what_it_prints(shell: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "run" / "model.safetensors").exists()
