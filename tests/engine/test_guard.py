"""A loss that is not finite stops all updates in its step, also where the host does not look at every one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Delayed, Local, Penalty, Replay, faults
from parlay.engine.engine import Engine
from parlay.engine.guard import Guard, all_finite
from parlay.engine.losses import raise_if_not_finite
from parlay.errors import Diverged
from parlay.stage.stage import Stage
from problems import batch, images, never

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def engine(data: tuple[Tensor, Tensor], method: parlay.Method, folder: Path) -> Engine:
    cut = parlay.partition(problems.without_norm(), 3, data[0][:6])
    return problems.engine(cut, data, method, folder=folder, optimizer=sgd, batch_size=6)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_fused_optimisers_change_nothing_while_the_flag_is_up(make: Any) -> None:
    module, flag = nn.Sequential(nn.Linear(3, 2)), torch.zeros(())
    stage = Stage(module, lambda weights: make(weights, lr=0.1, weight_decay=1e-2, fused=True), CPU, None)
    stage.optimiser.hold_by(flag)

    def step() -> dict[str, Tensor]:
        stage.forward(torch.ones(4, 3)).sum().backward()
        stage.apply()
        return {name: value.clone() for name, value in stage.tensors().items()}

    before = step()
    flag.fill_(1)
    held = step()
    assert all(torch.equal(held[name], value) for name, value in before.items())
    flag.fill_(0)
    assert not torch.equal(step()["weights/0.weight"], held["weights/0.weight"])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_host_looks_at_all_losses(bad: float) -> None:
    guard = Guard(None, CPU)
    for values, fine in (((1.0, 2.0), True), ((1.0, bad), False), ((bad, 1.0), False), ((3e38, 3e38), True)):
        for value in values:
            guard.see(torch.tensor(value))
        assert guard.may_update() is fine
    assert not all_finite([torch.tensor(bad, dtype=torch.bfloat16)])
    with pytest.raises(Diverged, match=f"the loss of stage 0 of 2 is {bad} in the first steps of a parallel phase"):
        raise_if_not_finite([None, None], [bad, 0.0], 2)  # before its first adjoint has come


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("method", [AugmentedLagrangian(), Penalty()], ids=lambda m: type(m).__name__)
def test_stage_step_and_samples_are_named_and_neither_weights_nor_states_have_changed(
    method: parlay.Method, value: float, tmp_path: Path
) -> None:
    running = engine(images(8), method, tmp_path)
    running.refresh([batch(8)], never)
    first, second = (link.states for link in running.own.links)
    second.load(torch.full_like(second.tensor(), value))
    before, states = problems.weights(running.model), first.tensor().clone()
    named = rf"loss of stage 1 of 3 is {value} in epoch 5, step 3 \(samples 3, 0, 5, 1, \.\.\.\)"
    with pytest.raises(Diverged, match=named):
        running.parallel_step(batch(torch.tensor([3, 0, 5, 1, 2, 4, 7]), epoch=4, step=2))
    assert torch.equal(problems.weights(running.model), before)
    assert torch.equal(first.tensor(), states)


def test_with_streamed_states_the_batch_is_the_one_that_the_stage_trains_on(tmp_path: Path) -> None:
    running, ids = engine(images(36), Replay(), tmp_path), torch.split(torch.arange(36), 6)
    for step in range(5):
        running.parallel_step(batch(ids[step], 4, step))
    before, adjoints = problems.weights(running.model), running.own.links[0].adjoints
    adjoints._kept = {slot: torch.full_like(kept, INF) for slot, kept in adjoints._kept.items()}
    with pytest.raises(Diverged, match=r"loss of stage 0 of 3 is .* in epoch 5, step 2 \(samples 6, 7, 8, 9,"):
        running.parallel_step(batch(ids[5], 4, 5))
    assert torch.equal(problems.weights(running.model), before)


def test_in_a_serial_step_the_loss_is_that_of_the_whole_network(tmp_path: Path) -> None:
    data = images(8)
    data[0][2] = NAN
    running = engine(data, AugmentedLagrangian(), tmp_path)
    before = problems.weights(running.model)
    with pytest.raises(Diverged, match=r"the loss of the network is nan in epoch 2, step 4 \(samples 2, 4\)"):
        running.serial_step(batch(torch.tensor([2, 4]), epoch=1, step=3))
    assert torch.equal(problems.weights(running.model), before)


@pytest.mark.parametrize(
    "method", [AugmentedLagrangian(), Penalty(), Replay(predict=0.5), Replay(accumulate=2), Delayed(), Local()], ids=str
)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_fault_in_a_parallel_step_ends_a_run_with_finite_weights(
    method: parlay.Method, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gradients are added up, or weights are looked ahead to."""
    data = images(40)
    cut = parlay.partition(problems.without_norm(), 3, data[0][:2])
    monkeypatch.setenv(faults.VARIABLE, f"stage{stage}:step11:nan")
    faults.arm(3)
    monkeypatch.delenv(faults.VARIABLE)
    made = problems.trainer(cut, method, schedule="parallel", batch_size=8, optimizer=sgd)
    result = made.fit(data, epochs=4)
    faults.arm(3)
    assert result.status == "diverged"
    assert f"the loss of stage {stage} of 3 is nan in epoch " in result.message
    assert all(bool(w.isfinite().all()) for w in cut.model.parameters())
