"""Faults with a process per stage: who is named, that all end, and that nothing is lost that was saved.

Where each of the 25 cases of faults and bad input is tested. The files: F = this one, L = test_launch, P = test_faults
(one process), C = test_checkpoint, R = test_resume, S = stores/test_stores_file, I = test_recipe, D = data/,
E = test_engine; after that, words of the tests' names.

| #  | case                           | one process                        | a process per stage                       |
|----|--------------------------------|------------------------------------|-------------------------------------------|
| 1  | kill -9 of a stage             | F killed_by_the_hook, R            | F killed_stage, random_stage; L dead      |
| 2  | kill -9 of the launcher        | -                                  | F launcher_is_killed; L                   |
| 3  | a stage hangs                  | -                                  | F stopped_stage; L stuck_stage            |
| 4  | a stage ten times slower       | -                                  | F slower; L many_times_slower             |
| 5  | network cut or slow            | -                                  | F slow_link, cut_link                     |
| 6  | SIGTERM, Ctrl-C, a second one  | P second_signal, R                 | F sigterm_while, sigterm_to; L signal     |
| 7  | disk full at a checkpoint      | P full_disk, C                     | F full_disk                               |
| 8  | kill while one is written      | C kill_at_each_point               | F killed_while_it_saves                   |
| 9  | flipped byte, cut short        | C damaged, flipped_bit; R          | F damaged_part                            |
| 10 | parts of different steps       | C kill_at_each_point               | F damaged_part                            |
| 11 | disk full at a store           | P store_that_does_not_fit, S       | F store_that_does_not_fit                 |
| 12 | a store of something else      | S refused_by_its_header, cut_short | the same code                             |
| 13 | kill between store and weights | R, C (states are saved)            | F killed_stage[exchange], random_stage    |
| 14 | another K, engine, device      | R other_stages                     | F another_number_of_stages                |
| 15 | impossible K, world size       | test_plan, test_partitioning       | F refused_before_any_process              |
| 16 | a loss that is not finite      | P not_a_number, E; test_guard      | F, test_distributed(_streaming), _nccl    |
| 17 | two runs in a folder           | C second_run, test_cli             | F folder_in_use                           |
| 18 | port in use                    | -                                  | L given_port                              |
| 19 | unknown key, wrong type        | I                                  | the same code; F refused_before_any       |
| 20 | damaged or hostile data        | D sources, pickles, fetch          | F missing_data                            |
| 21 | markup in names and errors     | test_report                        | the same code                             |
| 22 | odd sides, batches of one      | P last_batch_of_one, batch_norm    | F last_batch_of_one                       |
| 23 | resume anywhere                | R                                  | F sigterm, random_stage, damaged_part     |
| 24 | out of memory                  | P out_of_memory                    | F out_of_memory                           |
| 25 | a model that cannot be cut     | test_partitioning                  | the same code                             |
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay.checkpoint import FolderLock
from parlay.launch import command, ranks, supervisor
from parlay.recipe import Recipe
from runs import SMALL, STEPS, answer, flip_a_byte, is_running, kept, parlay, records, summary, train, wait_for

Capfd = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
EPOCHS = 4
WORDS = ["--stages", 2, "--epochs", EPOCHS, "--engine", "distributed"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: Patch) -> Iterator[None]:
    """In this process too: what is compared bit for bit must be added up in the same order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PARLAY_TIMEOUT", "5")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    assert children(os.getpid()) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    assert distributed(out) == 0
    return out


def distributed(out: Path, *words: object) -> int:
    return train(out, *WORDS, *words)


def resumed(out: Path, *words: object) -> int:
    return parlay("train", "--resume", "--out", out, *words)


def fault(patch: Patch, text: str) -> None:
    patch.setenv("PARLAY_FAULT", text)


