"""The launcher with stand-ins for the ranks: who is named, how fast, and that nobody is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from parlay import faults, signs
from parlay.config.recipe import Recipe
from parlay.engine import meeting, transport
from parlay.errors import InputError, StageLost
from parlay.launch import cause, heartbeat, rank, slow, summary, supervise
from parlay.launch.rank import ExitReport, Position
from ranks import SERVER
from runs import is_running, wait_for

Patch = pytest.MonkeyPatch
STANDIN = (sys.executable, str(Path(__file__).with_name("standin.py")))


def launch(out: Path, stages: int = 3, **options: Any) -> supervise.Outcome:
    return supervise.run(supervise.Launch(Recipe(stages=stages, engine="distributed"), out, **options))


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "2")
    monkeypatch.setattr(supervise, "PROGRAM", STANDIN)


@pytest.fixture(autouse=True)
def none_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    wait_for(lambda: not any(map(is_running, pids(tmp_path))), 2)


def pids(out: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(out.glob("here-*"))]


# --- ends ---


def test_a_run_whose_ranks_end_in_order_is_finished(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(tmp_path) == supervise.Outcome("finished", whole=True)
    assert capfd.readouterr() == ("", "rank 0 speaks\n")


KILLED = r"was killed by signal 9 \(SIGKILL\) in step 5"


@pytest.mark.parametrize(
    ("stage", "kind", "survivors", "said"),
    [
        (1, "kill", "blame", KILLED),
        (2, "exit", "blame", r"ended with exit code 3 in step 5: rank 2 speaks"),
        pytest.param(0, "kill", "blocked", KILLED, marks=pytest.mark.slow),
    ],
)
def test_a_dead_stage_is_named_and_all_have_stopped_within_five_seconds(
    stage: int, kind: str, survivors: str, said: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("STANDIN", f"steps:1000,survivors:{survivors}")
    monkeypatch.setenv("PARLAY_FAULT", f"stage{stage}:step5:{kind}")
    began = time.monotonic()
    outcome = launch(tmp_path)
    assert time.monotonic() - began < 5
    line = rf"stage {stage} of 3 \(process {pids(tmp_path)[stage]}\) {said}; there is no checkpoint yet"
    assert outcome.status == "failed"
    assert re.fullmatch(line, outcome.message), outcome.message


@pytest.mark.parametrize(
    ("kind", "what"),
    [("hang", "gave no sign of life"), pytest.param("stop", "was stopped", marks=pytest.mark.slow)],
)
def test_a_stuck_stage_is_named_by_its_heartbeat_and_ended_after_the_timeout(
    kind: str, what: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("STANDIN", "steps:1000,survivors:blame")
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step5:{kind}")
    began = time.monotonic()
    outcome = launch(tmp_path)
    assert 2 <= time.monotonic() - began < 5
    assert outcome.message.startswith("stage 1 of 3 (process ")
    assert f"{what} for 2 s in step 5 and was ended" in outcome.message


@pytest.mark.slow
def test_a_stage_that_is_many_times_slower_is_no_fault_and_is_flagged(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("STANDIN", "steps:12")
    monkeypatch.setenv("PARLAY_FAULT", "stage1:step0:slow")
    monkeypatch.setattr(slow, "EVIDENCE", 0.3)
    told = summary.train(supervise.Launch(Recipe(stages=3, engine="distributed"), tmp_path))
    assert told == json.loads((tmp_path / "summary.json").read_text())
    (flagged,) = told["slow_stages"]
    assert (told["status"], flagged["stage"], flagged["replica"]) == ("finished", 1, 0)
    assert flagged["times"] > 3
    assert "slow stage: the steps of stage 1 took" in told["message"]


def test_wrong_input_that_only_a_rank_can_see_is_told_once_and_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("STANDIN", "wrong:data")
    assert launch(tmp_path) == supervise.Outcome("", "nothing at data: write another")


@pytest.mark.slow
def test_a_lost_stage_is_restarted_as_often_as_asked(
    tmp_path: Path, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", "stage1:step5:kill")
    monkeypatch.setenv("PARLAY_DEBUG", "1")
    assert launch(tmp_path, max_restarts=1).status == "finished"
    told = capfd.readouterr().err
    assert "was killed by signal 9 (SIGKILL) in step 5" in told
    assert "restart 1 of 1" in told
    assert told.count("[stage 1 of 3] rank 1 speaks\n") == 2
    assert (tmp_path / "here-1-1").exists()


# --- the machine is suspended ---


@pytest.mark.parametrize("launcher", [0.8], indirect=True)
def test_a_suspended_machine_is_no_silence(tmp_path: Path, launcher: Launcher) -> None:
    """The launcher wakes first: it finds the others stopped, and silent for longer than its timeout."""
    processes = [launcher.pid, *pids(tmp_path)]
    time.sleep(0.4)  # in the middle of a step: the launcher knows of its beginning
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.6)
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    then = time.time()
    wait_for(lambda: (tmp_path / "step-2").stat().st_mtime > then, 5)  # they go on
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.outcome() == "interrupted: "


def test_a_rank_that_was_stopped_does_not_take_its_neighbour_for_lost(monkeypatch: Patch) -> None:
    """It sleeps for a moment, and wakes 100 seconds later."""
    now, clock = [0.0], signs.RunningClock
    monkeypatch.setattr(transport.time, "sleep", lambda _: now.append(now[-1] + 100))
    monkeypatch.setattr(signs, "RunningClock", lambda: clock(lambda: now[-1]))
    transport.Waits(0).until(lambda: len(now) > 3, "stage 1")
    with pytest.raises(StageLost, match="stage 0 lost stage 1: no answer for 2 seconds"):
        transport.Waits(0).until(lambda: False, "stage 1")


# --- ports ---


def test_a_given_port_in_use_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} cannot be used \\(Address already in use\\)"):
            launch(tmp_path, port=port)
    assert pids(tmp_path) == []
    assert launch(tmp_path, port=port).status == "finished"


def test_the_store_listens_to_this_machine_alone() -> None:
    with supervise._store(None) as port:
        table = Path("/proc/net/tcp").read_text().splitlines()[1:]
        every = Path("/proc/net/tcp6").read_text().splitlines()[1:]
        listening = [line.split()[1] for line in table + every if line.split()[3] == "0A"]
        assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_a_new_start_does_not_meet_the_ranks_of_the_one_before() -> None:
    """The store is one and the same through all starts, as torchrun's is."""
    store = HashStore()
    names = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            late = [pool.submit(meeting.agree, store, number, 3, 10.0) for number in (2, 0)]
            time.sleep(0.1)
            found = {start.result() for start in [*late, pool.submit(meeting.agree, store, 1, 3, 10.0)]}
        assert len(found) == 1
        names += found
    assert len(set(names)) == 3


