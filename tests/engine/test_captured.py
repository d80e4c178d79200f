"""What a capture must not leave out or behind, and the gradient probe. Equality with eager steps: test_rehearsal.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Penalty, Replay
from parlay.engine.engine import Engine
from parlay.lanes import Lanes
from parlay.stage.precision import LowPrecision
from problems import batch, engine, images, never
from rehearsal import Rehearsal
from rehearsed import Make, difference, making, noisy, outcome, small, steps

DATA = problems.images(68)  # eight full batches and one of four


class Waiting(nn.CrossEntropyLoss):
    """The host waits for the loss, which no capture allows."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(output, targets)
        loss.item()
        return loss


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Replay()], ids=lambda m: type(m).__name__)
def test_a_failed_capture_is_said_once_and_leaves_nothing_behind(
    method: parlay.Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No losses in the guard, no gradients: the steps after it are those of an eager run."""
    said: list[str] = []
    monkeypatch.setattr("rehearsed._fail", said.append)
    make, phases = making(method, 3, DATA, tmp_path, model=small, loss=Waiting()), [("parallel", steps(68, 2))]
    wanted, losses, _ = outcome(make, phases, None)
    made: list[Engine] = []
    found, other, counts = outcome(lambda lanes: made.append(make(lanes)) or made[0], phases, "latest")
    assert difference(found, wanted) == ""
    assert other == losses
    assert len(said) == 1
    assert said[0].startswith("steps are not captured as CUDA graphs: ")
    assert (counts.graphs, counts.launches) == (0, 0)
    assert made[0].steps.guard._losses == []
    assert not any(stage.gradients() for stage in made[0].own.stages)


def with_copies(make: Make) -> Make:
    """With copies of the weights in low precision, which are made on GPUs alone; renewed right before the capture."""

    def made(lanes: Lanes | None) -> Engine:
        running = make(lanes)
        for stage in running.own.stages:
            stage._low = LowPrecision(stage.module, stage.parameters, torch.bfloat16)
            if isinstance(lanes, Rehearsal):
                lanes.adopt(*stage._low.copies.values())
        step, calls = running.parallel_step, []

        def renewing(own: Any) -> None:
            calls.append(own)
            if len(calls) == 4:  # as a look at gradients would, between two steps
                with (lanes or Lanes()).main:
                    for stage in running.own.stages:
                        assert stage._low is not None
                        stage._low.of_now()
                if lanes is not None:
                    lanes.synchronize()  # type: ignore[attr-defined]
            step(own)

        running.parallel_step = renewing  # type: ignore[method-assign]
        return running

    return made


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Replay()], ids=lambda m: type(m).__name__)
def test_copies_in_low_precision_are_renewed_inside_a_capture(method: parlay.Method, tmp_path: Path) -> None:
    options = {"model": small, "precision": "bfloat16"}
    make, phases = with_copies(making(method, 2, DATA, tmp_path, **options)), [("parallel", steps(68, 2))]
    wanted, _, _ = outcome(make, phases, None)
    found, _, counts = outcome(make, phases, "forwards")
    assert counts.graphs == 1
    assert difference(found, wanted) == ""


# The gradient probe


def probed(running: Engine, **options: Any) -> list[float]:
    found = running.cosines(batch(12, **options))
    assert found is not None
    return found


def test_exact_states_and_multipliers_have_a_cosine_of_one_with_dropout_too(tmp_path: Path) -> None:
    """Both passes draw the same masks. Without a signal a stage goes nowhere: 0."""
    data, model = images(12), nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.3)) for block in problems.dense()))
    running = engine(parlay.partition(model, 3, data[0]), data, AugmentedLagrangian(), folder=tmp_path)
    assert running.cosines(batch(12)) is None  # no states yet
    running.refresh([batch(12)], never)
    assert probed(running)[1:] == pytest.approx([0.0, 0.0, 1.0], abs=1e-5)
    for _ in range(3):
        running.parallel_step(batch(12))
    assert probed(running) == pytest.approx([1.0] * 4, abs=1e-5)
    assert min(probed(running, step=1)) < 0.99  # other masks than those of the states


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Penalty()], ids=lambda m: type(m).__name__)
def test_a_probe_changes_nothing(method: parlay.Method, tmp_path: Path) -> None:
    def trained(probes: bool, to: Path) -> Tensor:
        data, model = images(24), noisy()
        sgd = {"optimizer": lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9)}
        running = engine(parlay.partition(model, 3, data[0][:2]), data, method, folder=to, **sgd)
        running.refresh([batch(12)], never)
        for epoch in range(4):
            running.parallel_step(batch(12, epoch=epoch))
            if probes:
                assert all(-1 <= cosine <= 1 for cosine in probed(running, epoch=epoch + 1))
        return torch.cat([problems.weights(model), problems.statistics(model)])

    assert torch.equal(trained(True, tmp_path / "a"), trained(False, tmp_path / "b"))
