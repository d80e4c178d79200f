"""Small runs for the tests of running: the command line in this process, and what it left behind."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from parlay.cli import main
from parlay.run import checkpoints
from parlay.run.progress import Progress

SAMPLES, BATCH, STEPS = 96, 32, 3
SMALL = [
    *("--model", "resnet8", "--dataset", "synthetic", "--synthetic-shape", "1,8,8"),
    *("--synthetic-samples", str(SAMPLES), "--batch-size", str(BATCH), "--device", "cpu"),
]
CLOCKED = ("seconds", "refresh_seconds")


def parlay(*words: object) -> int:
    return main([str(word) for word in words])


def train(out: Path, *words: object) -> int:
    """A run of a fraction of a second; later flags win over these."""
    return parlay("train", *SMALL, "--out", out, *words)


def resume(out: Path, *words: object) -> int:
    return parlay("train", "--resume", "--out", out, *words)


def records(out: Path, *left_out: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in (*CLOCKED, *left_out)} for row in rows]


def summary(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return content


def kept(out: Path) -> dict[str, Tensor]:
    """Weights, batch statistics and optimiser state of the newest checkpoint, by their global names."""
    found = checkpoints.newest(out / "checkpoints", pytest.fail)
    assert found is not None
    return {key: value for part in found if part.startswith("stage-") for key, value in found[part].items()}


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def answer(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command has answered with on standard error, where nothing else may stand."""
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert captured.out == ""
    assert lines[0].startswith("parlay: ")
    return lines[0].removeprefix("parlay: ")


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on standard error, behind those of the epochs; without a traceback."""
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told.splitlines()[-1]


def is_running(pid: int) -> bool:
    """Is there such a process? One that has ended and is not waited for yet counts as none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> float:
    """Until it is so; the seconds that it took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it never came"
        time.sleep(0.005)
    return time.monotonic() - began


class Heard(Progress):
    """Keeps the lines it is told; sends this process a signal after a given number of steps."""

    def __init__(self, stop_after: int = -1, number: signal.Signals = signal.SIGTERM) -> None:
        self.stop_after, self.number = stop_after, number
        self.steps = 0
        self.lines: list[str] = []
        self.text = ""
        """Of the last step."""

    def begin(self, steps: int, done: int) -> None:
        pass

    def step(self, text: str) -> None:
        self.steps, self.text = self.steps + 1, text
        if self.steps == self.stop_after:
            signal.raise_signal(self.number)

    def epoch(self, record: dict[str, Any], epochs: int) -> None:
        pass

    def line(self, text: str) -> None:
        self.lines.append(text)

    def end(self) -> None:
        pass


def listen(patch: pytest.MonkeyPatch, stop_after: int = -1) -> Heard:
    """Runs of the command line from now on report to what is returned."""
    heard = Heard(stop_after)
    patch.setattr("parlay.run.progress.for_terminal", lambda: heard)
    return heard
