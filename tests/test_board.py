"""TensorBoard gets what the records say, from the leading process alone; without its package a run is refused."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parlay as library
from parlay.errors import InputError
from parlay.run import board
from runs import SMALL, answer, parlay, resume, train

RECORD: dict[str, Any] = {
    "epoch": 4,
    "phase": "parallel",
    "losses": [0.5, 0.25],
    "train_loss": 0.75,
    "test_loss": 1.0,
    "test_accuracy": None,
    "violation": [0.125],
    "seconds": 2.0,
    "learning_rate": 0.1,
    "beta": 3.0,
}

installed = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")


def read(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / board.FOLDER)).Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_every_number_of_an_epoch_has_a_name_and_what_is_not_there_has_none() -> None:
    assert dict(board.scalars(RECORD)) == {
        "loss/train": 0.75,
        "loss/test": 1.0,
        "rate/learning": 0.1,
        "rate/beta": 3.0,
        "time/epoch": 2.0,
        "loss of stage/0": 0.5,
        "loss of stage/1": 0.25,
        "violation/interface 1": 0.125,
    }
    assert "violation/interface 1" not in dict(board.scalars({**RECORD, "violation": None}))


@installed
def test_a_run_writes_what_its_records_say_and_resumed_goes_on_without_what_was_undone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "--stages", 2, "--epochs", 2, "--lr-schedule", "constant", "--tensorboard") == 0
    lost = board.Board(run)  # an epoch that was written, and then lost with its process before its checkpoint
    lost.begin(2)
    lost.epoch({**RECORD, "epoch": 2, "train_loss": 99.0})
    lost.end()
    assert resume(run, "--epochs", 3) == 0
    rows = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    found = read(run)
    assert sorted(found["loss/train"]) == [1, 2, 3]
    for row in rows:
        for name, value in board.scalars(row):
            assert found[name][row["epoch"] + 1] == pytest.approx(value, rel=1e-6)


@installed
@pytest.mark.slow
def test_of_several_processes_only_the_leading_one_writes(tmp_path: Path) -> None:
    assert train(tmp_path, "--stages", 2, "--epochs", 1, "--engine", "distributed", "--tensorboard") == 0
    assert len(list((tmp_path / board.FOLDER).iterdir())) == 1
    assert read(tmp_path)["loss/train"].keys() == {1}


@pytest.mark.parametrize("engine", ["in-process", "distributed"])
def test_without_its_package_it_is_refused_before_anything_runs(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("parlay.run.board.find_spec", lambda _: None)
    assert parlay("train", *SMALL, "--stages", 2, "--engine", engine, "--tensorboard", "--out", tmp_path) == 2
    assert "pip install 'parlay-train[tensorboard]'" in answer(capsys)
    assert not (tmp_path / "records.jsonl").exists()


@installed
def test_from_python_it_needs_a_run_folder() -> None:
    stages = library.partition(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, example=torch.zeros(4, 2))
    with pytest.raises(InputError, match="tensorboard needs a run folder: give `out`"):
        library.Trainer(stages, loss=nn.CrossEntropyLoss(), tensorboard=True)
