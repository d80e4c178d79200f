"""Captured steps equal eager ones bit for bit, on a CPU in the GPU's place; a rehearsal finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import problems
from parlay import AugmentedLagrangian, Penalty
from parlay.coupling import Delayed, Local, Replay
from parlay.data import CropAndFlip
from parlay.engines import branches, graphs, in_process
from parlay.engines.base import Batch
from parlay.errors import Diverged
from parlay.lanes import Lanes
from parlay.stage import Stage
from rehearsal import Rehearsal
from rehearsed import difference, make, on, outcome, small, steps

Phases = list[tuple[str, list[Batch]]]
SCHEDULES = ["latest", "forwards", "random-1"]
DATA = problems.images(68)  # eight full batches and one of four
FULL: Phases = [("parallel", steps(68, 2))]
CHANGING: Phases = [("serial", steps(68, 1)), ("parallel", steps(68, 1)), ("serial", steps(68, 1)), *FULL]

CASES: dict[str, tuple[Any, int, dict[str, Any], Phases]] = {
    "al, K = 1": (AugmentedLagrangian(), 1, {}, FULL),
    "al, K = 2": (AugmentedLagrangian(), 2, {}, CHANGING),
    "al, K = 3, clipped": (AugmentedLagrangian(), 3, {"clip": 0.5}, FULL),
    "al, K = 3, downsampled": (AugmentedLagrangian(), 3, {"downsample": 2}, FULL),
    "al, K = 3, low precision": (AugmentedLagrangian(), 3, {"precision": "bfloat16", "store_dtype": "bfloat16"}, FULL),
    "al, augmented": (AugmentedLagrangian(), 2, {"augment": CropAndFlip()}, CHANGING),
    "penalty, K = 2": (Penalty(), 2, {}, CHANGING),
    "penalty, K = 3": (Penalty(), 3, {}, FULL),
    "replay, K = 2": (Replay(), 2, {}, CHANGING),
    "replay, K = 3, augmented": (Replay(), 3, {"augment": CropAndFlip()}, FULL),
    "replay, corrected": (Replay(predict=0.5, compensate=0.5, shrink=0.7), 3, {}, FULL),
    "local, K = 3": (Local(), 3, {}, FULL),
    "delayed, not captured": (Delayed(), 3, {}, FULL),
}


@pytest.mark.parametrize(("case", "schedule"), list(zip(CASES, cycle(SCHEDULES), strict=False)))
def test_captured_steps_equal_eager_ones(case: str, schedule: str, tmp_path: Path) -> None:
    method, stages, options, phases = CASES[case]

    def build() -> in_process.InProcess:
        return make(method, stages, DATA, tmp_path, model=small, **options)

    wanted, losses, _ = outcome(build, phases, None)
    found, other, counts = outcome(build, phases, schedule)
    assert difference(found, wanted) == ""
    assert other == losses
    assert counts.graphs == (0 if isinstance(method, Delayed) else len({phase for phase, _ in phases}))


# Mistakes planted in the engine


def _nothing(*given: object) -> None: ...


def _no_wait_for_the_output(patch: pytest.MonkeyPatch) -> None:
    """The lane of an interface does not wait for the stage before it."""
    patch.setattr(branches.Branches, "after", _nothing)


def _lanes_do_not_come_back(patch: pytest.MonkeyPatch) -> None:
    real = branches.Branches.side_by_side.__wrapped__  # type: ignore[attr-defined]

    def without_return(self: branches.Branches) -> Any:
        steps = real(self)
        yield next(steps)

    from contextlib import contextmanager

    patch.setattr(branches.Branches, "side_by_side", contextmanager(without_return))


def _rate_is_a_number(patch: pytest.MonkeyPatch) -> None:
    def set_rate(self: Stage, rate: Tensor | float) -> None:  # noqa: ARG001
        for group in self._groups():
            group["lr"] = 0.05

    patch.setattr(Stage, "set_rate", set_rate)


def _output_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    """The row of losses lies where the next replay writes."""
    real = graphs.Graphed._quickly

    def without_clone(self: graphs.Graphed, inputs: graphs.Inputs) -> Tensor:
        found = real(self, inputs)
        return self.output if self.graph is not None and self.output is not None else found

    patch.setattr(graphs.Graphed, "_quickly", without_clone)


def _inputs_are_those_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    real = graphs.Graphed._quickly

    def stale(self: graphs.Graphed, inputs: graphs.Inputs) -> Tensor:
        return real(self, self.inputs if self.graph is not None else inputs)

    patch.setattr(graphs.Graphed, "_quickly", stale)


def _inputs_are_copied_in_another_lane(patch: pytest.MonkeyPatch) -> None:
    """And nobody waits for them."""
    real = graphs.Graphed._quickly

    def aside(self: graphs.Graphed, inputs: graphs.Inputs) -> Tensor:
        if self.graph is None:
            return real(self, inputs)
        if not hasattr(self, "side"):
            self.side = self.lanes.lane()  # type: ignore[attr-defined]
        self.side.follow(self.lanes.current)  # type: ignore[attr-defined]
        with self.side:  # type: ignore[attr-defined]
            for name, value in inputs.items():
                self.inputs[name].copy_(value, non_blocking=True)
        return real(self, self.inputs)

    patch.setattr(graphs.Graphed, "_quickly", aside)


def _the_host_waits_in_a_step(patch: pytest.MonkeyPatch) -> None:
    real = nn.CrossEntropyLoss.forward

    def reading(self: nn.CrossEntropyLoss, output: Tensor, targets: Tensor) -> Tensor:
        loss = real(self, output, targets)
        loss.item()
        return loss

    patch.setattr(nn.CrossEntropyLoss, "forward", reading)


def _no_steps_before_the_capture(patch: pytest.MonkeyPatch) -> None:
    """One call only fixes the inputs: momentum is made in the graph, anew in each replay."""

    def not_run(self: graphs.Graphed, inputs: graphs.Inputs) -> Tensor:
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        with self.lanes.main:
            return torch.zeros(1)

    patch.setattr(graphs, "WARM", 1)
    patch.setattr(graphs.Graphed, "_aside", not_run)


def _losses_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_process, "LOOK_EVERY", 2)
    patch.setattr("rehearsal.RehearsalEvent.synchronize", _nothing)


def _all_graphs_share_what_they_keep(patch: pytest.MonkeyPatch) -> None:
    """One pool for the serial and the parallel graph, although each keeps its output there."""
    real, shared = Rehearsal.capture, {}

    def capture(self: Rehearsal, lane: Any, pool: Any = None) -> Any:  # noqa: ARG001
        return real(self, lane, shared.setdefault(id(self), self.pool()))

    patch.setattr(Rehearsal, "capture", capture)
    _output_is_not_copied(patch)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    mistake.__name__.strip("_").replace("_", " "): mistake
    for mistake in (
        _no_wait_for_the_output,
        _lanes_do_not_come_back,
        _rate_is_a_number,
        _output_is_not_copied,
        _inputs_are_those_of_the_capture,
        _inputs_are_copied_in_another_lane,
        _the_host_waits_in_a_step,
        _no_steps_before_the_capture,
        _losses_are_read_too_early,
        _all_graphs_share_what_they_keep,
    )
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_engine_is_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> in_process.InProcess:
        return make(AugmentedLagrangian(), 3, DATA, tmp_path, model=small)

    wanted, losses, _ = outcome(build, CHANGING, None)
    MISTAKES[mistake](monkeypatch)
    found = []
    for schedule in ("latest", "forwards", "backwards", "random-1"):
        if any(found):
            break
        try:
            weights, other, _ = outcome(build, CHANGING, schedule)
            found.append(difference(weights, wanted) or ("losses differ" if other != losses else ""))
        except (RuntimeError, IndexError, AssertionError, Diverged) as error:
            found.append(str(error))
    assert any(found)


# The rehearsal by itself


def test_a_copy_to_the_host_is_late() -> None:
    def fetched(waits: bool) -> Tensor:
        with Rehearsal("latest") as lanes:
            with lanes.lane() as lane:
                here = lanes.fetch(torch.ones(8))
            if waits:
                lane.mark().synchronize()
            return here.clone()

    assert bool((fetched(True) == 1).all())
    assert not bool((fetched(False) == 1).all())


def test_a_lane_that_does_not_come_back_to_its_capture_is_named() -> None:
    with Rehearsal("latest") as lanes:
        a, b = lanes.lane(), lanes.lane()
        left = lanes.to_device(torch.ones(8))
        with pytest.raises(RuntimeError, match="not come back"), lanes.capture(a):  # noqa: PT012
            b.follow(a)
            with b:
                left.mul_(3)


def test_random_numbers_of_a_captured_step_are_those_of_an_eager_one() -> None:
    def drawn(captured: bool) -> list[Tensor]:
        with Rehearsal("random-3") as lanes:
            lane, ones = lanes.lane(), lanes.to_device(torch.ones(64))
            rows = [lanes.to_device(torch.zeros(64)) for _ in range(3)]
            if captured:
                with lanes.capture(lane) as graph:
                    found = nn.functional.dropout(ones)
            for n, row in enumerate(rows):
                lanes.seed(n // 2)
                with lane:
                    if captured:
                        graph.replay()
                    else:
                        found = nn.functional.dropout(ones)
                    row.copy_(found)
        return rows

    eager, captured = drawn(False), drawn(True)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert torch.equal(eager[0], eager[2]) is False or torch.equal(eager[0], eager[1]) is False


def test_a_cpu_does_everything_at_once() -> None:
    lanes = Lanes()
    with lanes.lane() as lane:
        value = lanes.send(torch.ones(2))
    lane.mark().synchronize()
    assert lanes.counts.copies == 1
    assert value.tolist() == [1, 1]
    with pytest.raises(NotImplementedError):
        lanes.capture(lane)


@pytest.mark.parametrize(
    ("method", "schedule"), list(zip([AugmentedLagrangian(), Penalty(), Replay()], SCHEDULES, strict=True))
)
def test_a_loss_that_is_not_finite_stops_captured_updates_as_it_stops_eager_ones(
    method: Any, schedule: str, tmp_path: Path
) -> None:
    def spoilt() -> in_process.InProcess:
        made = make(method, 2, problems.images(64), tmp_path, model=small)
        made.feed.split.inputs[steps(64, 2)[11].ids] = float("inf")
        return made

    batches = steps(64, 2)[8:]
    eager = spoilt()
    for interface in eager.interfaces:
        interface.filled = True
        interface.mean_square.fill_(1.0)
    with pytest.raises(Diverged):  # noqa: PT012
        for batch in batches:
            eager.parallel_step(batch)
    other = spoilt()
    for interface in other.interfaces:
        interface.filled = True
        interface.mean_square.fill_(1.0)
    with Rehearsal(schedule) as lanes:
        with lanes.main:
            running = on(lanes, other)
        for batch in batches:
            running.parallel_step(batch)
        with pytest.raises(Diverged):
            running.drain()
        lanes.synchronize()
    for mine, theirs in zip(running.stages, eager.stages, strict=True):
        for name, weight in mine.parameters.items():
            assert torch.equal(weight, theirs.parameters[name]), name