def test_a_rank_that_is_not_met_is_no_reason_to_wait_for_ever() -> None:
    with pytest.raises(StageLost, match=re.escape("rank 0 has not met all others within 0.2 seconds")):
        meeting.agree(HashStore(), 0, 2, 0.2)


# --- signals to the launcher itself ---


class Launcher:
    """In a process of its own, with three ranks that have all begun."""

    def __init__(self, out: Path) -> None:
        self._answer, there = SERVER.Pipe(duplex=False)
        environment = {name: os.environ[name] for name in ("PARLAY_TIMEOUT", "STANDIN", "TMPDIR")}
        self.process = SERVER.Process(target=_launch, args=(out, environment, there), daemon=True)
        self.process.start()
        there.close()
        self.pid = self.process.pid or 0
        wait_for(lambda: len(list(out.glob("step-*"))) == 3)

    def outcome(self) -> str:
        assert self._answer.poll(10), "no outcome"
        return str(self._answer.recv())


def _launch(out: Path, environment: dict[str, str], answer: Connection) -> None:
    os.environ |= environment
    supervise.PROGRAM = STANDIN
    outcome = launch(out)
    answer.send(f"{outcome.status}: {outcome.message}")


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: Patch, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    monkeypatch.setenv("STANDIN", f"steps:100000,seconds:{getattr(request, 'param', 0.02)}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it leaves there when it is killed
    started = Launcher(tmp_path)
    yield started
    started.process.kill()
    started.process.join()


def test_when_the_launcher_is_killed_no_rank_is_left(tmp_path: Path, launcher: Launcher) -> None:
    os.kill(pids(tmp_path)[2], signal.SIGSTOP)
    launcher.process.kill()
    assert wait_for(lambda: not any(map(is_running, pids(tmp_path)))) < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_passed_on_once(number: signal.Signals, tmp_path: Path, launcher: Launcher) -> None:
    os.kill(launcher.pid, number)
    assert launcher.outcome() == "interrupted: "
    assert not any(map(is_running, pids(tmp_path)))


def test_the_second_signal_ends_all_at_once(tmp_path: Path, launcher: Launcher) -> None:
    os.kill(pids(tmp_path)[1], signal.SIGSTOP)  # it will not come to the next step, and the others wait for it
    for _ in range(2):
        time.sleep(0.3)
        os.kill(launcher.pid, signal.SIGTERM)
    assert wait_for(lambda: not any(map(is_running, pids(tmp_path)))) < 1
    assert launcher.outcome() == "interrupted: ended by a second signal; there is no checkpoint yet"


# --- the first cause, and what a rank says of itself ---


def failure(number: int, code: int, at: float, error: str = "", stuck: str = "") -> cause.Failure:
    report = ExitReport(code, message=error) if error else None
    return cause.Failure(Position(number, 3), 100 + number, code, at, 7, report, "", stuck)


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:41"


@pytest.mark.parametrize(
    "failures",
    [
        [failure(0, 1, 1.0, GLOO), failure(1, -9, 1.1), failure(2, 1, 1.2, GLOO)],
        [failure(0, 1, 1.0, GLOO), failure(1, 1, 1.1, "ZeroDivisionError: over nothing")],
        [failure(0, -6, 1.0), failure(1, 1, 1.1, "out of memory: write less")],
        [failure(0, 1, 1.0, GLOO), failure(1, -6, 1.1)],
        [failure(0, -11, 1.0), failure(1, -9, 1.1, stuck="was stopped")],
        [failure(0, 1, 1.0, GLOO), failure(1, 1, 0.9, GLOO)],
    ],
)
def test_the_first_cause_is_told_from_those_that_only_lost_a_neighbour(failures: list[cause.Failure]) -> None:
    assert cause.first_cause(failures).position.rank == 1


def test_a_failure_names_the_replica_and_the_signal() -> None:
    told = str(cause.Failure(Position(5, 3, 2), 77, -11, 1.0, -1, None))
    assert told == "stage 2 of 3, replica 1 of 2 (process 77) was killed by signal 11 (SIGSEGV) before its first step"


def test_what_a_rank_says_last_is_read_back(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(rank.ERROR_FILE, str(path))
    monkeypatch.setenv("RANK", "2")
    report = ExitReport(1, message="lost\u2028stage 1", lost=True)
    assert rank.read_report(path) is None
    rank.leave(report)
    assert rank.read_report(path) == report
    assert capsys.readouterr().err == "parlay: rank 2: lost\u2028stage 1\n"  # nobody else would say it under torchrun


def test_a_rank_asks_cuda_for_many_connections_unless_the_user_has_asked_otherwise(monkeypatch: Patch) -> None:
    for given in ("32", "1"):
        rank.begin(2, 1)
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == given
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


# --- heartbeats ---


@pytest.fixture
def beats(tmp_path: Path) -> heartbeat.BeatFile:
    return heartbeat.BeatFile(tmp_path / "beats", 2)


@pytest.fixture
def now(monkeypatch: Patch) -> list[float]:
    """The time, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def test_a_beat_is_seen_by_others_and_waiting_is_left_out(
    beats: heartbeat.BeatFile, tmp_path: Path, now: list[float]
) -> None:
    own = heartbeat.Heartbeat(heartbeat.BeatFile(tmp_path / "beats", 2), 1)
    for step in range(heartbeat.ENOUGH + 1):
        assert beats.read(1).step_seconds == 0.0
        own.beat(step)
        now[0] += 3.0
        own.waited(2.0)
    assert beats.read(0) == heartbeat.Beat()
    assert beats.read(1) == heartbeat.Beat(8, 127.0, 1.0, computed=8.0)


def test_a_rank_in_a_call_that_waits_for_all_says_so_and_the_step_does_not_count(
    beats: heartbeat.BeatFile, now: list[float]
) -> None:
    own = heartbeat.Heartbeat(beats, 0)
    for step in range(2 * heartbeat.ENOUGH):
        own.beat(step)
        with own.blocked(), own.blocked():
            assert beats.read(0).blocked
            now[0] += 5.0
    assert beats.read(0) == heartbeat.Beat(15, 180.0, 0.0)


def test_a_beat_is_read_whole_whenever_its_writer_is_looked_at_or_killed(
    beats: heartbeat.BeatFile, tmp_path: Path
) -> None:
    """Half written, its time was 0 once: to the launcher silence since the start, and it killed a healthy rank."""
    script = """
import itertools, pathlib, sys
from parlay.launch.heartbeat import Beat, BeatFile
beats = BeatFile(pathlib.Path(sys.argv[1]), 2)
for n in itertools.count(1):
    beats.write(1, Beat(n, n, n, n, n))
"""
    with subprocess.Popen((sys.executable, "-c", script, tmp_path / "beats")) as writer:
        wait_for(lambda: beats.read(1) != heartbeat.Beat())
        looks = [beats.read(1) for _ in range(50_000)]
        writer.kill()
    looks.append(beats.read(1))
    assert {len(set(astuple(beat))) for beat in looks} == {1}
    assert [beat.step for beat in looks] == sorted(beat.step for beat in looks)
    assert beats.read(0) == heartbeat.Beat()


def test_silence_is_no_fault_while_the_processor_is_busy() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        clock = heartbeat.CpuClock(busy.pid)
        clock.restart(time.monotonic())
        time.sleep(0.5)
        assert clock.busy(time.monotonic())
        assert not clock.stopped()
        busy.send_signal(signal.SIGSTOP)
        wait_for(clock.stopped)
        clock.restart(time.monotonic())
        time.sleep(0.2)
        assert not clock.busy(time.monotonic())
        busy.kill()


def flagged(ranks: slow.SlowRanks, computed: float, first: float, second: float) -> list[tuple[int, float]]:
    """What is flagged once both ranks have computed for so long and their steps take so many seconds."""
    beats = {
        Position(number, 2): heartbeat.Beat(step_seconds=seconds, computed=computed)
        for number, seconds in enumerate((first, second))
    }
    return [(found["stage"], found["times"]) for found in ranks.found(beats)]


def test_a_stage_is_flagged_once_it_has_been_slow_at_every_look_for_long_enough() -> None:
    ranks = slow.SlowRanks()
    for computed in (0.0, 6.0):
        assert flagged(ranks, computed, 0.01, 0.1) == []
    assert flagged(ranks, 8.0, 0.1, 0.1) == []  # on a busy machine the steps of a moment say nothing
    for computed in (9.0, 18.0):
        assert flagged(ranks, computed, 0.01, 0.1) == []
    assert flagged(ranks, 19.0, 0.01, 0.1) == [(1, 10.0)]


def test_without_a_launcher_nobody_listens_and_a_rank_waits_for_the_timeout(monkeypatch: Patch) -> None:
    signs.beat(1)
    signs.waited(1.0)
    with signs.blocked():
        assert signs.patience() == 2.0
    monkeypatch.delenv("PARLAY_TIMEOUT")
    assert signs.patience() == signs.TIMEOUT == 15.0


@pytest.mark.parametrize("text", ["soon", "0", "inf", "nan"])
def test_a_timeout_that_is_none_is_refused(text: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", text)
    with pytest.raises(InputError, match="write a number of seconds above 0"):
        signs.timeout()


# --- faults on demand ---


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stage1:step37:kill", faults.Fault(1, 37, "kill")),
        ("stage0:step0:stop:save", faults.Fault(0, 0, "stop", "save")),
    ],
)
def test_a_fault_is_read_from_its_words(text: str, fault: faults.Fault, monkeypatch: Patch) -> None:
    assert faults.parse(text) == fault
    monkeypatch.setenv("PARLAY_FAULT", text)
    assert faults.from_environment() == fault
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # none strikes a run that was restarted
    assert faults.from_environment() is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stage1:step-3:kill", "write it as in stage1:step37:kill"),
        ("stage1:step3:burn", "unknown fault 'burn' in PARLAY_FAULT: write one of kill, stop"),
        ("stage1:step3:kill:lunch", "unknown point 'lunch' in PARLAY_FAULT: write one of step, exchange, save"),
        ("stage1:step3:nan:save", "the fault 'nan' has no point 'save'"),
        ("stage4:step3:nan", "is for stage 4 and the last of 3 stages is 2"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str, told: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_FAULT", text)
    with pytest.raises(InputError, match=re.escape(told)):
        faults.arm(3)
