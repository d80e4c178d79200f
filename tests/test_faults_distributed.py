"""Faults with a process per stage: who is named, that all end, and that nothing is lost that was saved.

Most runs here are of two ranks from the fork server, as torchrun starts them. Where a test is about the launcher, the
ranks are its own; test_launch has more of these, with ranks that need no torch.
"""

from __future__ import annotations

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

import pytest
import torch

from parlay.files import FolderLock
from parlay.launch import supervise
from ranks import commands
from runs import (
    SMALL,
    STEPS,
    flip_a_byte,
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
    assert ranks_of(os.getpid()) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    assert codes(in_two(out)) == [0, 0]
    return out


def in_two(out: Path, *words: object) -> list[tuple[int, str]]:
    """Exit codes and output of the two ranks of a run."""
    return commands(2, "train", *SMALL, "--out", out, *WORDS, *words)


def resumed_in_two(out: Path, *words: object) -> list[tuple[int, str]]:
    return commands(2, "train", "--resume", "--out", out, *words)


def codes(ended: list[tuple[int, str]]) -> list[int]:
    return [code for code, _ in ended]


def launched(out: Path, *words: object) -> int:
    return train(out, *WORDS, *words)


def ranks_of(launcher: int) -> list[int]:
    children = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return [pid for pid in children if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


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
    code, said = ended[1 - stage]
    assert code == 1
    assert f"parlay: rank {1 - stage}: stage {1 - stage} lost " in said
    monkeypatch.delenv("PARLAY_FAULT")
    assert codes(resumed_in_two(tmp_path)) == [0, 0]
    assert_same(tmp_path, undisturbed)


@slow
def test_a_random_stage_killed_at_a_random_step_until_the_run_is_done_changes_nothing(
    tmp_path: Path, undisturbed: Path
) -> None:
    dice = random.Random(19)  # both stages, in serial and parallel steps
    kills, ended = 0, [1, 1]
    while any(ended):
        saved = max((int(path.name) for path in (tmp_path / "checkpoints").glob("0*")), default=0)
        step = saved + dice.randrange(3 * STEPS)
        with pytest.MonkeyPatch.context() as patch:
            point = dice.choice(["step", "exchange"])
            patch.setenv("PARLAY_FAULT", f"stage{dice.randrange(2)}:step{step}:kill:{point}")
            ended = codes(resumed_in_two(tmp_path) if kills else in_two(tmp_path))
        assert ended == [0, 0] or ended.count(-signal.SIGKILL) == 1
        kills += any(ended)
    assert kills == 4
    assert_same(tmp_path, undisturbed)


@slow
def test_the_launcher_names_a_killed_stage_and_restarts_from_the_checkpoint_before(
    tmp_path: Path, undisturbed: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    """It is killed while it saves: its part is written and the whole is not valid yet."""
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{2 * STEPS - 1}:kill:save")
    assert launched(tmp_path, "--max-restarts", 1) == 0
    assert re.search(
        rf"stage 1 of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\) in step {2 * STEPS - 1}; "
        rf"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}; restart 1 of 1",
        capfd.readouterr().err,
    )
    assert_same(tmp_path, undisturbed)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"{3 * STEPS:010d}", f"{4 * STEPS:010d}"]


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
    tmp_path: Path, undisturbed: Path, capfd: Capfd, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(supervise, "PROGRAM", (sys.executable, "-c", OUT_OF_MEMORY))
    assert launched(tmp_path) == 1
    line = r"parlay: stage 1 of 2 \(process \d+\) failed in step 4: out of memory: write --batch-size 16, --store host"
    assert re.match(line, said := last_line(capfd)), said
    told = summary(tmp_path)
    assert told.keys() >= summary(undisturbed).keys()
    assert (told["status"], told["epochs"], told["message"]) == ("failed", 1, said.removeprefix("parlay: "))


# --- signals, and a machine that is suspended ---

PARLAY = [sys.executable, "-m", "parlay.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", 0.1]
ON_ONE_HOST = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "-m", "parlay.cli"]


@contextmanager
def running(command: list[object], out: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, with its ranks in their first parallel epoch."""
    words = list(map(str, [*command, "train", *SMALL, "--out", out, *WORDS]))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_for(lambda: (out / "records.jsonl").exists() and records(out))
            yield process
        finally:
            process.kill()


@slow
@pytest.mark.parametrize("command", [PARLAY, ON_ONE_HOST], ids=["parlay", "torchrun"])
def test_sigterm_while_a_stage_waits_makes_a_checkpoint_and_the_rest_is_as_undisturbed(
    command: list[object], tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS + 1}:slow")
    with running(command, tmp_path) as launcher:
        time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
        said, _ = launcher.communicate(timeout=25)  # torchrun waits 30 s for those that do not end when told
    assert launcher.returncode != 0
    assert summary(tmp_path)["status"] == "interrupted"
    if command is PARLAY:
        assert said.splitlines()[-1].startswith("interrupted; ")
        assert f"go on with: parlay train --resume --out {tmp_path}" in said
    monkeypatch.delenv("PARLAY_FAULT")
    assert codes(resumed_in_two(tmp_path)) == [0, 0]
    assert_same(tmp_path, undisturbed)


@slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_suspended_machine_goes_on_in_whatever_order_it_wakes(
    order: int, tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "3")
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS}:slow")  # long enough to be stopped
    with running(PARLAY, tmp_path) as launcher:
        processes = [launcher.pid, *ranks_of(launcher.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)
        for pid in processes[::order]:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        said, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, said
    assert_same(tmp_path, undisturbed)


@slow
def test_torchrun_restarts_from_the_last_checkpoint_and_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{STEPS + 1}:kill")
    with running(ON_ONE_HOST, tmp_path) as launcher:
        said, _ = launcher.communicate(timeout=25)  # it waits 30 s for survivors that do not end when told
    assert launcher.returncode == 0, said
    assert "finished; " in said
    assert_same(tmp_path, undisturbed)


# --- disks ---


@slow
def test_a_full_disk_ends_the_run_in_one_line_and_the_checkpoint_before_goes_on(tmp_path: Path, capfd: Capfd) -> None:
    assert codes(in_two(tmp_path, "--epochs", 1)) == [0, 0]
    size = (tmp_path / "checkpoints" / f"{STEPS:010d}" / "stage-1.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))  # the kernel answers as it does on a full disk
    try:
        assert parlay("train", "--resume", "--out", tmp_path, "--epochs", EPOCHS) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    line = last_line(capfd)
    assert re.match(r"parlay: stage 1 of 2 \(process \d+\) failed in step 5: .*could not be written", line), line
    assert re.search(r"it needs [\d,]+ bytes and the disk has [\d,]+ free", line)
    assert line.endswith(f"the last checkpoint is {tmp_path}/checkpoints/{STEPS:010d}")
    assert summary(tmp_path)["status"] == "failed"
    assert codes(resumed_in_two(tmp_path)) == [0, 0]
    assert len(records(tmp_path)) == EPOCHS


@slow
def test_a_damaged_part_or_one_of_another_step_is_passed_over_and_the_rest_is_as_undisturbed(
    tmp_path: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    before, last, later = (out / "checkpoints" / f"{EPOCHS * STEPS + steps:010d}" for steps in (-STEPS, 0, 1))
    shutil.copytree(last, later)
    (later / "stage-1.safetensors").unlink()  # one stage came further than the other
    flip_a_byte(last / "stage-1.safetensors")
    (code, said), _ = resumed_in_two(out)
    assert code == 0
    assert f"checkpoint {later} is damaged: stage-1.safetensors is missing; {before} is taken instead" in said
    assert f"checkpoint {last} is damaged: stage-1.safetensors does not have the SHA-256" in said
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
        ([], {"RANK": "1", "WORLD_SIZE": "3"}, "rank 1: WORLD_SIZE is 3 and 2 stages need 2: start 2 processes"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(
    words: list[object], environment: dict[str, str], told: str, tmp_path: Path, capsys: Capfd, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(supervise.elastic, "start_processes", lambda *_, **__: pytest.fail("a process was started"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched(tmp_path, *words) == 2
    line = capsys.readouterr().err
    assert told in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "/run is in use by process "),
        (["--dataset", "mnist", "--data-dir", "/none"], "get them with `parlay data fetch mnist"),
        (["--synthetic-shape", "1,4,4", "--synthetic-samples", 33], "of 33 samples a stage meets a batch of one"),
    ],
)
def test_what_only_ranks_can_see_is_refused_by_all_of_them(words: list[object], told: str, tmp_path: Path) -> None:
    with FolderLock(tmp_path / ("other" if words else "run")):
        ended = in_two(tmp_path / "run", *words)
    assert codes(ended) == [2, 2]
    assert all(told in said for _, said in ended)
    assert not (tmp_path / "run" / "records.jsonl").exists()


@slow
def test_another_number_of_stages_and_the_other_engine_go_on_from_a_checkpoint(
    tmp_path: Path, undisturbed: Path, capfd: Capfd
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    words = ["--resume", "--out", out, "--epochs", EPOCHS + 1, "--stages", 3, "--engine", "in-process"]
    assert parlay("train", *words) == 0
    assert "the states are set anew" in capfd.readouterr().err
    (code, said), _ = resumed_in_two(out, "--epochs", EPOCHS + 2, "--stages", 2, "--engine", "distributed")
    assert code == 0
    assert "the states are set anew" in said
    assert [row["epoch"] for row in records(out)] == list(range(EPOCHS + 2))


# --- two hosts ---


def network(*words: str) -> str:
    """What a command of the network says; a test that is not allowed to give it is skipped."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"the command `{words[0]}` is missing")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a virtual network is not allowed: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a wire between them: 10.77.0.1 and 10.77.0.2."""
    names = f"parlay{os.getpid()}a", f"parlay{os.getpid()}b"
    wires = f"pv{os.getpid()}a", f"pv{os.getpid()}b"
    try:
        for name in names:
            network("ip", "netns", "add", name)
        add = ["ip", "link", "add", wires[0], "netns", names[0], "type", "veth"]
        network(*add, "peer", "name", wires[1], "netns", names[1])
        for i, (name, wire) in enumerate(zip(names, wires, strict=True), 1):
            network("ip", "-n", name, "link", "set", wire, "name", "wire")
            network("ip", "-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "wire")
            network("ip", "-n", name, "link", "set", "wire", "up")
            network("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def on_both(hosts: tuple[str, str], out: Path) -> Iterator[None]:
    """`torchrun --nnodes 2`, a stage on each host; what they say goes into OUT/said-0 and OUT/said-1."""
    processes = []
    for i, host in enumerate(hosts):
        torchrun = [*TORCHRUN, "--nnodes", 2, "--node-rank", i, "--master-addr", "10.77.0.1", "--master-port", 29511]
        command = ["ip", "netns", "exec", host, *torchrun, "-m", "parlay.cli", "train", *SMALL, *WORDS, "--out", out]
        with (out / f"said-{i}").open("wb") as said:
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "wire"}
            processes.append(subprocess.Popen(list(map(str, command)), env=env, stdout=said, stderr=subprocess.STDOUT))
    try:
        yield
    finally:
        for process, host in zip(processes, hosts, strict=True):
            process.kill()
            process.wait()
            for pid in network("ip", "netns", "pids", host).split():  # torchrun's own children, which outlive it
                os.kill(int(pid), signal.SIGKILL)


@slow
def test_a_slow_link_is_only_slow_and_a_cut_one_is_an_error_on_both_hosts_at_the_timeout(
    two_hosts: tuple[str, str], tmp_path: Path, undisturbed: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "4")
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step{2 * STEPS}:slow")  # so that the link is cut within a step
    limit = ["rate", "20mbit", "burst", "32kb", "latency", "400ms"]
    network("tc", "-n", two_hosts[0], "qdisc", "add", "dev", "wire", "root", "tbf", *limit)

    def lost(rank: int) -> bool:
        return f"parlay: rank {rank}: stage {rank} lost " in (tmp_path / f"said-{rank}").read_text()

    with on_both(two_hosts, tmp_path):
        wait_for(lambda: (tmp_path / "records.jsonl").exists() and len(records(tmp_path)) == 2)
        statistics = network("tc", "-n", two_hosts[0], "-s", "qdisc", "show", "dev", "wire")
        time.sleep(0.4)  # the checkpoint is written
        network("ip", "-n", two_hosts[0], "link", "set", "wire", "down")
        seconds = wait_for(lambda: lost(0) and lost(1))
    assert int(statistics.partition("overlimits ")[2].split()[0]) > 0
    assert 3 < seconds < 12
    assert summary(tmp_path)["status"] == "failed"
    assert records(tmp_path) == records(undisturbed)[:2]
