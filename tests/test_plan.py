"""A plan says before anything runs how a network is cut, what its states take, and what to expect of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parlay import stores
from parlay.bench.side_by_side import exchanged, step_ms
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.plan import hybrid_speedup, plan
from parlay.run.setup import set_up
from runs import parlay, summary, train

Patch = pytest.MonkeyPatch
Capsys = pytest.CaptureFixture[str]

CONTRACT = {
    *("cuts", "interfaces", "auxiliary_gib", "stage_ms", "speedup", "speedup_per_step", "speedup_parallel_epoch"),
    *("samples_per_step", "sample_us", "exchange_bytes", "store", "fits", "phases", "step_ms", "serial_ms"),
}
SYNTHETIC = {"dataset": "synthetic", "synthetic_shape": "1,8,8"}


def small(**keys: Any) -> Recipe:
    return Recipe(**{"model": "resnet8", "batch_size": 8, "device": "cpu", **keys})


def test_the_json_has_every_key_of_the_contract_and_needs_no_data_on_disk(tmp_path: Path, capsys: Capsys) -> None:
    words = ["--model", "resnet8", "--dataset", "cifar10", "--stages", 3, "--batch-size", 4, "--device", "cpu"]
    assert parlay("plan", *words, "--data-dir", tmp_path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) >= CONTRACT
    assert told["cuts"] == [2, 3]
    assert told["interfaces"] == [[16, 32, 32], [32, 16, 16]]
    assert len(told["stage_ms"]) == 3
    assert all(ms > 0 for ms in told["stage_ms"])
    assert list(tmp_path.iterdir()) == []


def test_the_plan_for_people_has_a_line_for_every_stage(capsys: Capsys) -> None:
    assert parlay("plan", "--model", "resnet8", "--stages", 2, "--batch-size", 4, "--device", "cpu") == 0
    told = capsys.readouterr().out
    wanted = "stage 0: blocks   0 to", "stage 1: blocks", "GiB, kept on: device", "speed-up on 2 devices"
    assert all(part in told for part in wanted)


@pytest.mark.parametrize("stages", [0, -1, 6])
def test_a_number_of_stages_that_cannot_be_is_refused_with_both_numbers(stages: int) -> None:
    with pytest.raises(InputError, match=f"{stages} stages of a model with 5 blocks"):
        plan(small(stages=stages))


def test_a_plan_by_measured_cost_names_the_cuts_it_found() -> None:
    told = plan(small(partition="cost", stages=2))
    assert 0 < told["cuts"][0] < told["blocks"]


# Memory


@pytest.mark.parametrize(("stages", "method", "downsample", "gib"), [(2, "penalty", 1, 1.53), (3, "al", 2, 2.29)])
def test_the_memory_of_resnet_110_is_that_of_the_papers_table(
    stages: int, method: str, downsample: int, gib: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("parlay.plan.block_costs", lambda *_: [1.0] * stages)  # the table is not about time
    recipe = small(model="resnet110", batch_size=2, dataset="cifar10", stages=stages, method=method)
    assert plan(replace(recipe, downsample=downsample))["auxiliary_gib"] == pytest.approx(gib, abs=0.011)


@pytest.mark.parametrize("keys", [{}, {"method": "penalty"}, {"store_dtype": "bfloat16"}, {"augment": "2"}])
def test_what_is_planned_is_what_a_run_then_takes(keys: dict[str, str], tmp_path: Path) -> None:
    words = [word for key, value in keys.items() for word in (f"--{key.replace('_', '-')}", value)]
    assert train(tmp_path, "--epochs", 2, *words) == 0
    planned = plan(small(epochs=2, synthetic_samples=96, **SYNTHETIC, **keys))
    assert planned["auxiliary_gib"] * 2**30 == summary(tmp_path)["auxiliary_bytes"]
    assert planned["cuts"] == summary(tmp_path)["cuts"]
    assert planned["parameters"] == summary(tmp_path)["parameters"]


@pytest.mark.parametrize("method", ["replay", "delayed", "local"])
def test_the_memory_of_a_streamed_method_is_that_of_its_batches_on_their_way(method: str, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 2, "--method", method, "--batch-size", 8) == 0
    planned = plan(small(epochs=2, synthetic_samples=96, method=method, **SYNTHETIC))
    assert planned["auxiliary_gib"] * 2**30 == pytest.approx(summary(tmp_path)["auxiliary_bytes"], rel=0.01)


def test_serial_training_takes_no_memory_for_states_and_is_as_fast_as_itself() -> None:
    told = plan(small(method="serial"))
    assert (told["auxiliary_gib"], told["speedup"], told["interfaces"]) == (0, 1, [])


def test_what_does_not_fit_is_planned_and_refused_with_the_same_line(
    tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setattr("parlay.stores.placement.free_space", lambda *_: stores.Free(10_000, 20_000, 30_000))
    told = plan(small())
    assert not told["fits"]
    assert told["store"] is None
    assert "do not fit anywhere" in told["problem"]
    assert "write" in told["problem"]
    assert parlay("plan", "--model", "resnet8", "--batch-size", 4, "--device", "cpu") == 0
    assert "do not fit anywhere" in capsys.readouterr().out
    assert train(tmp_path) == 2
    assert "do not fit anywhere" in capsys.readouterr().err


# Time


def test_the_speed_up_is_bounded_by_the_slowest_stage_and_by_the_serial_epochs(monkeypatch: Patch) -> None:
    monkeypatch.setattr("parlay.plan.block_costs", lambda *_: [0.002, 0.004, 0.002])
    told = plan(small(epochs=10, schedule="alternate:4:1"))
    assert told["stage_ms"] == [2, 4, 2]
    assert told["speedup_parallel_epoch"] == 2
    assert told["phases"] == "SPPPSPPPPS"
    assert told["speedup"] == pytest.approx(10 / (7 / 2 + 3))


def test_the_speed_up_of_the_red_black_order_is_of_the_same_work(monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr("parlay.plan.block_costs", lambda _, example: [len(example) / 1000] * 3)
    told = plan(small(epochs=10, schedule="alternate:4:1", method="penalty"))
    assert (told["serial_ms"], told["stage_ms"], told["samples_per_step"]) == (24, [4, 4, 4], 4)
    assert told["speedup_per_step"] == 6  # more than three stages can be worth: of half of the work
    assert told["speedup_parallel_epoch"] == 3
    assert told["sample_us"] == 1000
    assert told["speedup"] == pytest.approx((3 + 7 / 2) / (3 + 7 / 6))
    words = ["--model", "resnet8", "--batch-size", 8, "--device", "cpu", "--method", "penalty"]
    assert parlay("plan", *words, "--schedule", "parallel") == 0
    said = capsys.readouterr().out
    assert "by time per sample trained" in said
    assert "each stage trains on 4 of 8 samples in a step: the speed-up per step, 6.00, is of less work" in said


def test_a_schedule_is_as_fast_as_its_epochs_together() -> None:
    assert hybrid_speedup(3.0, "SSSS") == 1
    assert hybrid_speedup(3.0, "PPPP") == pytest.approx(3)
    assert hybrid_speedup(2.0, "SPPS") == pytest.approx(4 / 3)
    assert hybrid_speedup(4.0, "PPPP", 0.5) == pytest.approx(2)  # half of the samples count as half
    assert hybrid_speedup(4.0, "SPPS", 0.5) == pytest.approx(3 / 2.5)


@pytest.mark.parametrize(("method", "tensors"), [("al", 3), ("penalty", 2), ("replay", 2), ("local", 1)])
def test_what_crosses_is_counted_in_both_directions(method: str, tensors: int) -> None:
    setup = set_up(small(dataset="cifar10", stages=2, partition="3", batch_size=10, method=method))
    assert setup.partition.shapes == ((32, 16, 16),)
    assert exchanged(setup) == [tensors * 10 * 32 * 16 * 16 * 4]
    assert step_ms([8.0, 10.0], [500], 500_000.0) == pytest.approx(11)  # of the slowest stage with its messages


@pytest.mark.slow
@pytest.mark.parametrize("method", ["al", "replay"])
def test_a_plan_for_processes_measures_stages_side_by_side_and_a_link(method: str) -> None:
    keys = {**SYNTHETIC, "batch_size": 16, "partition": "3", "stages": 2, "schedule": "parallel"}
    told = plan(small(engine="distributed", method=method, **keys))
    assert told["measured"] == "side by side"
    assert len(told["stage_ms"]) == 2
    assert told["link_gib_per_second"] > 0.01
    assert (told["step_ms"] > max(told["stage_ms"])) == (method == "al")  # a streamed stage is measured with messages
    assert told["speedup_parallel_epoch"] == pytest.approx(told["serial_ms"] / told["step_ms"])
