"""Faults in one process: each ends with one line that names it, the right status, and nothing lost that was saved."""

import errno
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
from parlay import faults
from parlay.errors import InputError
from parlay.run import checkpoint, checkpoints
from parlay.run.progress import Silent
from ranks import SERVER
from runs import STEPS, answer, kept, last_line, records, resume, summary, train

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
slow = pytest.mark.slow


def trainer(loss: Callable[[Tensor, Tensor], Tensor], out: Path | None = None, **options: Any) -> parlay.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    stages = parlay.partition(model, 2, example=torch.randn(2, 4), by=[2])
    options = {"batch_size": 8, "device": "cpu", "progress": Silent(), **options}
    return parlay.Trainer(stages, loss, parlay.AugmentedLagrangian(), "parallel", out=out, **options)


def samples(count: int = 32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=random)
    return inputs, (inputs[:, 0] > 0).long()


def fail_at(patch: Patch, step: int, error: BaseException) -> None:
    def reach(number: int | None, *_: object) -> None:
        if number == step:
            raise error

    patch.setattr(faults, "reach", reach)


# --- divergence ---


def test_a_diverged_run_names_stage_and_step_and_its_last_checkpoint_still_loads(
    tmp_path: Path, capsys: Capsys
) -> None:
    assert train(tmp_path, "--epochs", 2) == 0
    weights, rows = kept(tmp_path), records(tmp_path)
    assert resume(tmp_path, "--epochs", 4, "--lr", 1e30) == 1
    line = last_line(capsys)
    told = summary(tmp_path)
    assert told["status"] == "diverged"
    assert told["message"] in line
    for part in ("the loss of stage ", " of 3 is ", "in epoch 3, step ", "(samples "):
        assert part in line
    assert f"the last checkpoint is {tmp_path / 'checkpoints' / '0000000006'}" in line
    assert records(tmp_path) == rows
    assert all(torch.equal(weights[name], value) for name, value in kept(tmp_path).items())
    assert resume(tmp_path, "--epochs", 4, "--lr", 0.1) == 0
    assert summary(tmp_path)["status"] == "finished"


def test_a_loss_that_is_not_a_number_stops_all_stages_before_the_update(tmp_path: Path) -> None:
    steps = 0

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal steps
        steps += torch.is_grad_enabled()
        value = nn.functional.cross_entropy(output, targets)
        return value * float("nan") if steps == 6 else value  # the second step of the parallel epoch

    result = trainer(loss, tmp_path).fit(samples(), epochs=3)
    assert result.status == summary(tmp_path)["status"] == "diverged"
    assert "the loss of stage 1 of 2 is nan in epoch 2, step 2" in result.message
    assert all(torch.isfinite(value).all() for value in result.model.state_dict().values())
    assert checkpoints.newest(tmp_path / "checkpoints", pytest.fail) is not None


@pytest.mark.parametrize(("epochs", "judge_every"), [(2, 1), (4, 3)])
def test_weights_that_an_epochs_last_step_has_spoiled_go_into_no_checkpoint(
    tmp_path: Path, epochs: int, judge_every: int
) -> None:
    subject = trainer(nn.functional.cross_entropy, tmp_path, judge_every=judge_every)
    steps = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return gradient * float("nan") if steps == 8 else gradient  # of 4 in each epoch

    subject.partition.model[4].weight.register_hook(spoil)
    result = subject.fit(samples(), epochs=epochs)
    assert result.status == summary(tmp_path)["status"] == "diverged"
    assert "the weights of stage 1 of 2 are not finite after epoch 2" in result.message
    saved = checkpoints.newest(tmp_path / "checkpoints", pytest.fail)
    assert saved is not None
    assert saved.path.name == "0000000004"
    assert str(saved.path) in result.message


# --- disks and memory ---


