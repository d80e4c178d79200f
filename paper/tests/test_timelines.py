"""The simulated timeline: known bars for known times, and the speed-ups of the paper's formulas."""

import pytest

from parlay.plan import hybrid_speedup
from parlay_paper.timelines import Bar, Times, length, letters, of_stages, play, replay

TWO = Times(forward=(1.0, 2.0), backward=(2.0, 4.0))


def test_a_serial_batch_goes_through_the_stages_and_back() -> None:
    assert play(TWO, "S") == [
        Bar(0, "forward", 1, 0, 1),
        Bar(1, "forward", 1, 1, 3),
        Bar(1, "backward", 1, 3, 7),
        Bar(0, "backward", 1, 7, 9),
    ]


def test_in_a_parallel_step_all_stages_begin_at_once_and_wait_for_the_slowest() -> None:
    assert play(TWO, "PP")[4:] == [
        Bar(0, "forward", 2, 6, 7),
        Bar(0, "backward", 2, 7, 9),
        Bar(1, "forward", 2, 6, 8),
        Bar(1, "backward", 2, 8, 12),
    ]


def test_messages_count_where_they_are_known() -> None:
    times = Times(TWO.forward, TWO.backward, messages=(1.0, 1.5))
    assert play(times, "P")[-1] == Bar(1, "send", 1, 6, 7.5)
    assert times.parallel_step == 7.5


def test_a_measured_serial_step_takes_its_own_time() -> None:
    assert length(play(Times(TWO.forward, TWO.backward, serial=18.0), "SS")) == pytest.approx(36)


@pytest.mark.parametrize("ways", ["SSSSS", "PPPPP", "PPPPS", "PS"])
def test_lengths_are_those_of_the_papers_formula(ways: str) -> None:
    times = of_stages((3.0, 6.0, 4.0))
    ratio = times.serial_step / times.parallel_step
    assert len(ways) * times.serial_step / length(play(times, ways)) == pytest.approx(hybrid_speedup(ratio, ways))


def test_in_replay_stage_k_trains_on_batches_that_many_steps_late() -> None:
    bars = replay(Times((1.0, 1.0, 1.0), (2.0, 2.0, 2.0)), steps=6)
    first_forward = {k: next(b.begin for b in bars if b.stage == k and b.batch == 1) for k in range(3)}
    first_backward = {k: next(b.begin for b in bars if b.stage == k and b.name == "backward") for k in range(3)}
    order = sorted({b.begin for b in bars if b.stage == 0 and b.name == "forward"})  # when the steps begin
    assert [order.index(first_forward[k]) for k in (0, 1)] == [0, 1]
    steps = {k: sum(begin <= first_backward[k] for begin in order) - 1 for k in range(3)}
    assert steps == {2: 2, 1: 3, 0: 4}  # batch 1 is at stage k in step k, and late by 2(K-1-k)
    assert [b.name for b in bars if b.stage == 0 and b.begin >= order[4]][:3] == ["forward", "replay", "backward"]
    assert all(b.name != "replay" for b in bars if b.stage == 2)


def test_a_schedule_is_drawn_by_its_pattern() -> None:
    assert [letters(s) for s in ("alternate:4:1", "tail:2:1", "alternate:20:5", "parallel", "serial")] == [
        "PPPPS",
        "PPS",
        "PPPPS",
        "PPPPP",
        "SSSSS",
    ]
