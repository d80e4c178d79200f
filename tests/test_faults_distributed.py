"""Faults with a process per stage: who is named, that all end, and that nothing is lost that was saved.

Most runs here are of two ranks from the fork server, as torchrun starts them. Where the launcher is what a test is
about, the ranks are its own (test_launch has more of these, with ranks that need no torch).
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay.checkpoint import FolderLock
from parlay.launch import supervise
from ranks import commands
from runs import (
    SMALL,
    STEPS,
    answer,
    flip_a_byte,
    is_running,
    kept,
    last_line,
    parlay,
    records,
    summary,
    train,
    wait_for,
)

Capfd = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
slow = pytest.mark.slow
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
    assert children(os.getpid()) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    assert [code for code, _ in in_two(out)] == [0, 0]
    return out


def in_two(out: Path, *words: object) -> list[tuple[int, str]]:
    """Exit code and output of the two ranks of a run."""
    return commands(2, "train", *SMALL, "--out", out, *WORDS, *words)


def resumed_in_two(out: Path, *words: object) -> list[tuple[int, str]]:
    return commands(2, "train", "--resume", "--out", out, *words)


def launched(out: Path, *words: object) -> int:
    return train(out, *WORDS, *words)


def resumed(out: Path, *words: object) -> int:
    return parlay("train", "--resume", "--out", out, *words)


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


def assert_same(out: Path, other: Path) -> None:
    """Weights, batch statistics, optimiser state and records, bit for bit."""
    ours, theirs = kept(out), kept(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert records(out) == records(other)
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


# --- a stage is lost ---


@pytest.mark.parametrize(("stage", "point"), [(0, "exchange"), pytest.param(1, "step", marks=slow)])
def test_a_killed_stage_is_lost_to_the_other_and_resumed_the_run_is_as_undisturbed(
    stage: int, point: str, tmp_path: Path, monkeypatch: Patch, undisturbed: Path
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage{stage}:step{STEPS + 1}:kill:{point}")
    ended = in_two(tmp_path)
    assert ended[stage][0] == -signal.SIGKILL
    code, told = ended[1 - stage]
    assert code == 1
    assert f"parlay: rank {1 - stage}: stage {1 - stage} lost " in told
    monkeypatch.delenv("PARLAY_FAULT")
    assert [code for code, _ in resumed_in_two(tmp_path)] == [0, 0]
    assert_same(tmp_path, undisturbed)


@slow
def test_a_random_stage_killed_at_a_random_step_until_the_run_is_done_changes_nothing(
    tmp_path: Path, undisturbed: Path
) -> None:
    dice = random.Random(19)  # both stages, in serial and parallel steps
    kills, ended = 0, [(1, "")]
    while any(code for code, _ in ended):
        saved = max((int(path.name) for path in (tmp_path / "checkpoints").glob("0*")), default=0)
        step = saved + dice.randrange(3 * STEPS)
        with pytest.MonkeyPatch.context() as patch:
            point = dice.choice(["step", "exchange"])
            patch.setenv("PARLAY_FAULT", f"stage{dice.randrange(2)}:step{step}:kill:{point}")
            ended = resumed_in_two(tmp_path) if kills else in_two(tmp_path)
        killed = [code for code, _ in ended if code == -signal.SIGKILL]
        assert len(killed) == 1 or [code for code, _ in ended] == [0, 0]
        kills += len(killed)
    assert kills == 4
    assert_same(tmp_path, undisturbed)


@slow
def test_the_launcher_names_a_killed_stage_and_restarts_from_the_checkpoint_before(
    tmp_path: Path, undisturbed: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    """It is killed while it saves: its part is written and the whole is not valid yet."""
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{2 * STEPS - 1}:kill:save")
    assert launched(tmp_path, "--max-restarts", 1) == 0
    told = capfd.readouterr().err
    assert re.search(
        rf"stage 1 of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\) in step {2 * STEPS - 1}; "
        rf"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}; restart 1 of 1",
        told,
    ), told
    assert_same(tmp_path, undisturbed)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"{3 * STEPS:010d}", f"{4 * STEPS:010d}"]


@slow
def test_a_stopped_stage_is_named_and_ended_after_the_timeout(tmp_path: Path, capfd: Capfd, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "3")
    monkeypatch.setenv("PARLAY_FAULT", f"stage0:step{STEPS + 1}:stop")
    assert launched(tmp_path) == 1
    line = last_line(capfd)
    assert re.search(rf"stage 0 of 2 \(process \d+\) was stopped for 3 s in step {STEPS + 1} and was ended; the ", line)
    assert (summary(tmp_path)["status"], summary(tmp_path)["epochs"]) == ("failed", 1)
    assert summary(tmp_path)["message"] == line.removeprefix("parlay: ")


@slow
def test_a_stage_that_is_slower_by_far_raises_no_alarm_and_is_flagged(
    tmp_path: Path, monkeypatch: Patch, capfd: Capfd
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "3")
    monkeypatch.setenv("PARLAY_FAULT", "stage1:step0:slow")
    monkeypatch.setattr("parlay.launch.slow.EVIDENCE", 0.3)
    assert launched(tmp_path, "--json", "--epochs", 6) == 0
    told = json.loads(capfd.readouterr().out)
    assert told == summary(tmp_path)
    (found,) = told["slow_stages"]
    assert found["stage"] == 1
    assert found["times"] > 3
    assert "slow stage: the steps of stage 1 took" in told["message"]


OUT_OF_MEMORY = """
import os, sys, torch
from parlay import faults
from parlay.cli import main
from parlay.launch.rank import end
def full(step, stages, point="step"):
    if os.environ["RANK"] == "1" and step == 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