@pytest.mark.parametrize("whole_disk", [False, True])
def test_a_full_disk_ends_the_run_in_one_line_and_the_checkpoint_before_goes_on(
    whole_disk: bool, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    """`whole_disk`: not even the summary can be written."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert train(whole, "--epochs", 3) == 0
    write = checkpoint.write_file

    def full(path: Path, chunks: Any) -> dict[str, Any]:
        if path.parent.name == ".new-0000000006" or (whole_disk and "summary" in path.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_file", full)
        assert train(out, "--epochs", 3) == 1
    line = last_line(capsys)
    assert f"{out / 'checkpoints' / '0000000006'} could not be written (No space left on device)" in line
    assert "bytes and the disk has" in line
    if not whole_disk:
        assert summary(out)["status"] == "failed"
        assert "could not be written" in summary(out)["message"]
    assert resume(out) == 0
    assert records(out) == records(whole)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
        MemoryError("2 GiB"),
    ],
)
def test_out_of_memory_is_answered_with_what_would_take_less(
    error: Exception, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    fail_at(monkeypatch, STEPS + 1, error)
    assert train(tmp_path, "--epochs", 3) == 1
    line = last_line(capsys)
    for part in ("out of memory", "--batch-size", "--downsample 2"):
        assert part in line
    assert summary(tmp_path)["status"] == "failed"


def test_a_store_that_does_not_fit_on_disk_is_refused_before_training(
    tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert train(tmp_path, "--store", "file") == 2
    assert "the disk has" in answer(capsys)
    assert not (tmp_path / "records.jsonl").exists()


# --- the unexpected ---


def test_an_unexpected_error_is_noted_in_the_summary_and_told_in_one_line(
    tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    fail_at(monkeypatch, STEPS + 1, ZeroDivisionError("over\nnothing"))
    assert train(tmp_path, "--epochs", 3) == 1
    assert last_line(capsys) == "parlay: ZeroDivisionError: over nothing (PARLAY_DEBUG=1 shows where)"
    assert summary(tmp_path)["status"] == "failed"
    assert summary(tmp_path)["message"] == "ZeroDivisionError: over nothing"
    monkeypatch.setenv("PARLAY_DEBUG", "1")
    assert resume(tmp_path) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # in Python it comes through as it is
        trainer(nn.functional.cross_entropy, tmp_path / "python").fit(samples(), epochs=2)


def test_the_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    here, there = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_stuck, args=(tmp_path, there))
    process.start()
    assert here.recv() == "stuck"
    for alive in (True, False):
        os.kill(process.pid, signal.SIGTERM)
        process.join(0.3 if alive else 5)
        assert process.is_alive() is alive
    assert process.exitcode == -signal.SIGTERM


def _stuck(out: Path, pipe: Connection) -> None:
    def reach(*_: object) -> None:
        pipe.send("stuck")
        time.sleep(60)
        time.sleep(60)

    faults.reach = reach
    train(out)


@pytest.mark.usefixtures("one_thread")
def test_one_process_is_killed_by_the_hook_too(tmp_path: Path) -> None:
    process = SERVER.Process(target=_killed, args=(tmp_path / "run", f"stage1:step{STEPS + 1}:kill"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert resume(tmp_path / "run", "--epochs", 2) == train(tmp_path / "whole", "--epochs", 2) == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def _killed(out: Path, fault: str) -> None:
    os.environ |= {"PARLAY_FAULT": fault}
    torch.set_num_threads(1)
    train(out, "--epochs", 2)


# --- small and odd data ---


@pytest.mark.parametrize(
    ("method", "count", "better"),
    [("al", 33, 34), ("penalty", 34, 36), pytest.param("serial", 33, 34, marks=slow)],
)
def test_a_batch_norm_over_one_value_is_refused_with_the_batch_size_to_write(
    method: str, count: int, better: int, tmp_path: Path, capsys: Capsys
) -> None:
    words = ["--synthetic-shape", "1,4,4", "--synthetic-samples", count, "--method", method, "--epochs", 2]
    assert train(tmp_path, *words) == 2
    line = answer(capsys)
    assert f"with batch-size 32 of {count} samples a stage meets a batch of one" in line
    assert not (tmp_path / "records.jsonl").exists()
    suggested = int(line.rsplit(" ", 1)[1])
    assert suggested <= better
    assert train(tmp_path, *words, "--batch-size", suggested) == 0


def test_a_set_of_one_sample_cannot_be_normalised_at_any_batch_size(tmp_path: Path, capsys: Capsys) -> None:
    assert train(tmp_path, "--synthetic-shape", "1,4,4", "--synthetic-samples", 1) == 2
    assert "pass more samples" in answer(capsys)


@pytest.mark.parametrize(
    ("method", "count"), [("al", 33), ("penalty", 1), ("penalty", 33), pytest.param("serial", 20, marks=slow)]
)
def test_a_last_batch_of_one_and_a_set_smaller_than_a_batch_are_trained_on(
    count: int, method: str, tmp_path: Path
) -> None:
    assert train(tmp_path, "--synthetic-samples", count, "--method", method, "--epochs", 3) == 0
    assert summary(tmp_path)["status"] == "finished"


def test_red_and_black_need_no_larger_batch_where_nothing_is_cut(tmp_path: Path) -> None:
    words = ["--synthetic-shape", "1,4,4", "--synthetic-samples", 34, "--method", "penalty", "--epochs", 2]
    assert train(tmp_path, *words, "--stages", 1) == 0


def test_a_model_without_batch_norm_takes_batches_of_one_and_an_empty_set_is_refused() -> None:
    assert trainer(nn.functional.cross_entropy, batch_size=1).fit(samples(5), epochs=2).status == "finished"
    with pytest.raises(InputError, match="the data set is empty"):
        trainer(nn.functional.cross_entropy).fit((torch.randn(0, 4), torch.zeros(0)))