def children(pid: int) -> list[int]:
    """The ranks of a launcher: processes with this parent, zombies left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z" and b"train" in words:
            found.append(int(path.parent.name))
    return sorted(found)


def last_line(capfd: Capfd) -> str:
    told = capfd.readouterr().err
    assert "Traceback" not in told, told
    return told.splitlines()[-1]


def assert_same(out: Path, other: Path) -> None:
    """Weights, batch statistics, optimiser state and records, bit for bit."""
    ours, theirs = kept(out), kept(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert records(out) == records(other)
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


# --- a stage is lost ---


@pytest.mark.parametrize(("stage", "point"), [(0, "step"), (1, "exchange")])
def test_a_killed_stage_is_named_and_resumed_the_run_is_as_undisturbed(
    stage: int, point: str, tmp_path: Path, capfd: Capfd, undisturbed: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, f"stage{stage}:step{STEPS + 1}:kill:{point}")
        assert distributed(tmp_path) == 1
    line = last_line(capfd)
    assert re.fullmatch(
        rf"parlay: stage {stage} of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\) in step {STEPS + 1}; "
        rf"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}",
        line,
    ), line
    assert summary(tmp_path)["status"] == "failed"
    assert summary(tmp_path)["message"] == line.removeprefix("parlay: ")
    assert summary(tmp_path)["epochs"] == 1
    assert resumed(tmp_path) == 0
    assert_same(tmp_path, undisturbed)


def test_a_kill_is_noticed_at_once_and_all_have_stopped_within_five_seconds(
    tmp_path: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    fault(monkeypatch, "stage2:step3:slow")  # long enough to be killed, with the others waiting
    killed_at: list[float] = []

    def kill() -> None:
        wait_for(lambda: (tmp_path / "records.jsonl").exists() and records(tmp_path))
        os.kill(children(os.getpid())[1], signal.SIGKILL)
        killed_at.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    assert distributed(tmp_path, "--stages", 3, "--epochs", 50) == 1
    ended = time.monotonic() - killed_at[0]
    killer.join()
    assert ended < 5
    assert "parlay: stage 1 of 3 (process " in last_line(capfd)
    assert children(os.getpid()) == []


def test_a_random_stage_killed_at_a_random_step_until_the_run_is_done_changes_nothing(
    tmp_path: Path, undisturbed: Path, capfd: Capfd
) -> None:
    dice = random.Random(19)  # both stages, in serial and parallel steps
    kills, code = 0, 1
    while code:
        saved = max((int(path.name) for path in (tmp_path / "checkpoints").glob("0*")), default=0)
        step = saved + dice.randrange(3 * STEPS)
        with pytest.MonkeyPatch.context() as patch:
            point = dice.choice(["step", "exchange"])
            fault(patch, f"stage{dice.randrange(2)}:step{step}:kill:{point}")
            code = resumed(tmp_path) if kills else distributed(tmp_path)
        kills += code
        told = capfd.readouterr().err
        assert code == 0 or "was killed by signal 9 (SIGKILL)" in told
    assert kills == 4
    assert_same(tmp_path, undisturbed)


def test_a_stage_killed_while_it_saves_is_restarted_from_the_checkpoint_before(
    tmp_path: Path, undisturbed: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    """Its part is written and the whole is not valid yet."""
    fault(monkeypatch, f"stage1:step{2 * STEPS - 1}:kill:save")
    assert distributed(tmp_path, "--max-restarts", 1) == 0
    told = capfd.readouterr().err
    assert f"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}; restart 1 of 1" in told
    assert_same(tmp_path, undisturbed)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"{3 * STEPS:010d}",
        f"{4 * STEPS:010d}",
    ]


def test_a_stopped_stage_is_named_and_ended_after_the_timeout(tmp_path: Path, capfd: Capfd, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "3")
    fault(monkeypatch, f"stage0:step{STEPS + 1}:stop")
    assert distributed(tmp_path) == 1
    line = last_line(capfd)
    assert re.search(rf"stage 0 of 2 \(process \d+\) was stopped for 3 s in step {STEPS + 1} and was ended; the ", line)
    assert summary(tmp_path)["status"] == "failed"


def test_a_stage_that_is_slower_by_far_raises_no_alarm_and_is_flagged_in_the_report(
    tmp_path: Path, monkeypatch: Patch, capfd: Capfd
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "3")
    fault(monkeypatch, "stage1:step0:slow")
    monkeypatch.setattr("parlay.launch.slow.EVIDENCE", 0.3)
    assert distributed(tmp_path, "--json", "--epochs", 6, "--report") == 0
    told = json.loads(capfd.readouterr().out)
    assert told == summary(tmp_path)
    (slow,) = told["slow_stages"]
    assert slow["stage"] == 1
    assert slow["times"] > 3
    assert "slow stage: the steps of stage 1 took" in told["message"]
    assert "slow stage: the steps of stage 1 took" in (tmp_path / "report.html").read_text()


def test_an_error_in_one_stage_is_that_stages_and_out_of_memory_says_what_takes_less(tmp_path: Path) -> None:
    script = """
