"""The benchmark compares fairly, says what speaks against layer-parallel training, and ends when a process does."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch

from parlay.bench import core, cpu, gang, table
from parlay.bench.core import Problem, Row, Timed, as_json, best, interleaved, quartiles, sentences
from parlay.bench.gang import Clocked, Gang, Place, Worker, shares
from parlay.bench.workers import samples_per_step
from parlay.errors import InputError
from parlay.recipe import Recipe
from parlay.run.setup import set_up
from runs import answer, parlay

Capsys = pytest.CaptureFixture[str]
PROBLEM = Problem("resnet8", 16)
TINY = ["--model", "resnet8", "--dataset", "synthetic", "--synthetic-shape", "1,8,8", "--batch-size", 16]
SYSTEMS = {
    *("serial", "serial-all-threads", "layer-parallel", "layer-parallel-ds", "stages-alone"),
    *("replay", "delayed", "pipeline-1f1b", "pipeline-gpipe", "data-parallel"),
}


@final
class Scripted(Timed):
    """Takes as long as it is told, and notes when it was asked."""

    def __init__(self, system: str, seconds: list[float], log: list[str], note: str = "") -> None:
        self.system, self.stages, self.note = system, 2, note
        self.seconds, self.log = seconds, log

    def time(self, steps: int) -> float:
        self.log.append(self.system)
        return self.seconds[self.log.count(self.system) - 1] * steps


def quiet(_: str) -> None:
    pass


def row(system: str, ms: float, note: str = "", **keys: Any) -> Row:
    ratio = keys.get("samples", 16) / 16 * 100 / ms
    return Row(system, 2, "resnet8", 16, ms, ms, ms, ratio, ratio, ratio, note, **keys)


def test_every_round_times_every_system_once_and_begins_with_another_one() -> None:
    log: list[str] = []
    interleaved([Scripted(name, [1.0] * 9, log) for name in "abc"], PROBLEM, 3, 2, quiet)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"  # the first round warms up


def test_a_slow_moment_of_the_machine_falls_out_of_the_ratio() -> None:
    log: list[str] = []
    serial = Scripted("serial", [9, 2, 4, 2], log)  # the second round was twice as slow, for both
    ours = Scripted("layer-parallel", [9, 1, 2, 1], log)
    rows = interleaved([serial, ours], PROBLEM, 3, 5, quiet)
    assert [r.speedup for r in rows] == [1, 2]
    assert (rows[1].speedup_low, rows[1].speedup_high) == (2, 2)
    assert rows[1].step_ms == 1000
    assert (rows[1].step_ms_low, rows[1].step_ms_high) == (1000, 1500)


def test_a_system_that_trains_on_half_of_the_batch_is_compared_by_the_same_work() -> None:
    log: list[str] = []
    serial, ours = Scripted("serial", [9, 2, 2], log), Scripted("layer-parallel", [9, 0.5, 0.5], log)
    ours.samples = 8.0
    rows = interleaved([serial, ours], PROBLEM, 2, 1, quiet)
    told = [row.json() for row in rows]
    assert [(one["speedup"], one["speedup_per_step"]) for one in told] == [(1, 1), (2, 4)]
    assert [(one["samples_per_step"], one["sample_us"]) for one in told] == [(16, 125_000), (8, 62_500)]
    assert [one["step_ms"] for one in told] == [2000, 500]
    assert "each stage trains on 8 of 16 samples in a step (layer-parallel)" in sentences(rows)[0]


def test_data_parallel_training_is_held_against_as_many_samples() -> None:
    halved = row("layer-parallel", 60, seconds=(0.06,), samples=8)  # 120 ms a batch
    told = sentences([row("serial", 100, seconds=(0.1,)), halved, row("data-parallel", 80, seconds=(0.08,))])
    assert "slower than serial training (0.83 times its speed)" in told[1]
    assert "data-parallel is 1.50 times as fast" in told[2]


def test_the_table_names_its_baseline_and_gives_time_per_sample() -> None:
    rows = [row("serial", 100, "one core"), row("layer-parallel", 50, samples=8)]
    assert table.title(rows).startswith(
        "resnet8, batch 16: speed-up over serial (one core), by time per sample trained"
    )
    shown = [dict(zip(table.columns(rows), table.cells(one, True), strict=True)) for one in rows]
    assert [one["µs a sample"] for one in shown] == ["6250", "6250"]
    assert [one["samples a step"] for one in shown] == ["16", "8"]
    whole = rows[:1]
    assert len(table.columns(whole)) == len(table.cells(rows[0])) == len(table.columns(rows)) - 2
    assert "speed-up per step" not in table.columns(whole)


@pytest.mark.parametrize(("method", "samples"), [("al", 16), ("penalty", 8), ("replay", 16)])
def test_a_stage_of_the_red_black_order_trains_on_half_of_a_step(method: str, samples: float) -> None:
    recipe = Recipe(model="resnet8", stages=2, batch_size=16, method=method, device="cpu")
    assert samples_per_step(recipe) == samples
    coupling = set_up(recipe).coupling
    if coupling is not None:
        ids = torch.arange(32)
        turns = [coupling.turn(ids, epoch, stage) for epoch in range(2) for stage in range(2)]
        assert all(len(ids if turn is None else turn) == 2 * samples for turn in turns)


def test_the_joint_order_trains_on_all_of_them() -> None:
    assert samples_per_step(Recipe(method="penalty", order="joint", batch_size=16)) == 16


def test_without_a_serial_row_there_is_no_ratio() -> None:
    rows = interleaved([Scripted("layer-parallel", [1, 1], [])], PROBLEM, 1, 1, quiet)
    assert rows[0].speedup is None
    assert rows[0].json()["speedup_per_step"] is None
    assert table.title(rows) == "resnet8, batch 16: no serial training was timed"


@pytest.mark.parametrize(("rounds", "steps"), [(0, 1), (1, 0)])
def test_nothing_to_measure_is_refused(rounds: int, steps: int) -> None:
    with pytest.raises(InputError, match="measure nothing"):
        interleaved([Scripted("serial", [1, 1], [])], PROBLEM, rounds, steps, quiet)


def test_of_a_pipeline_at_several_m_the_fastest_counts_and_the_others_are_named() -> None:
    rows = best([row("serial", 100), row("pipeline-1f1b", 80, "M = 2"), row("pipeline-1f1b", 70, "M = 4")])
    assert [(r.system, r.note) for r in rows] == [("serial", ""), ("pipeline-1f1b", "M = 4")]
    assert rows[1].json()["tried_step_ms"] == {"M = 2": 80, "M = 4": 70}


def test_whatever_is_faster_than_layer_parallel_is_said_in_a_sentence() -> None:
    ours = row("layer-parallel", 60)
    assert sentences([row("serial", 100), ours, row("data-parallel", 61), row("stages-alone", 50)]) == []
    told = sentences([row("serial", 50), ours, row("data-parallel", 40), row("pipeline-1f1b", 30)])
    assert len(told) == 3
    assert "slower than serial training" in told[0]
    assert "Take data-parallel training (DDP) here" in told[1]
    assert "data-parallel is 1.50 times as fast" in told[1]
    assert "pipeline-1f1b is 2.00 times as fast" in told[2]


def test_the_json_has_every_key_of_the_contract() -> None:
    told = as_json([row("serial", 100)], {"torch": "2"}, "parlay bench")
    assert set(told) >= {"rows", "environment", "command"}
    assert set(told["rows"][0]) >= {"system", "stages", "step_ms", "speedup"}
    assert set(told["rows"][0]) >= {"samples_per_step", "sample_us", "speedup_per_step"}
    assert as_json([row("serial", 100), row("layer-parallel", 50)], {}, "")["baseline"] == "serial"


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)


def test_what_even_the_slowest_stage_waits_is_beyond_imbalance() -> None:
    # ten seconds, in which one stage waits for two and is done a second early, and the other waits for one
    found = shares([[Clocked(5, 0.0, 9.0, 7.0, 2.0), Clocked(5, 0.0, 10.0, 9.0, 1.0)]])
    assert found["wait_share"] == [0.3, 0.1]
    assert found["wait_share_beyond_imbalance"] == 0.1
    assert found["cpu_share"] == [0.7, 0.9]
    assert found["stage_ms"] == [1800, 2000]
    assert "wait_share" not in shares([[Clocked(1, 0.0, 1.0, 1.0, None)]])


@final
class Weak(Worker):
    """Fails, or ends without a word, in the given step of its last process."""

    def __init__(self, how: str, place: Place) -> None:
        self.how, self.weak = how, place.rank == place.size - 1

    def step(self, option: Any) -> None:  # noqa: ARG002
        if self.weak and self.how == "raise":
            raise ValueError("no more")
        if self.weak and self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.weak and self.how == "hang":
            signal.pause()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "process 1 failed: ValueError: no more"),
        ("die", r"process 1 ended \(exit code -9\)"),
        ("hang", "process 1 gave no answer"),
    ],
)
def test_a_process_that_fails_is_named_and_none_is_left(how: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "STEP_SECONDS", 2.0 if how == "hang" else 60.0)
    monkeypatch.setattr(gang, "END_SECONDS", 0.1)
    weak = Gang("weak", partial(Weak, how), 2)
    processes = list(weak.processes)
    try:
        weak.ready()
        with pytest.raises(RuntimeError, match=f"weak: {told}"):
            weak.time(1)
    finally:
        weak.close()
    assert not any(process.is_alive() for process in processes)
    assert not weak.scratch.exists()


def test_a_benchmark_on_cores_times_every_system_and_needs_no_data(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "bench.json"
    words = ["--stages", 2, "--rounds", 1, "--steps", 2, "--device", "cpu", "--out", file, "--json"]
    assert parlay("bench", *TINY, *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(file.read_text())
    rows = {r["system"]: r for r in told["rows"]}
    assert set(rows) == SYSTEMS
    assert all(r["step_ms"] > 0 and r["speedup"] > 0 and r["model"] == "resnet8" for r in rows.values())
    assert rows["serial"]["speedup"] == 1
    assert told["baseline"] == "serial"
    assert {name: r["samples_per_step"] for name, r in rows.items() if r["samples_per_step"] != 16} == {}
    assert rows["data-parallel"]["stages"] == 2
    assert set(rows["pipeline-1f1b"]["tried_step_ms"]) == {"M = 2", "M = 4", "M = 8"}
    assert len(rows["layer-parallel"]["wait_share"]) == 2
    assert 0 <= rows["layer-parallel"]["wait_share_beyond_imbalance"] <= 1
    assert told["command"].startswith("parlay bench --model resnet8")
    assert told["environment"]["torch"]


def test_on_cores_only_the_methods_own_systems_train_on_half_of_the_batch() -> None:
    keys: dict[str, Any] = {"model": "resnet8", "dataset": "digits", "batch_size": 16, "stages": 2, "partition": "2"}
    recipe = cpu.resolved(Recipe(**keys, method="penalty"))
    systems = cpu.systems(recipe, "2", quiet)
    for system in systems:
        system.close()
    halved = {"layer-parallel", "layer-parallel-ds", "stages-alone"}
    assert {system.system for system in systems if system.samples == 8} == halved
    assert all(system.samples in (None, 16) for system in systems if system.system not in halved)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", 0], "rounds is 0: write a number of at least 1"),
        (["--model", "resnet-vae"], "bench times classifiers"),
        (["--method", "serial"], "write --method al or penalty"),
        (["--stages", 9], "9 stages of a model with 5 blocks"),
        (["--out", "/nowhere/bench.json"], "write --out with a file in a folder that exists"),
        (["--stps", 3], "write --steps"),
    ],
)
def test_wrong_input_is_answered_in_one_line(words: list[object], told: str, capsys: Capsys) -> None:
    assert parlay("bench", *TINY, "--device", "cpu", *words) == 2
    assert told in answer(capsys)


def test_only_faster_rows_beyond_the_margin_count() -> None:
    ours, near = row("layer-parallel", 60, seconds=(0.06, 0.06)), row("data-parallel", 59.5, seconds=(0.0595, 0.0595))
    assert core.MARGIN == 0.02
    assert sentences([ours, near]) == []