faults.reach = full
end(main(sys.argv[1:]))
"""


@slow
def test_an_error_in_one_stage_is_that_stages_and_out_of_memory_says_what_takes_less(
    tmp_path: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(supervise, "PROGRAM", (sys.executable, "-c", OUT_OF_MEMORY))
    assert launched(tmp_path) == 1
    assert summary(tmp_path)["status"] == "failed"
    line = (
        r"parlay: stage 1 of 2 \(process \d+\) failed in step 4: out of memory: write --batch-size 16, "
    )
    assert re.match(line, told := last_line(capfd)), told


# --- signals, and a machine that is suspended ---


@contextmanager
def running(out: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, with its ranks in their first parallel epoch."""
    command = [sys.executable, "-m", "parlay.cli", "train", *SMALL, "--out", out, *WORDS, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), **pipes) as process:  # type: ignore[call-overload]
        try:
            wait_for(lambda: (out / "records.jsonl").exists() and records(out))
            yield process
        finally:
            process.kill()


@slow
def test_when_the_launcher_is_killed_no_stage_is_left(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it leaves there when it is killed
    with running(tmp_path, "--epochs", 1000) as launcher:
        stages = children(launcher.pid)
        assert len(stages) == 2
        launcher.kill()
        assert wait_for(lambda: not any(map(is_running, stages))) < 5


@slow
def test_sigterm_while_a_stage_waits_makes_a_checkpoint_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS + 1}:slow")
    with running(tmp_path) as launcher:
        time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert summary(tmp_path)["status"] == "interrupted"
    assert told.splitlines()[-1].startswith("interrupted; ")
    assert f"go on with: parlay train --resume --out {tmp_path}" in told
    monkeypatch.delenv("PARLAY_FAULT")
    assert [code for code, _ in resumed_in_two(tmp_path)] == [0, 0]
    assert_same(tmp_path, undisturbed)


