"""The benchmark compares fairly, says what speaks against layer-parallel training, and ends when a process does."""

import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest

from parlay.bench import cpu, processes, table
from parlay.bench.core import Problem, Result, System, as_json, best, interleaved, quartiles, sentences
from parlay.bench.processes import BenchWorker, Pool, Seat, Timing, shares
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from runs import answer, parlay

Capsys = pytest.CaptureFixture[str]
PROBLEM = Problem("resnet8", 16)
TINY = ["--model", "resnet8", "--dataset", "synthetic", "--synthetic-shape", "1,8,8", "--batch-size", 16]
SYSTEMS = {
    *("serial", "serial-all-threads", "layer-parallel", "layer-parallel-ds", "stages-alone"),
    *("replay", "delayed", "pipeline-1f1b", "pipeline-gpipe", "data-parallel"),
}


@final
class Scripted(System):
    """Takes as long as it is told, and notes when it was asked."""

    def __init__(self, system: str, seconds: Sequence[float], log: list[str], baseline: bool = False) -> None:
        self.system, self.stages, self.baseline = system, 2, baseline
        self.seconds, self.log = seconds, log

    def time(self, steps: int) -> float:
        self.log.append(self.system)
        return self.seconds[self.log.count(self.system) - 1] * steps


def timed(*given: tuple[str, Sequence[float]], samples: float | None = None, rounds: int = 2) -> list[Result]:
    """Of systems with these times, the first of each in the warm-up; the last one trains on so many samples."""
    log: list[str] = []
    systems = [Scripted(name, seconds, log) for name, seconds in given]
    systems[-1].samples = samples
    return interleaved(systems, PROBLEM, rounds, 5, str)


def row(system: str, ms: float, note: str = "", samples: float = 16) -> Result:
    return Result(system, 2, PROBLEM, (ms / 1000,), (samples / 16 * 100 / ms,), note, samples)


def test_every_round_times_every_system_once_and_begins_with_another_one() -> None:
    log: list[str] = []
    interleaved([Scripted(name, [1.0] * 9, log) for name in "abc"], PROBLEM, 3, 2, str)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"  # the first round warms up


def test_a_slow_moment_of_the_machine_falls_out_of_the_ratio() -> None:
    found = timed(("serial", [9, 2, 4, 2]), ("layer-parallel", [9, 1, 2, 1]), rounds=3)  # in the second round, for both
    assert [one.speedups for one in found] == [(1, 1, 1), (2, 2, 2)]
    told = found[1].json()
    assert (told["step_ms"], told["step_ms_low"], told["step_ms_high"]) == (1000, 1000, 1500)
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_a_system_that_trains_on_half_of_the_batch_is_compared_by_the_same_work() -> None:
    rows = timed(("serial", [9, 2, 2]), ("layer-parallel", [9, 0.5, 0.5]), samples=8.0)
    told = [row.json() for row in rows]
    assert [(one["speedup"], one["speedup_per_step"]) for one in told] == [(1, 1), (2, 4)]
    assert [(one["samples_per_step"], one["sample_us"]) for one in told] == [(16, 125_000), (8, 62_500)]
    assert "each stage trains on 8 of 16 samples in a step (layer-parallel)" in sentences(rows)[0]


def test_the_fastest_serial_system_is_what_all_are_held_against() -> None:
    log: list[str] = []
    given = (("serial-eager", 4.0), ("serial-graph", 1.0), ("serial", 2.0), ("layer-parallel", 0.5))
    systems = [Scripted(name, [s] * 4, log, name.startswith("serial-")) for name, s in given]
    found = interleaved(systems, PROBLEM, 3, 2, str)
    assert [one.speedup for one in found] == [0.25, 1.0, 0.5, 2.0]
    assert as_json(found, {}, "")["baseline"] == "serial-graph"


def test_without_a_serial_row_there_is_no_ratio() -> None:
    rows = timed(("layer-parallel", [1, 1, 1]))
    assert rows[0].json()["speedup"] is rows[0].json()["speedup_per_step"] is None
    assert table.title(rows) == "resnet8, batch 16: no serial training was timed"


def test_of_a_pipeline_at_several_m_the_fastest_counts_and_the_others_are_named() -> None:
    rows = best([row("serial", 100), row("pipeline-1f1b", 80, "M = 2"), row("pipeline-1f1b", 70, "M = 4")])
    assert [(r.system, r.note) for r in rows] == [("serial", ""), ("pipeline-1f1b", "M = 4")]
    assert rows[1].json()["tried_step_ms"] == {"M = 2": 80, "M = 4": 70}


def test_whatever_is_faster_than_layer_parallel_is_said_in_a_sentence() -> None:
    ours = row("layer-parallel", 60)
    slower = [row("serial", 100), ours, row("data-parallel", 61), row("pipeline-1f1b", 59.5), row("stages-alone", 50)]
    assert sentences(slower) == []  # two per cent are no difference
    told = sentences([row("serial", 50), ours, row("data-parallel", 40), row("pipeline-1f1b", 30)])
    assert len(told) == 3
    assert "slower than serial training" in told[0]
    assert "data-parallel is 1.50 times as fast as layer-parallel on 2 devices. Take data-parallel" in told[1]
    assert "pipeline-1f1b is 2.00 times as fast" in told[2]
    halved = row("layer-parallel", 60, samples=8)  # 120 ms a batch
    told = sentences([row("serial", 100), halved, row("data-parallel", 80)])
    assert "slower than serial training (0.83 times its speed)" in told[1]


