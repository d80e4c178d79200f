"""A forecast: what crosses, what a step and a schedule take, from formulas and from stages measured side by side."""

from typing import Any

import pytest

from parlay import forecast
from parlay.plan import plan
from parlay.recipe import Recipe
from parlay.run.setup import set_up


def test_a_forecast_counts_what_crosses_in_both_directions() -> None:
    setup = set_up(Recipe(model="resnet8", dataset="cifar10", stages=2, partition="3", batch_size=10, device="cpu"))
    assert setup.partition.shapes == ((32, 16, 16),)
    each = 10 * 32 * 16 * 16 * 4
    assert forecast.exchanged(setup) == [3 * each]  # states and multipliers one way, outputs the other
    measured = forecast.Measured(serial_ms=19.0, stage_ms=[8.0, 10.0], bytes_per_second=3 * each * 1000.0)
    assert forecast.step_ms(measured, [3 * each]) == pytest.approx(11)


def test_a_plan_for_processes_measures_stages_side_by_side_and_a_link() -> None:
    keys: dict[str, Any] = {"dataset": "synthetic", "synthetic_shape": "1,8,8", "batch_size": 16, "partition": "3"}
    told = plan(Recipe(model="resnet8", stages=2, device="cpu", engine="distributed", schedule="parallel", **keys))
    assert told["measured"] == "side by side"
    assert len(told["stage_ms"]) == 2
    assert told["link_gib_per_second"] > 0.01
    assert told["step_ms"] >= max(told["stage_ms"])
    assert told["speedup_parallel_epoch"] == pytest.approx(told["serial_ms"] / told["step_ms"])
    assert 0.05 < told["speedup_parallel_epoch"] < 20


def test_a_plan_of_a_streaming_method_measures_its_stages_with_their_messages() -> None:
    keys: dict[str, Any] = {"dataset": "synthetic", "synthetic_shape": "1,8,8", "batch_size": 16, "partition": "3"}
    told = plan(Recipe(model="resnet8", stages=2, device="cpu", engine="distributed", method="replay", **keys))
    assert told["measured"] == "side by side"
    assert len(told["stage_ms"]) == 2
    assert told["step_ms"] == max(told["stage_ms"])


def test_serial_epochs_take_as_long_as_ever_and_parallel_ones_their_share() -> None:
    assert forecast.hybrid_speedup(3.0, "SSSS") == 1
    assert forecast.hybrid_speedup(3.0, "PPPP") == pytest.approx(3)
    assert forecast.hybrid_speedup(2.0, "SPPS") == pytest.approx(4 / 3)


def test_epochs_that_train_on_half_of_the_samples_count_as_half() -> None:
    assert forecast.hybrid_speedup(4.0, "PPPP", 0.5) == pytest.approx(2)
    assert forecast.hybrid_speedup(4.0, "SPPS", 0.5) == pytest.approx(3 / 2.5)
