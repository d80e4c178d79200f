"""A run outlives those who read what it prints: a closed pipe, a closed or a full standard error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runs import SMALL

TRAIN = f'"{sys.executable}" -m parlay.cli train {" ".join(SMALL)} --method al --stages 2 --epochs 3 --out run'


@pytest.mark.parametrize(
    "shell",
    [
        f"{TRAIN} 2>&1 | head -1",
        f"{TRAIN} 2>&-",
        *(
            pytest.param(f"{TRAIN} {end}", marks=pytest.mark.slow)
            for end in ("2>/dev/full", ">&-", "--json >/dev/full")
        ),
    ],
    ids=["a reader who leaves", "closed", "full", "no output", "full output"],
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