def test_the_table_names_its_baseline_and_gives_time_per_sample() -> None:
    rows = [row("serial", 100, "one core"), row("layer-parallel", 50, samples=8)]
    title = "resnet8, batch 16: speed-up over serial (one core), by time per sample trained; medians (quartiles)"
    assert table.title(rows) == title
    assert [one["µs a sample"] for one in table.cells(rows)] == ["6250", "6250"]
    assert [one["samples a step"] for one in table.cells(rows)] == ["16", "8"]
    assert "speed-up per step" not in table.cells(rows[:1])[0]


def test_what_even_the_slowest_stage_waits_is_beyond_imbalance() -> None:
    # ten seconds, in which one stage waits for two and is done a second early, and the other waits for one
    found = shares([[Timing(5, 0.0, 9.0, 7.0, 2.0), Timing(5, 0.0, 10.0, 9.0, 1.0)]])
    assert found["wait_share"] == pytest.approx([0.3, 0.1])
    assert found["wait_share_beyond_imbalance"] == pytest.approx(0.1)
    assert found["cpu_share"] == [0.7, 0.9]
    assert found["stage_ms"] == [1800, 2000]
    assert "wait_share" not in shares([[Timing(1, 0.0, 1.0, 1.0, None)]])


# Processes


@final
class Weak(BenchWorker):
    """Fails, or ends without a word, in the last process."""

    def __init__(self, how: str, seat: Seat) -> None:
        self.how = how if seat.rank == seat.size - 1 else ""
        if self.how == "refuse":
            raise InputError("that cannot be timed: write another")

    def step(self, n: int, option: Any) -> None:  # noqa: ARG002
        if self.how == "raise":
            raise ValueError("no more")
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            signal.pause()


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("raise", RuntimeError, "weak: process 1 failed: ValueError: no more"),
        ("die", RuntimeError, r"weak: process 1 ended \(exit code -9\)"),
        ("hang", RuntimeError, "weak: process 1 gave no answer"),
        ("refuse", InputError, "^that cannot be timed: write another$"),
    ],
)
def test_a_process_that_fails_is_named_and_none_is_left(
    how: str, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STEP_SECONDS", 2.0 if how == "hang" else 60.0)
    monkeypatch.setattr(processes, "END_SECONDS", 0.1)
    weak = Pool("weak", partial(Weak, how), 2)
    started = list(weak.processes)

    def readied_and_timed() -> None:
        weak.ready()
        weak.time(1)

    try:
        with pytest.raises(kind, match=told):
            readied_and_timed()
    finally:
        weak.close()
    assert not any(process.is_alive() for process in started)
    assert not weak.scratch.exists()


# The command


def test_a_benchmark_on_cores_times_every_system_and_needs_no_data(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "bench.json"
    words = ["--stages", 2, "--rounds", 1, "--steps", 2, "--device", "cpu", "--out", file, "--json"]
    assert parlay("bench", *TINY, *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(file.read_text())
    rows = {r["system"]: r for r in told["rows"]}
    assert set(rows) == SYSTEMS
    keys = {"system", "stages", "step_ms", "speedup", "samples_per_step", "sample_us", "speedup_per_step"}
    assert all(set(r) >= keys for r in rows.values())
    assert all(r["step_ms"] > 0 and r["speedup"] > 0 and r["model"] == "resnet8" for r in rows.values())
    assert rows["serial"]["speedup"] == 1
    assert told["baseline"] == "serial"
    assert {r["samples_per_step"] for r in rows.values()} == {16}
    assert rows["data-parallel"]["stages"] == 2
    assert set(rows["pipeline-1f1b"]["tried_step_ms"]) == {"M = 2", "M = 4", "M = 8"}
    assert len(rows["layer-parallel"]["wait_share"]) == 2
    assert 0 <= rows["layer-parallel"]["wait_share_beyond_imbalance"] <= 1
    assert told["command"].startswith("parlay bench --model resnet8")
    assert told["environment"]["torch"]


@pytest.mark.slow
def test_on_cores_only_the_methods_own_systems_train_on_half_of_the_batch() -> None:
    keys: dict[str, Any] = {"model": "resnet8", "dataset": "digits", "batch_size": 16, "stages": 2, "partition": "2"}
    _, systems = cpu.systems(Recipe(**keys, method="penalty"), str)
    try:
        assert all(system.time(1) > 0 for system in systems if system.system == "stages-alone")
    finally:
        for system in systems:
            system.close()
    halved = {"layer-parallel", "layer-parallel-ds", "stages-alone"}
    assert {system.system for system in systems if system.samples == 8} == halved
    assert all(system.samples in (None, 16) for system in systems if system.system not in halved)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", 0], "rounds is 0: write a number of at least 1"),
        (["--steps", 0], "steps is 0: write a number of at least 1"),
        (["--model", "resnet-vae"], "bench times classifiers"),
        (["--method", "serial"], "write --method al or penalty"),
        (["--stages", 9], "9 stages of a model with 5 blocks"),
        (["--out", "/nowhere/bench.json"], "write --out with a file in a folder that exists"),
        (["--stps", 3], "write --steps"),
        (["--whole"], "leave --whole out"),
    ],
)
def test_wrong_input_is_answered_in_one_line(words: list[object], told: str, capsys: Capsys) -> None:
    assert parlay("bench", *TINY, "--device", "cpu", *words) == 2
    assert told in answer(capsys)