@slow
@pytest.mark.parametrize("first", ["launcher", "ranks"])
def test_a_suspended_machine_goes_on_in_whatever_order_it_wakes(
    first: str, tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "3")
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS}:slow")  # long enough to be stopped
    with running(tmp_path) as launcher:
        processes = [launcher.pid, *children(launcher.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)
        for pid in processes if first == "launcher" else reversed(processes):
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        _, told = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, told
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


@slow
def test_a_full_disk_ends_the_run_in_one_line_and_the_checkpoint_before_goes_on(tmp_path: Path, capfd: Capfd) -> None:
    assert [code for code, _ in in_two(tmp_path, "--epochs", 1)] == [0, 0]
    size = (tmp_path / "checkpoints" / f"{STEPS:010d}" / "stage-1.safetensors").stat().st_size
    with no_file_above(size - 1):
        assert resumed(tmp_path, "--epochs", EPOCHS) == 1
    line = last_line(capfd)
    assert re.match(r"parlay: stage 1 of 2 \(process \d+\) failed in step 5: .*could not be written", line), line
    assert re.search(r"it needs [\d,]+ bytes and the disk has [\d,]+ free", line)
    assert line.endswith(f"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}")
    assert summary(tmp_path)["status"] == "failed"
    assert [code for code, _ in resumed_in_two(tmp_path)] == [0, 0]
    assert len(records(tmp_path)) == EPOCHS


@slow
def test_a_store_that_does_not_fit_is_refused_before_training(tmp_path: Path, capfd: Capfd) -> None:
    with no_file_above(50_000):
        assert launched(tmp_path, "--store", "file") == 2
    assert "the disk has" in answer(capfd)
    assert not (tmp_path / "records.jsonl").exists()


@slow
def test_a_damaged_part_or_one_of_another_step_is_passed_over_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    last, later = out / "checkpoints" / f"{EPOCHS * STEPS:010d}", out / "checkpoints" / f"{EPOCHS * STEPS + 1:010d}"
    shutil.copytree(last, later)
    (later / "stage-1.safetensors").unlink()  # one stage came further than the other
    flip_a_byte(last / "stage-1.safetensors")
    (code, told), _ = resumed_in_two(out)
    assert code == 0
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
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "0 GPUs for 2 processes: write --device cpu"),
        (["--port", 70000], {}, "port is 70000: write a number from 1 to 65535"),
        ([], {"PARLAY_FAULT": "stage2:step1:kill"}, "PARLAY_FAULT is for stage 2 and the last of 2 stages is 1"),
        ([], {"PARLAY_TIMEOUT": "soon"}, "PARLAY_TIMEOUT is 'soon': write a number of seconds above 0"),
        ([], {"RANK": "one"}, "the environment variable RANK is 'one': write a whole number, or unset it"),
        (["--engine", "in-process", "--max-restarts", 1], {}, "--max-restarts is for several processes: leave it out"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(
    words: list[object], environment: dict[str, str], told: str, tmp_path: Path, capsys: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(supervise, "start_processes", lambda *_, **__: pytest.fail("a process was started"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched(tmp_path, *words) == 2
    line = capsys.readouterr().err
    assert told in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "records.jsonl").exists()


def test_under_torchrun_a_wrong_world_size_or_no_folder_is_refused_by_every_rank(
    tmp_path: Path, capsys: Any, monkeypatch: Patch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched(tmp_path) == 2
    assert capsys.readouterr().err.startswith("parlay: rank 1: WORLD_SIZE is 3 and 2 stages need 2: start 2 processes")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parlay("train", *SMALL, *WORDS) == 2
    assert "write --out DIR" in capsys.readouterr().err


@slow
def test_a_folder_in_use_is_refused_with_the_process_that_has_it(tmp_path: Path, capfd: Capfd) -> None:
    with FolderLock(tmp_path):
        assert launched(tmp_path) == 2
    assert f"{tmp_path} is in use by process {os.getpid()}" in answer(capfd)
    assert not (tmp_path / "records.jsonl").exists()


@slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dataset", "mnist", "--data-dir", "/none"], "get them with `parlay data fetch mnist"),
        (
            ["--synthetic-shape", "1,4,4", "--synthetic-samples", 33],
            "with batch-size 32 of 33 samples a stage meets a batch of one",
        ),
    ],
)
def test_wrong_data_is_refused_by_all_ranks(words: list[object], told: str, tmp_path: Path) -> None:
    for code, said in in_two(tmp_path, *words):
        assert code == 2
        assert told in said


# --- the training itself ---


@slow
def test_a_loss_that_is_not_a_number_stops_all_stages_before_the_update(
    tmp_path: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage0:step{STEPS + 1}:nan")
    (code, line), (other, _) = in_two(tmp_path / "a")
    assert code == other == train(tmp_path / "b", *WORDS, "--engine", "in-process") == 1
    for told, out in ((line, tmp_path / "a"), (last_line(capfd), tmp_path / "b")):
        assert summary(out)["status"] == "diverged"
        assert "the loss of stage 0 of 2 is nan in epoch 2, step 2 (samples " in told
        assert f"the last checkpoint is {out}/checkpoints/{STEPS:010d}" in told


@slow
def test_a_last_batch_of_one_and_an_odd_side_are_trained_on(tmp_path: Path) -> None:
    words = ["--synthetic-samples", 33, "--synthetic-shape", "1,7,7", "--downsample", 2, "--epochs", 2]
    words += ["--serial-phase", "sequential"]
    assert [code for code, _ in in_two(tmp_path, *words)] == [0, 0]
    assert train(tmp_path / "in", *WORDS, *words, "--engine", "in-process") == 0
    ours, theirs = kept(tmp_path), kept(tmp_path / "in")
    assert all(torch.allclose(value, theirs[name], atol=1e-4) for name, value in ours.items())


@slow
def test_another_number_of_stages_and_the_other_engine_go_on_from_a_checkpoint(
    tmp_path: Path, undisturbed: Path, capfd: Capfd
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    assert resumed(out, "--epochs", EPOCHS + 1, "--stages", 3, "--engine", "in-process") == 0
    assert "the states are set anew" in capfd.readouterr().err
    (code, told), _ = resumed_in_two(out, "--epochs", EPOCHS + 2, "--stages", 2, "--engine", "distributed")
    assert code == 0
    assert "the states are set anew" in told
    assert [row["epoch"] for row in records(out)] == list(range(EPOCHS + 2))


# --- torchrun ---


def torchrun(out: Path, *options: object, words: tuple[object, ...] = ()) -> list[str]:
    program = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "parlay.cli", "train"]
    return list(map(str, [*program, *SMALL, *WORDS, "--out", out, *words]))


@slow
def test_torchrun_restarts_from_the_last_checkpoint_and_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS + 1}:kill")
    began = time.monotonic()
    command = torchrun(tmp_path, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1)
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 25  # it waits 30 s for survivors that do not end when told
    assert done.stdout.startswith("finished; ")
    assert_same(tmp_path, undisturbed)


@slow
def test_sigterm_to_torchrun_makes_a_checkpoint_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS + 1}:slow")
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
    assert [code for code, _ in resumed_in_two(tmp_path)] == [0, 0]
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


@slow
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


@slow
def test_a_cut_link_is_an_error_on_both_hosts_at_the_timeout(
    two_hosts: tuple[str, str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "4")
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS}:slow")  # so that the link is cut within a step

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
