"""Captured steps equal eager ones bit for bit, on a CPU in the GPU's place; a rehearsal finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import problems
from parlay import AugmentedLagrangian, Delayed, Local, Penalty, Replay
from parlay.data import CropAndFlip
from parlay.engine import captured, losses
from parlay.engine.captured import Captured, Inputs, Layout
from parlay.engine.engine import Engine
from parlay.engine.own import Own
from parlay.engine.step import ParallelStep
from parlay.errors import Diverged
from parlay.lanes import Lanes
from parlay.link.states import StateLink
from parlay.stage.optimiser import Optimiser
from parlay.stage.worker import Worker
from parlay.stores.courier import Courier
from rehearsal import Rehearsal
from rehearsed import Phases, difference, making, noisy, outcome, small, steps

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
    "al, states on the host": (AugmentedLagrangian(), 2, {"store": "host"}, CHANGING),
    "penalty, states in a file": (Penalty(), 3, {"store": "file"}, FULL),
    "al, augmented": (AugmentedLagrangian(), 2, {"augment": CropAndFlip()}, CHANGING),
    "penalty, K = 2": (Penalty(), 2, {}, CHANGING),
    "penalty, K = 3": (Penalty(), 3, {}, FULL),
    "replay, K = 2": (Replay(), 2, {}, CHANGING),
    "replay, K = 3, augmented": (Replay(), 3, {"augment": CropAndFlip()}, FULL),
    "replay, predicted": (Replay(predict=0.5), 3, {}, FULL),
    "replay, dropout": (Replay(), 3, {"model": noisy}, CHANGING),
    "al, dropout": (AugmentedLagrangian(), 3, {"model": noisy}, CHANGING),
    "local, K = 3": (Local(), 3, {}, FULL),
    "delayed, not captured": (Delayed(), 3, {}, FULL),
}


@pytest.mark.parametrize(("case", "schedule"), list(zip(CASES, cycle(SCHEDULES), strict=False)))
def test_captured_steps_equal_eager_ones(case: str, schedule: str, tmp_path: Path) -> None:
    method, stages, options, phases = CASES[case]
    make = making(method, stages, DATA, tmp_path, **{"model": small, **options})
    wanted, losses, _ = outcome(make, phases, None)
    found, other, counts = outcome(make, phases, schedule)
    assert difference(found, wanted) == ""
    assert other == losses
    assert counts.graphs == (0 if isinstance(method, Delayed) else len({phase for phase, _ in phases}))


# Mistakes planted in the engine


def _nothing(*given: object) -> None: ...


def _no_wait_for_the_output(patch: pytest.MonkeyPatch) -> None:
    """The lane of a link does not wait for the stage before it."""
    patch.setattr(Own, "after", _nothing)


def _lanes_do_not_come_back(patch: pytest.MonkeyPatch) -> None:
    real = Own.side_by_side.__wrapped__  # type: ignore[attr-defined]

    def without_return(self: Own) -> Any:
        steps = real(self)
        yield next(steps)

    patch.setattr(Own, "side_by_side", contextmanager(without_return))


def _rate_is_a_number(patch: pytest.MonkeyPatch) -> None:
    def set_rate(self: Optimiser, rate: Tensor | float) -> None:  # noqa: ARG001
        for group in self.groups:
            group["lr"] = 0.05

    patch.setattr(Optimiser, "set_rate", set_rate)


def _output_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    """The row of losses lies where the next replay writes."""
    real = Captured._full

    def without_clone(self: Captured, piece: Tensor, layout: Layout) -> Tensor:
        found = real(self, piece, layout)
        return self.output if self.graph is not None and self.output is not None else found

    patch.setattr(Captured, "_full", without_clone)


def _inputs_are_those_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    real = Captured._full

    def stale(self: Captured, piece: Tensor, layout: Layout) -> Tensor:
        return real(self, self.piece if self.graph is not None and self.piece is not None else piece, layout)

    patch.setattr(Captured, "_full", stale)


def _inputs_are_copied_in_another_lane(patch: pytest.MonkeyPatch) -> None:
    """And nobody waits for them."""
    real = Captured._full

    def aside(self: Captured, piece: Tensor, layout: Layout) -> Tensor:
        if self.graph is None or self.piece is None:
            return real(self, piece, layout)
        if not hasattr(self, "side"):
            self.side = self.lanes.lane()  # type: ignore[attr-defined]
        self.side.follow(self.lanes.current)  # type: ignore[attr-defined]
        with self.side:  # type: ignore[attr-defined]
            self.piece.copy_(piece, non_blocking=True)
        return real(self, self.piece, layout)

    patch.setattr(Captured, "_full", aside)


def _the_host_waits_in_a_step(patch: pytest.MonkeyPatch) -> None:
    real = nn.CrossEntropyLoss.forward

    def reading(self: nn.CrossEntropyLoss, output: Tensor, targets: Tensor) -> Tensor:
        loss = real(self, output, targets)
        loss.item()
        return loss

    patch.setattr(nn.CrossEntropyLoss, "forward", reading)


def _no_steps_before_the_capture(patch: pytest.MonkeyPatch) -> None:
    """One call only fixes the inputs: momentum is made in the graph, anew in each replay."""

    def not_run(self: Captured, inputs: Inputs) -> Tensor:  # noqa: ARG001
        with self.lanes.main:
            return torch.zeros(1)

    patch.setattr(captured, "WARM", 1)
    patch.setattr(Captured, "_aside", not_run)


def _losses_are_read_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(losses, "LOOK_EVERY", 2)
    patch.setattr("rehearsal.RehearsalEvent.synchronize", _nothing)


def _all_graphs_share_what_they_keep(patch: pytest.MonkeyPatch) -> None:
    """One pool for the serial and the parallel graph, although each keeps its output there."""
    real, shared = Rehearsal.capture, {}

    def capture(self: Rehearsal, lane: Any, pool: Any = None) -> Any:  # noqa: ARG001
        return real(self, lane, shared.setdefault(id(self), self.pool()))

    patch.setattr(Rehearsal, "capture", capture)
    _output_is_not_copied(patch)


def _an_adjoint_is_taken_from_the_other_slot(patch: pytest.MonkeyPatch) -> None:
    real = ParallelStep._slots

    def wrong(self: ParallelStep, inputs: Inputs, row: int) -> dict[int, Tensor]:
        found = real(self, inputs, row)
        return found if self._turns[row // 2].lag == 0 else {count: (slot + 1) % count for count, slot in found.items()}

    patch.setattr(ParallelStep, "_slots", wrong)


def _a_seed_is_that_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    real, seeded = Worker.seed, {}

    def seed(self: Worker, forward: Any, backward: Any, replica: int = 0) -> None:
        seeded[id(self)] = seeded.get(id(self), 0) + 1
        if seeded[id(self)] < 6:
            real(self, forward, backward, replica)

    patch.setattr(Worker, "seed", seed)


def _states_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """They come from the host in a lane of their own."""
    real = Courier.fetch

    def fetch(self: Courier, ids: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr("rehearsal.RehearsalLane.wait", _nothing)
            return real(self, ids)

    patch.setattr(Courier, "fetch", fetch)


def _new_states_leave_too_early(patch: pytest.MonkeyPatch) -> None:
    real = Courier.bring

    def bring(self: Courier, ids: Tensor, parcel: Tensor) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr("rehearsal.RehearsalLane.wait", _nothing)
            real(self, ids, parcel)

    patch.setattr(Courier, "bring", bring)


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
        _an_adjoint_is_taken_from_the_other_slot,
        _a_seed_is_that_of_the_capture,
        _states_are_not_waited_for,
        _new_states_leave_too_early,
    )
}
ON_THE_HOST = {"states are not waited for", "new states leave too early"}
STREAMED = {"an adjoint is taken from the other slot", "a seed is that of the capture"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_engine_is_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = mistake in STREAMED
    method, model = (Replay(), noisy) if streamed else (AugmentedLagrangian(), small)
    store = "host" if mistake in ON_THE_HOST else "auto"
    make = making(method, 3, DATA, tmp_path, model=model, store=store)
    wanted, losses, _ = outcome(make, CHANGING, None)
    MISTAKES[mistake](monkeypatch)
    found = []
    for schedule in ("latest", "forwards", "backwards", "random-1"):
        if any(found):
            break
        try:
            weights, other, _ = outcome(make, CHANGING, schedule)
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
            lane, ones, source = lanes.lane(), lanes.to_device(torch.ones(64)), lanes.source()
            rows = [lanes.to_device(torch.zeros(64)) for _ in range(3)]
            if captured:
                with lanes.capture(lane) as graph, source:
                    found = nn.functional.dropout(ones)
            for n, row in enumerate(rows):
                source.seed(n // 2)
                with lane:
                    if captured:
                        graph.replay()
                    else:
                        with source:
                            found = nn.functional.dropout(ones)
                    row.copy_(found)
        return rows

    eager, captured = drawn(False), drawn(True)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert torch.equal(eager[0], eager[1])
    assert not torch.equal(eager[0], eager[2])


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
    data = problems.images(64)
    data[0][steps(64, 2)[11].ids] = float("inf")
    make, batches = making(method, 2, data, tmp_path, model=small), steps(64, 2)[8:]

    def filled(running: Engine) -> Engine:
        for link in running.own.links:
            link.filled = True
            if isinstance(link, StateLink):
                link.s2.fill_(1.0)
        return running

    eager = filled(make(None))
    with pytest.raises(Diverged):  # noqa: PT012
        for batch in batches:
            eager.parallel_step(batch)
    with Rehearsal(schedule) as lanes:
        running = filled(make(lanes))
        for batch in batches:
            running.parallel_step(batch)
        with pytest.raises(Diverged):
            running.drain()
        lanes.synchronize()
    for own, wanted in zip(running.own.stages, eager.own.stages, strict=True):
        for name, weight in own.parameters.items():
            assert torch.equal(weight, wanted.parameters[name]), name