import os, sys, torch
from parlay.cli import main
from parlay.engines.distributed import Distributed
from parlay.launch import worker
real = Distributed.parallel_step
def full(self, batch):
    if os.environ["RANK"] == "1" and batch.step == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    real(self, batch)
Distributed.parallel_step = full
worker.end(main(sys.argv[1:]))
"""
    told = command.train(small_launch(tmp_path, (sys.executable, "-c", script)))
    assert told["status"] == summary(tmp_path)["status"] == "failed"
    line = r"stage 1 of 2 \(process \d+\) failed in step 4: out of memory: write --batch-size 16, --store host or "
    assert re.match(line, told["message"]), told["message"]


def small_launch(out: Path, program: tuple[str, ...]) -> supervisor.Launch:
    recipe = Recipe(
        model="resnet8",
        dataset="synthetic",
        synthetic_shape="1,8,8",
        synthetic_samples=96,
        batch_size=32,
        device="cpu",
        stages=2,
        epochs=3,
        engine="distributed",
    )
    return supervisor.Launch(recipe, out, program=program)


# --- signals ---


@contextmanager
def running_launcher(out: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, with its ranks in their first parallel epoch."""
    command = [sys.executable, "-m", "parlay.cli", "train", *SMALL, "--out", out, *WORDS, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), **pipes) as process:  # type: ignore[call-overload]
        try:
            wait_for(lambda: (out / "records.jsonl").exists() and records(out))
            yield process
        finally:
            process.kill()


