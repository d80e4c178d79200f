"""The command line answers at once, in one line where it says no, and with JSON alone where it is asked for JSON."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parlay.config.datasets import FACTS
from parlay.files import FolderLock
from runs import SMALL, answer, parlay, records, summary, train

Capsys = pytest.CaptureFixture[str]

WITHOUT_TORCH = """
import sys, time
began = time.perf_counter()
from parlay.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = {"torch", "numpy", "sklearn", "matplotlib", "rich", "jinja2"} & set(sys.modules)
print(f"\\n{code} {heavy or ''} {time.perf_counter() - began}")
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [("--help", 0), ("train --help", 0), ("data list --json", 0), ("train --stagse 3", 2), ("train --method ale", 2)],
)
def test_help_lists_and_wrong_flags_are_answered_in_half_a_second_without_torch(words: str, code: int) -> None:
    times = []
    for _ in range(3):  # the best of three: the machine may be busy
        script = [sys.executable, "-c", WITHOUT_TORCH, *words.split()]
        done = subprocess.run(script, check=True, capture_output=True, text=True)
        found, *heavy, seconds = done.stdout.splitlines()[-1].split()
        assert (int(found), heavy) == (code, [])
        assert len(done.stderr.splitlines()) == code // 2
        times.append(float(seconds))
        if times[-1] < 0.5:
            return
    pytest.fail(f"{times} seconds")


def test_the_installed_command_and_the_module_run_alike(tmp_path: Path) -> None:
    for command in ([str(Path(sys.executable).parent / "parlay")], [sys.executable, "-m", "parlay.cli"]):
        done = subprocess.run([*command, "trian"], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == "parlay: unknown command 'trian': write parlay train\n"


@pytest.mark.parametrize("words", ["demo --help", "reproduce --help", "report --help", "data --help", "--version"])
def test_every_command_explains_itself(words: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as end:
        parlay(*words.split())
    assert end.value.code == 0
    assert "parlay" in capsys.readouterr().out


def test_a_run_is_told_in_one_line_or_as_one_json_object(tmp_path: Path, capsys: Capsys) -> None:
    assert train(tmp_path / "run", "--epochs", 2, "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == summary(tmp_path / "run")
    assert "epoch 2 of 2" in told.err
    assert train(tmp_path / "other", "--epochs", 1) == 0
    line = capsys.readouterr().out
    assert line.startswith("finished; test accuracy ")
    assert line.endswith(f"run folder {tmp_path / 'other'}\n")


def test_a_diverged_run_exits_with_1_and_its_json_says_why(tmp_path: Path, capsys: Capsys) -> None:
    assert train(tmp_path / "run", "--epochs", 2, "--lr", 1e30, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "diverged"
    assert "the loss of the network is nan in epoch 1, step " in told["message"]


def test_a_folder_that_is_taken_is_refused_and_nothing_of_it_is_lost(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("precious")
    assert train(tmp_path / "file", "--epochs", 1) == 2
    assert "write another --out" in answer(capsys)
    assert (tmp_path / "file").read_text() == "precious"
    out = tmp_path / "run"
    with FolderLock(out):
        assert train(out, "--epochs", 1) == 2
        assert f"is in use by process {os.getpid()}" in answer(capsys)
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert train(out, "--epochs", 1) == 0
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train(out, "--epochs", 2, "--lr", 0.5) == 2
    assert f"{out} holds a run already: write --resume" in answer(capsys)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


def test_the_bare_command_trains_on_the_digits_into_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for epochs in (2, 1):
        assert parlay("train", "--model", "resnet8", "--epochs", epochs, "--device", "cpu") == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["digits-resnet8-al-k3-s0", "digits-resnet8-al-k3-s0-1"]
    assert [row["phase"] for row in records(tmp_path / "runs" / names[0])] == ["serial", "parallel"]
    assert summary(tmp_path / "runs" / names[0])["test_accuracy"] > 30


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "COMMAND"),
        ("data lst", "write parlay data list"),
        ("data", "list|fetch|check"),
        ("data check", "no data set named: write one or more of digits, mnist"),
        ("data check cifar11", "unknown data set 'cifar11': write one of digits"),
        ("train --dataset mnist --data-dir nowhere", "parlay data fetch mnist --data-dir nowhere"),
        ("train --resume", "--resume needs a run folder: write --out DIR"),
        ("train --resume --out nowhere", "nowhere holds no run to go on with"),
        ("plan --stages 0", "0 stages of a model with 11 blocks: write a number of stages from 1 to 11"),
        ("plan --resume", "unknown flag '--resume'"),
        ("report", "RUN"),
    ],
)
def test_wrong_input_is_answered_in_one_line_with_exit_code_2(
    words: str, told: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parlay(*words.split()) == 2
    assert told in answer(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_wrong_input(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert train(tmp_path, "--device", "cuda") == 2
    assert answer(capsys) == "no GPU to be found: write --device cpu"


def test_data_list_names_every_set_with_its_sizes(capsys: Capsys) -> None:
    assert parlay("data", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert parlay("data", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [line.split()[0] for line in lines] == list(listed) == list(FACTS)
    assert listed["cifar10"] == {"shape": [3, 32, 32], "classes": 10, "train": 50_000, "test": 10_000}


def test_data_check_reads_a_set_and_says_what_is_there(capsys: Capsys) -> None:
    assert parlay("data", "check", "digits", "synthetic") == 0
    digits, synthetic = capsys.readouterr().out.splitlines()
    assert digits.startswith("digits: 1437 training and 360 test images of 1 x 8 x 8, 10 classes")
    assert synthetic.startswith("synthetic: 2048 training")
    assert parlay("data", "check", "digits", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == ["digits"]


def test_the_embedded_digits_train_from_the_bare_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert parlay("train", "--model", "resnet8", "--epochs", 2, "--out", out, "--device", "cpu") == 0
    assert summary(out)["dataset"] == "digits"
    assert [row["phase"] for row in records(out)] == ["serial", "parallel"]
    assert summary(out)["test_accuracy"] > 30


def test_training_on_the_first_samples_alone(tmp_path: Path, capsys: Capsys) -> None:
    assert train(tmp_path / "run", "--epochs", 1, "--train-samples", 40) == 0
    assert summary(tmp_path / "run")["steps_per_epoch"] == math.ceil(40 / 32)
    assert train(tmp_path / "whole", "--epochs", 1) == 0
    capsys.readouterr()
    assert parlay("train", *SMALL, "--train-samples", 1000, "--out", tmp_path / "more") == 2
    assert "train-samples is 1000, and synthetic has 96: write a number up to that" in answer(capsys)
