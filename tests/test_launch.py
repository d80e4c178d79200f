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
from pathlib import Path

import pytest
from torch.distributed import HashStore

from parlay import faults
from parlay.config.recipe import Recipe
from parlay.errors import InputError, StageLost
from parlay.launch import blame, heartbeat, meeting, places, slow, supervisor, worker
from parlay.launch.ranks import CpuClock
from runs import is_running, wait_for

Patch = pytest.MonkeyPatch
STANDIN = (sys.executable, str(Path(__file__).with_name("standin.py")))


def launch(out: Path, stages: int = 3, **options: object) -> supervisor.Ending:
    recipe = Recipe(stages=stages, engine="distributed")
    return supervisor.run(supervisor.Launch(recipe, out, program=STANDIN, **options))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", "2")


@pytest.fixture(autouse=True)
def none_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert [pid for pid in pids(tmp_path) if is_running(pid)] == []


def pids(out: Path) -> list[int]:
    return [int(path.read_text()) for path in out.glob("here-*")]


# --- ends ---


def test_a_run_whose_ranks_end_in_order_is_finished(tmp_path: Path) -> None:
    ending = launch(tmp_path)
    assert (ending.status, ending.message, ending.whole, ending.slow) == ("finished", "", True, ())


@pytest.mark.parametrize("survivors", ["blame", "blocked"])
@pytest.mark.parametrize(
    ("stage", "kind", "told"),
    [
        (0, "kill", r"was killed by signal 9 \(SIGKILL\) in step 5"),
        (1, "kill", r"was killed by signal 9 \(SIGKILL\) in step 5"),
        (2, "exit", r"ended with exit code 3 in step 5: rank 2 speaks"),
    ],
)
def test_a_dead_stage_is_named_and_all_have_stopped_within_five_seconds(
    stage: int, kind: str, told: str, survivors: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("STANDIN", f"steps:1000,survivors:{survivors}")
    monkeypatch.setenv("PARLAY_FAULT", f"stage{stage}:step5:{kind}")
    began = time.monotonic()
    ending = launch(tmp_path)
    assert time.monotonic() - began < 5
    pid = int((tmp_path / f"here-{stage}-0").read_text())
    assert ending.status == "failed"
    line = rf"stage {stage} of 3 \(process {pid}\) {told}; there is no checkpoint yet"
    assert re.fullmatch(line, ending.message), ending.message


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_stuck_stage_is_named_by_its_heartbeat_and_ended_after_the_timeout(
    kind: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("STANDIN", "steps:1000,survivors:blame")
    monkeypatch.setenv("PARLAY_FAULT", f"stage1:step5:{kind}")
    began = time.monotonic()
    ending = launch(tmp_path)
    assert 2 <= time.monotonic() - began < 5
    what = {"stop": "was stopped", "hang": "gave no sign of life"}[kind]
    assert ending.message.startswith("stage 1 of 3 (process ")
    assert f"{what} for 2 s in step 5 and was ended" in ending.message


def test_a_stage_that_is_many_times_slower_is_no_fault_and_is_flagged(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("STANDIN", "steps:12")
    monkeypatch.setenv("PARLAY_TIMEOUT", "1")
    monkeypatch.setenv("PARLAY_FAULT", "stage1:step0:slow")
    monkeypatch.setattr(slow, "EVIDENCE", 0.3)
    ending = launch(tmp_path)
    assert ending.status == "finished"
    (flagged,) = ending.slow
    assert (flagged["stage"], flagged["replica"]) == (1, 0)
    assert flagged["times"] > 3


def test_silence_is_no_fault_while_the_processor_is_busy() -> None:
    script = "import time\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script]) as busy:
        try:
            clock = CpuClock(busy.pid)
            clock.restart(time.monotonic())
            time.sleep(0.5)
            assert clock.busy(time.monotonic())
            assert not clock.stopped()
            busy.send_signal(signal.SIGSTOP)
            wait_for(clock.stopped)
            clock.restart(time.monotonic())
            time.sleep(0.2)
            assert not clock.busy(time.monotonic())
        finally:
            busy.kill()


def test_wrong_input_that_only_a_rank_can_see_is_told_once_and_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("STANDIN", "wrong:data")
    ending = launch(tmp_path)
    assert (ending.status, ending.message) == ("", "nothing at data: write another")


# --- restarts ---


def test_a_lost_stage_is_restarted_as_often_as_asked(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARLAY_FAULT", "stage1:step5:kill")
    ending = launch(tmp_path, max_restarts=1)
    assert ending.status == "finished"
    assert "was killed by signal 9 (SIGKILL) in step 5" in (told := capsys.readouterr().err)
    assert "restart 1 of 1" in told
    assert (tmp_path / "here-1-1").exists()


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
    with supervisor._store(None) as port:
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
            late = [pool.submit(meeting.agree, store, rank, 3, 10.0) for rank in (2, 0)]
            time.sleep(0.1)
            found = {start.result() for start in [*late, pool.submit(meeting.agree, store, 1, 3, 10.0)]}
        assert len(found) == 1
        names += found
    assert len(set(names)) == 3


def test_a_rank_that_is_not_met_is_no_reason_to_wait_for_ever() -> None:
    with pytest.raises(StageLost, match=re.escape("rank 0 has not met all others within 0.2 seconds")):
        meeting.agree(HashStore(), 0, 2, 0.2)


# --- signals to the launcher itself ---

LAUNCHER = """
import sys
from pathlib import Path
from parlay.launch import supervisor
from parlay.config.recipe import Recipe
out, program = Path(sys.argv[1]), tuple(sys.argv[2:])
ending = supervisor.run(supervisor.Launch(Recipe(stages=3, engine="distributed"), out, program=program))
print(ending.status + ": " + ending.message)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: Patch) -> Iterator[subprocess.Popen[str]]:
    """One with three ranks that have all begun."""
    monkeypatch.setenv("STANDIN", "steps:100000")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it leaves there when it is killed
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *STANDIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: len(list(tmp_path.glob("step-*"))) == 3)
            yield process
        finally:
            process.kill()


def test_when_the_launcher_is_killed_no_rank_is_left(tmp_path: Path, launcher: subprocess.Popen[str]) -> None:
    stuck = int((tmp_path / "here-2-0").read_text())
    os.kill(stuck, signal.SIGSTOP)
    launcher.kill()
    assert wait_for(lambda: not any(map(is_running, pids(tmp_path)))) < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_passed_on_once(
    number: signal.Signals, tmp_path: Path, launcher: subprocess.Popen[str]
) -> None:
    launcher.send_signal(number)
    told, _ = launcher.communicate(timeout=10)
    assert told == "interrupted: \n"
    assert not any(map(is_running, pids(tmp_path)))


def test_the_second_signal_ends_all_at_once(tmp_path: Path, launcher: subprocess.Popen[str]) -> None:
    os.kill(int((tmp_path / "here-1-0").read_text()), signal.SIGSTOP)  # it will not come to the next step
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    assert wait_for(lambda: not any(map(is_running, pids(tmp_path)))) < 1
    told, _ = launcher.communicate(timeout=10)
    assert told == "interrupted: ended by a second signal; there is no checkpoint yet\n"


# --- who is to blame ---


def end(rank: int, code: int, at: float, error: str = "", stuck: str = "") -> blame.End:
    word = worker.Word(code, error=error) if error else None
    return blame.End(places.place(rank, 3, 1), 100 + rank, code, at, 7, word, "", stuck)


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:41"


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([end(0, 1, 1.0, GLOO), end(1, -9, 1.1), end(2, 1, 1.2, GLOO)], 1),
        ([end(0, 1, 1.0, GLOO), end(1, 1, 1.1, "ZeroDivisionError: over nothing")], 1),
        ([end(0, -6, 1.0), end(1, 1, 1.1, "out of memory: write less")], 1),
        ([end(0, 1, 1.0, GLOO), end(1, -6, 1.1)], 1),
        ([end(0, -11, 1.0), end(1, -9, 1.1, stuck="was stopped")], 1),
        ([end(0, 1, 1.0, GLOO), end(1, 1, 0.9, GLOO)], 1),
    ],
)
def test_the_cause_is_told_from_those_that_only_lost_a_neighbour(ends: list[blame.End], cause: int) -> None:
    assert blame.first_cause(ends).place.rank == cause


@pytest.mark.parametrize(("given", "found"), [(None, "32"), ("1", "1")])
def test_a_rank_asks_cuda_for_many_connections_unless_the_user_has_asked_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.delenv(worker.FOLDER, raising=False)
    worker.begin(2)
    assert os.environ.pop(name) == found


def test_replicas_are_named() -> None:
    at = places.place(5, 3, 2)
    assert (at.stage, at.replica) == (2, 1)
    assert str(at) == "stage 2 of 3, replica 1 of 2"


# --- heartbeats ---


def test_a_beat_is_seen_by_others_and_the_pace_leaves_waiting_out(tmp_path: Path, monkeypatch: Patch) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    seen = heartbeat.Beats(tmp_path / "beats", 2)
    pulse = heartbeat.Pulse(heartbeat.Beats(tmp_path / "beats", 2), 1)
    assert seen.read(1) == heartbeat.NEVER
    for step in range(heartbeat.ENOUGH + 1):
        assert seen.read(1).pace == 0.0
        pulse.beat(step)
        now += 3.0
        pulse.waited(2.0)
    assert seen.read(0) == heartbeat.NEVER
    assert seen.read(1) == heartbeat.Beat(8, 127.0, 18.0, 1.0, computed=8.0)


def test_a_beat_is_read_whole_whenever_its_writer_is_looked_at_or_killed(tmp_path: Path) -> None:
    """Half written, its time was 0 once: to the launcher silence since the start, and it killed a healthy rank."""
    path = tmp_path / "beats"
    seen = heartbeat.Beats(path, 2)
    script = """
import itertools, pathlib, sys
from parlay.launch.heartbeat import Beat, Beats
beats = Beats(pathlib.Path(sys.argv[1]), 2)
for n in itertools.count(1):
    beats.write(1, Beat(n, n, n, n, n, n))
"""
    writer = subprocess.Popen((sys.executable, "-c", script, path))
    wait_for(lambda: seen.read(1) != heartbeat.NEVER)
    looks = [seen.read(1) for _ in range(100_000)]
    writer.kill()
    writer.wait()
    looks.append(seen.read(1))
    assert {len(set(astuple(beat))) for beat in looks} == {1}
    assert [beat.step for beat in looks] == sorted(beat.step for beat in looks)
    assert looks[-1].step > looks[0].step
    assert seen.read(0) == heartbeat.NEVER


def test_a_rank_in_a_call_that_waits_for_all_says_so_and_the_step_has_no_pace(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beats = heartbeat.Beats(tmp_path / "beats", 1)
    pulse = heartbeat.Pulse(beats, 0)
    for step in range(2 * heartbeat.ENOUGH):
        pulse.beat(step)
        with pulse.blocked(), pulse.blocked():
            assert beats.read(0).blocked
            now += 5.0
    assert beats.read(0) == heartbeat.Beat(15, 180.0, 0.0, 0.0, 0)


class Paced:
    """Two ranks on one clock that only the test moves; the launcher looks after every step."""

    def __init__(self, folder: Path, monkeypatch: Patch) -> None:
        self.now = 100.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        self.beats = heartbeat.Beats(folder / "beats", 2)
        self.pulses = [heartbeat.Pulse(self.beats, rank) for rank in (0, 1)]
        self.slow, self.step = slow.SlowRanks(), 0

    def train(self, steps: int, first: float, second: float) -> None:
        """Steps of so many seconds each; the faster rank waits for the other one."""
        for _ in range(steps):
            for pulse in self.pulses:
                pulse.beat(self.step)
            self.now += max(first, second)
            for pulse, own in zip(self.pulses, (first, second), strict=True):
                pulse.waited(max(first, second) - own)
            self.step += 1
            self.slow.look(self.read())

    def read(self) -> dict[places.Place, heartbeat.Beat]:
        return {places.place(rank, 2, 1): self.beats.read(rank) for rank in (0, 1)}

    def flagged(self) -> list[tuple[int, float]]:
        return [(found["stage"], found["times"]) for found in self.slow.found(self.read())]


def test_a_slow_stage_is_flagged_once_it_has_been_slow_for_long_enough(tmp_path: Path, monkeypatch: Patch) -> None:
    paced = Paced(tmp_path, monkeypatch)
    paced.train(60, 0.01, 0.1)  # ten times slower, in a run of six seconds
    assert paced.flagged() == []
    paced.train(60, 0.01, 0.1)
    assert paced.flagged() == [(1, 10.0)]


def test_a_slow_moment_is_not_flagged_however_long_the_run(tmp_path: Path, monkeypatch: Patch) -> None:
    paced = Paced(tmp_path, monkeypatch)
    for _ in range(30):
        paced.train(100, 0.1, 0.1)
        paced.train(30, 0.1, 0.4)
    assert paced.beats.read(1).pace == pytest.approx(0.4)  # as it is to the end of the run
    assert paced.flagged() == []


def test_time_outside_of_steps_is_no_evidence(tmp_path: Path, monkeypatch: Patch) -> None:
    paced = Paced(tmp_path, monkeypatch)
    paced.train(20, 0.01, 0.1)
    paced.now += 1000  # an evaluation; ranks beat in between, without a step
    for pulse in paced.pulses:
        pulse.beat(None)
    assert paced.flagged() == []


def test_without_a_launcher_nothing_beats_and_a_rank_waits_for_the_timeout(monkeypatch: Patch) -> None:
    heartbeat.beat(1)
    heartbeat.waited(1.0)
    assert heartbeat.patience() == 2.0
    monkeypatch.delenv("PARLAY_TIMEOUT")
    assert heartbeat.patience() == heartbeat.TIMEOUT == 15.0


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_none_is_refused(text: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_TIMEOUT", text)
    with pytest.raises(InputError, match="write a number of seconds above 0"):
        heartbeat.timeout()


# --- faults on demand ---


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stage1:step37:kill", faults.Fault(1, 37, "kill")),
        ("stage0:step0:stop:save", faults.Fault(0, 0, "stop", "save")),
    ],
)
def test_a_fault_is_read_from_its_words(text: str, fault: faults.Fault) -> None:
    assert faults.parse(text) == fault


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kill", "write it as in stage1:step37:kill"),
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


def test_no_fault_strikes_a_run_that_was_restarted(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PARLAY_FAULT", "stage1:step3:kill")
    assert faults.from_environment() is not None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert faults.from_environment() is None


def test_what_a_rank_says_last_is_read_back(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(worker.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    word = worker.Word(1, error="lost\u2028stage 1", lost=True)
    worker.leave(word)
    assert worker.heard(tmp_path, 2) == word
    assert worker.heard(tmp_path, 1) is None
    assert json.loads((tmp_path / "rank-2.json").read_text())["lost"] is True