def test_when_the_launcher_is_killed_no_stage_is_left(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it leaves there when it is killed
    with running_launcher(tmp_path, "--epochs", 1000) as launcher:
        stages = children(launcher.pid)
        assert len(stages) == 2
        launcher.kill()
        assert wait_for(lambda: not any(map(is_running, stages))) < 5


def test_sigterm_while_a_stage_waits_makes_a_checkpoint_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    fault(monkeypatch, f"stage1:step{STEPS + 1}:slow")
    with running_launcher(tmp_path) as launcher:
        time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert summary(tmp_path)["status"] == "interrupted"
    assert told.splitlines()[-1].startswith("interrupted; ")
    assert f"go on with: parlay train --resume --out {tmp_path}" in told
    assert kept(tmp_path)
    monkeypatch.delenv("PARLAY_FAULT")
    assert resumed(tmp_path) == 0
    assert_same(tmp_path, undisturbed)


# --- disks ---


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """For this process and those that it starts; the kernel then answers as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_in_one_line_and_the_checkpoint_before_goes_on(
    tmp_path: Path, undisturbed: Path, capfd: Capfd
) -> None:
    assert distributed(tmp_path, "--epochs", 1) == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "checkpoints" / "0000000003").iterdir()}
    with no_file_above(sizes["stage-1.safetensors"] - 1):
        assert resumed(tmp_path, "--epochs", EPOCHS) == 1
    line = last_line(capfd)
    assert re.match(r"parlay: stage 1 of 2 \(process \d+\) failed in step 5: .*could not be written", line), line
    assert re.search(r"it needs [\d,]+ bytes and the disk has [\d,]+ free", line)
    assert line.endswith(f"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}")
    assert summary(tmp_path)["status"] == "failed"
    assert resumed(tmp_path) == 0
    assert_same_from_epoch(tmp_path, undisturbed, 1)


def assert_same_from_epoch(out: Path, other: Path, epoch: int) -> None:
    """A run of one epoch has other rates in it: only the number of later ones can be compared."""
    assert [row["epoch"] for row in records(out)][epoch:] == [row["epoch"] for row in records(other)][epoch:]


def test_a_store_that_does_not_fit_is_refused_before_training(tmp_path: Path, capfd: Capfd) -> None:
    with no_file_above(50_000):
        assert distributed(tmp_path, "--store", "file") == 2
    assert "the disk has" in answer(capfd)
    assert not (tmp_path / "records.jsonl").exists()


def test_a_damaged_part_or_one_of_another_step_is_passed_over_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path, capfd: Capfd
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    last, later = out / "checkpoints" / f"{EPOCHS * STEPS:010d}", out / "checkpoints" / f"{EPOCHS * STEPS + 1:010d}"
    shutil.copytree(last, later)
    (later / "stage-1.safetensors").unlink()  # one stage came further than the other
    flip_a_byte(last / "stage-1.safetensors")
    assert resumed(out) == 0
    told = capfd.readouterr().err
    before = out / "checkpoints" / f"{(EPOCHS - 1) * STEPS:010d}"
    assert f"checkpoint {later} is damaged: stage-1.safetensors is missing; {before} is taken instead" in told
    assert f"checkpoint {last} is damaged: stage-1.safetensors does not have the SHA-256" in told
    assert_same(out, undisturbed)


# --- wrong input ---


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (["--stages", 9], {}, "9 stages of a model with 5 blocks: write a number of stages from 1 to 5"),
        (["--stages", 0], {}, "0 stages of a model with 5 blocks: write a number of stages from 1 to 5"),
        (["--stages", 3], {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and 3 stages need 3: start 3 processes, or write --st"),
        (["--replicas", 2], {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and 2 stages x 2 replicas need 4: start 4 processes"),
        ([], {"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 tasks, each of which would start 2 processes"),
        (["--replicas", 0], {}, "replicas is 0: write a number of at least 1"),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "0 GPUs for 2 processes: write --device cpu"),
        (["--port", 70000], {}, "port is 70000: write a number from 1 to 65535"),
        (["--trust", 1, "--method", "serial"], {}, "trust is not for method 'serial'"),
        ([], {"PARLAY_FAULT": "stage2:step1:kill"}, "PARLAY_FAULT is for stage 2 and the last of 2 stages is 1"),
        ([], {"PARLAY_TIMEOUT": "soon"}, "PARLAY_TIMEOUT is 'soon': write a number of seconds above 0"),
        ([], {"RANK": "one"}, "the environment variable RANK is 'one': write a whole number, or unset it"),
        (["--engine", "in-process", "--max-restarts", 1], {}, "--max-restarts is for several processes: leave it out"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(
    words: list[object], environment: dict[str, str], told: str, tmp_path: Path, capsys: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ranks.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed(tmp_path, *words) == 2
    line = capsys.readouterr().err
    assert told in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "records.jsonl").exists()


def test_under_torchrun_a_wrong_world_size_or_no_folder_is_refused_by_every_rank(
    tmp_path: Path, capsys: Any, monkeypatch: Patch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert distributed(tmp_path) == 2
    assert capsys.readouterr().err.startswith("parlay: rank 1: WORLD_SIZE is 3 and 2 stages need 2: start 2 processes")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parlay("train", *SMALL, *WORDS) == 2
    assert "write --out DIR" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_with_the_process_that_has_it(tmp_path: Path, capfd: Capfd) -> None:
    with FolderLock(tmp_path):
        assert distributed(tmp_path) == 2
    assert f"{tmp_path} is in use by process {os.getpid()}" in answer(capfd)
    assert not (tmp_path / "records.jsonl").exists()


def test_missing_data_is_told_once_and_not_by_every_stage(tmp_path: Path, capfd: Capfd) -> None:
    words = ["--dataset", "mnist", "--data-dir", tmp_path / "none"]
    assert distributed(tmp_path / "run", *words) == 2
    assert "get them with `parlay data fetch mnist" in answer(capfd)


# --- the training itself ---


def test_a_loss_that_is_not_a_number_stops_all_stages_before_the_update(
    tmp_path: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    fault(monkeypatch, f"stage0:step{STEPS + 1}:nan")
    assert distributed(tmp_path / "a") == 1
    line = last_line(capfd)
    assert train(tmp_path / "b", *WORDS, "--engine", "in-process") == 1
    alike = last_line(capfd)
    for told, out in ((line, tmp_path / "a"), (alike, tmp_path / "b")):
        assert summary(out)["status"] == "diverged"
        assert "the loss of stage 0 of 2 is nan in epoch 2, step 2 (samples " in told
        assert f"the last checkpoint is {out}/checkpoints/{STEPS:010d}" in told


def test_a_last_batch_of_one_and_an_odd_side_are_trained_on(tmp_path: Path) -> None:
    words = ["--synthetic-samples", 33, "--synthetic-shape", "1,7,7", "--downsample", 2, "--epochs", 2]
    words += ["--serial-phase", "sequential"]
    assert distributed(tmp_path, *words) == 0
    assert train(tmp_path / "in", *WORDS, *words, "--engine", "in-process") == 0
    ours, theirs = kept(tmp_path), kept(tmp_path / "in")
    assert all(torch.allclose(value, theirs[name], atol=1e-4) for name, value in ours.items())


def test_a_batch_norm_over_one_value_is_refused_by_all_in_one_line(tmp_path: Path, capfd: Capfd) -> None:
    assert distributed(tmp_path, "--synthetic-shape", "1,4,4", "--synthetic-samples", 33) == 2
    assert "with batch-size 32 of 33 samples a stage meets a batch of one" in answer(capfd)


def test_another_number_of_stages_and_the_other_engine_go_on_from_a_checkpoint(
    tmp_path: Path, undisturbed: Path, capfd: Capfd
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    assert resumed(out, "--epochs", EPOCHS + 1, "--stages", 3, "--engine", "in-process") == 0
    assert "the states are set anew" in capfd.readouterr().err
    assert resumed(out, "--epochs", EPOCHS + 2, "--stages", 2, "--engine", "distributed") == 0
    assert "the states are set anew" in capfd.readouterr().err
    assert [row["epoch"] for row in records(out)] == list(range(EPOCHS + 2))


def test_one_process_is_killed_by_the_hook_too(tmp_path: Path, monkeypatch: Patch) -> None:
    fault(monkeypatch, f"stage1:step{STEPS + 1}:kill")
    words = [*SMALL, "--out", tmp_path, *WORDS, "--engine", "in-process"]
    done = subprocess.run([sys.executable, "-m", "parlay.cli", "train", *map(str, words)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    monkeypatch.delenv("PARLAY_FAULT")
    assert resumed(tmp_path) == 0
    assert train(tmp_path / "whole", *WORDS, "--engine", "in-process") == 0
    assert records(tmp_path) == records(tmp_path / "whole")


# --- torchrun ---


def torchrun(out: Path, *options: object, words: tuple[object, ...] = ()) -> list[str]:
    program = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "parlay.cli", "train"]
    return list(map(str, [*program, *SMALL, *WORDS, "--out", out, *words]))


def test_torchrun_restarts_from_the_last_checkpoint_and_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    fault(monkeypatch, f"stage1:step{STEPS + 1}:kill")
    began = time.monotonic()
    command = torchrun(tmp_path, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1)
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 25  # it waits 30 s for survivors that do not end when told
    assert done.stdout.startswith("finished; ")
    assert_same(tmp_path, undisturbed)


def test_sigterm_to_torchrun_makes_a_checkpoint_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    fault(monkeypatch, f"stage1:step{STEPS + 1}:slow")
    command = torchrun(tmp_path, "--standalone", "--nproc-per-node", 2, "--monitor-interval", 0.1)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            wait_for(lambda: (tmp_path / "records.jsonl").exists() and records(tmp_path))
            running.send_signal(signal.SIGTERM)
            assert running.wait(25) != 0  # it waits 30 s for those that do not end when told
        finally:
            running.kill()
    assert summary(tmp_path)["status"] == "interrupted"
    assert kept(tmp_path)
    monkeypatch.delenv("PARLAY_FAULT")
    assert resumed(tmp_path) == 0
    assert_same(tmp_path, undisturbed)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a wire between them: 10.77.0.1 and 10.77.0.2."""
    names = f"parlay{os.getpid()}a", f"parlay{os.getpid()}b"
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is missing")
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces are not allowed: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        wires = f"pv{os.getpid()}a", f"pv{os.getpid()}b"
        ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", "name", wires[1], "netns", names[1])
        for i, (name, wire) in enumerate(zip(names, wires, strict=True), 1):
            ip("-n", name, "link", "set", wire, "name", "wire")
            ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def ip(*words: str) -> None:
    _network("ip", *words)


def tc(*words: str) -> str:
    if shutil.which("tc") is None:
        pytest.skip("the command `tc` is missing")
    return _network("tc", *words)


def _network(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a virtual network is not allowed: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def on_both(hosts: tuple[str, str], out: Path, *words: object) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`torchrun --nnodes 2`, a stage on each host; what they say goes into OUT/said-0 and OUT/said-1."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "wire"}
    processes = []
    for i, host in enumerate(hosts):
        options = ["--nnodes", 2, "--node-rank", i, "--nproc-per-node", 1, "--monitor-interval", 0.1]
        command = torchrun(out, *options, "--master-addr", "10.77.0.1", "--master-port", 29511, words=words)
        with (out / f"said-{i}").open("wb") as said:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *command],
                    env=environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        yield processes
    finally:
        for process, host in zip(processes, hosts, strict=True):
            process.kill()
            process.wait()
            inside = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
            for pid in map(int, inside.stdout.split()):  # torchrun's own children, which outlive it
                os.kill(pid, signal.SIGKILL)


def test_two_hosts_with_a_slow_link_train_as_one_does(
    two_hosts: tuple[str, str], tmp_path: Path, undisturbed: Path
) -> None:
    limit = ["rate", "20mbit", "burst", "32kb", "latency", "400ms"]
    tc("-n", two_hosts[0], "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
    with on_both(two_hosts, tmp_path) as processes:
        codes = [process.wait(60) for process in processes]
    assert codes == [0, 0], (tmp_path / "said-0").read_text() + (tmp_path / "said-1").read_text()
    assert_same(tmp_path, undisturbed)
    held_back = re.search(r"overlimits (\d+)", tc("-n", two_hosts[0], "-s", "qdisc", "show", "dev", "wire"))
    assert held_back is not None
    assert int(held_back[1]) > 0


def test_a_cut_link_is_an_error_on_both_hosts_at_the_timeout(
    two_hosts: tuple[str, str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "4")
    fault(monkeypatch, f"stage1:step{STEPS}:slow")  # so that the link is cut within a step

    def lost(rank: int) -> bool:
        return f"parlay: rank {rank}: stage {rank} lost " in (tmp_path / f"said-{rank}").read_text()

    with on_both(two_hosts, tmp_path, "--epochs", 100):
        wait_for(lambda: (tmp_path / "records.jsonl").exists() and records(tmp_path))
        time.sleep(0.3)
        ip("-n", two_hosts[0], "link", "set", "wire", "down")
        seconds = wait_for(lambda: lost(0) and lost(1))
    assert 3 < seconds < 12
    assert summary(tmp_path)["status"] == "failed"
    assert kept(tmp_path)
