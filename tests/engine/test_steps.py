"""Steps in one process: batches and stages of every kind, random numbers, states set anew.

Clipping, accumulation, prediction and the schedules of whole runs are in test_twins.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Delayed, Local, Penalty, Replay
from parlay.engine.captures import Captures
from parlay.engine.clock import Clock
from parlay.engine.engine import Engine
from parlay.engine.evaluate import unchanged_buffers
from problems import backpropagate, batch, images, never, recorded, relative, trainer

STORED = [AugmentedLagrangian(), Penalty()]
METHODS = [*STORED, Replay(), Delayed(), Local()]
stored = pytest.mark.parametrize("method", STORED, ids=lambda m: type(m).__name__)
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def engine(model: nn.Sequential, samples: int, method: Any, folder: Path, by: Any = "even", **options: Any) -> Engine:
    """Three stages, which are filled where the method wants it."""
    data = images(samples)
    cut = parlay.partition(model, 3, data[0][:2], by=by)
    running = problems.engine(cut, data, method, folder=folder, **{"optimizer": sgd, **options})
    running.refresh([batch(samples)], never)
    return running


def fit(
    model: nn.Sequential, data: tuple[Tensor, Tensor], method: Any, epochs: int = 3, by: Any = "even", **options: Any
) -> parlay.Result:
    cut = parlay.partition(model, 3, data[0][:2], by=by)
    given = {"batch_size": 8, "schedule": "parallel", "optimizer": sgd, **options}
    return trainer(cut, method, **given).fit(data, epochs=epochs)


# Batches


@methods
@pytest.mark.parametrize("samples", [17, 5, 1])
def test_the_last_incomplete_batch_is_trained_on(method: parlay.Method, samples: int) -> None:
    """On maps of odd sides."""
    result = fit(problems.without_norm(), images(samples), method)
    assert result.status == "finished"
    assert all(torch.isfinite(w).all() for w in result.model.parameters())


@stored
def test_a_batch_of_one_sample_renews_its_state_and_no_other(method: parlay.Method, tmp_path: Path) -> None:
    running = engine(problems.without_norm(), 9, method, tmp_path)
    for epoch in range(4):  # until the first stage has a signal to move by
        running.parallel_step(batch(9, epoch=epoch))
    before = [link.states.tensor().clone() for link in running.own.links]
    running.parallel_step(batch(torch.tensor([6]), epoch=4))
    for link, old in zip(running.own.links, before, strict=True):
        assert (link.states.tensor() != old).flatten(1).any(1).nonzero().flatten().tolist() == [6]


def test_of_a_single_sample_only_the_stages_whose_turn_it_is_have_a_gradient(tmp_path: Path) -> None:
    running = engine(problems.without_norm(), 9, Penalty(), tmp_path, optimizer=problems.Recorder)
    running.parallel_step(batch(torch.tensor([6]), epoch=0))
    assert [recorded(running, k) is not None for k in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("method", "schedule", "phases", "samples"),
    [
        (Replay(), "alternate:2:1", "spsppspp", 3),  # fewer batches than are on their way
        (Delayed(), "tail:2:1", "sppppss", 8),
        (Local(), "alternate:1:1", "sspsps", 20),
        (Replay(), "adaptive", "spsps", 20),  # that a phase ends is known when its last epoch is over
    ],
)
def test_every_stage_trains_on_every_sample_once_an_epoch(
    method: parlay.Method, schedule: str, phases: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Tensor]] = [[], [], []]
    enter = Clock.enter

    def seen(self: Clock, one: Any) -> Any:
        turns = enter(self, one)
        for own, turn in zip(found, turns, strict=True):
            own += [turn.backward.ids] if turn.backward is not None else []
        return turns

    monkeypatch.setattr(Clock, "enter", seen)
    monkeypatch.setattr("parlay.run.loop.healthy", lambda *_: False)
    result = fit(problems.dense(), images(samples), method, len(phases), schedule=schedule)
    assert "".join(row["phase"][0] for row in result.records) == phases
    for own in found:
        assert torch.cat(own).bincount(minlength=samples).tolist() == [phases.count("p")] * samples


# Stages of every kind


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@methods
def test_sequences_of_tokens_train_as_images_do(method: parlay.Method) -> None:
    torch.manual_seed(0)
    tokens, classes = torch.randint(11, (20, 5)), torch.randint(3, (20,))
    middle = (problems.Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())) for _ in range(3))
    model = nn.Sequential(nn.Embedding(11, 8), *middle, nn.Sequential(Mean(), nn.Linear(8, 3)))
    result = fit(model, (tokens, classes), method)
    assert result.status == "finished"
    assert result.summary.get("staleness") == method.delay(3)
    if method in STORED:
        assert result.summary["auxiliary_bytes"] == 20 * 2 * 5 * 8 * 4 * method.keeps


@methods
@pytest.mark.parametrize("cuts", [(1, 3), (2, 5)])
def test_stages_without_parameters_train_with_the_others(method: parlay.Method, cuts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Softsign(), nn.Linear(6, 3), nn.LogSoftmax(1))
    before = problems.weights(model)
    assert fit(model, images(20), method, 4, by=cuts, loss=nn.NLLLoss()).status == "finished"
    assert not torch.equal(problems.weights(model), before)


@methods
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_stage_keeps_its_weights_and_passes_the_signal_on(method: parlay.Method, frozen: int) -> None:
    data, cut = images(24), parlay.partition(problems.dense(), 3, images(2)[0])
    cut.stages[frozen].requires_grad_(False)
    before = [problems.weights(stage) for stage in cut.stages]
    trainer(cut, method, batch_size=8, schedule="parallel", optimizer=sgd).fit(data, epochs=4)
    same = [torch.equal(problems.weights(stage), old) for stage, old in zip(cut.stages, before, strict=True)]
    assert same == [k == frozen for k in range(3)]


@methods
def test_a_stage_that_begins_in_place_is_the_same_as_one_that_does_not(method: parlay.Method) -> None:
    def trained(inplace: bool) -> Tensor:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 6), nn.ReLU(inplace), nn.Linear(6, 6), nn.ReLU(inplace), nn.Linear(6, 3))
        return problems.weights(fit(nn.Sequential(nn.Flatten(), *layers), images(20), method, by=(2, 4)).model)

    assert torch.equal(trained(True), trained(False))


@methods
def test_a_network_in_float64_is_trained(method: parlay.Method) -> None:
    inputs, targets = images(20)
    how = {"schedule": "alternate:1:1", "epochs": 4}
    result = fit(problems.without_norm().double(), (inputs.double(), targets), method, **how)
    assert result.status == "finished"
    assert {w.dtype for w in result.model.parameters()} == {torch.float64}
    single = problems.weights(fit(problems.without_norm(), (inputs, targets), method, **how).model)
    assert relative(problems.weights(result.model), single) < 1e-3  # what crosses a cut is rounded


def test_modules_that_were_switched_to_evaluation_are_trained(tmp_path: Path) -> None:
    running = engine(problems.with_norm().eval(), 16, AugmentedLagrangian(), tmp_path)
    modules = [module for stage in running.own.stages for module in stage.module.modules()]
    assert all(module.training for module in modules)
    running.evaluate([images(16)])
    running.serial_step(batch(16))
    assert all(module.training for module in modules)


# Random numbers and statistics


def test_dropout_drops_the_same_in_both_passes_of_replay_also_in_the_last_steps(tmp_path: Path) -> None:
    """And other elements at every stage."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(64, 3))
    running = engine(model, 20, Replay(), tmp_path, by=(3, 4), batch_size=8)
    masks: dict[int, list[Tensor]] = {2: [], 3: []}
    for k, seen in masks.items():
        model[k].register_forward_hook(lambda _, x, y, seen=seen: seen.append((y == 0) & (x[0] != 0)))
    for step, ids in enumerate(torch.split(torch.arange(20), 8)):  # the last one of four
        running.parallel_step(batch(ids, step=step))
    running.finish()
    for seen in masks.values():
        assert len(seen) == 6
        assert all(sum(torch.equal(mask, other) for other in seen) == 2 for mask in seen)
    assert not any(torch.equal(a, b) for a in masks[2] for b in masks[3])


@pytest.mark.parametrize("method", METHODS[2:], ids=lambda m: type(m).__name__)
def test_batch_statistics_are_counted_once_a_batch(method: parlay.Method, tmp_path: Path) -> None:
    data, model, other = images(20), problems.with_norm(), problems.with_norm().train()
    still = {"optimizer": lambda weights: torch.optim.SGD(weights, 0.0, 0.9), "batch_size": 8}
    running = engine(model, 20, method, tmp_path, **still)
    for step, ids in enumerate(torch.split(torch.arange(20), 8)):
        running.parallel_step(batch(ids, step=step))
        other(data[0][ids].contiguous(memory_format=torch.channels_last))
    running.finish()
    torch.testing.assert_close(problems.statistics(model), problems.statistics(other))


# States


@pytest.mark.parametrize("factor", [1, 2])
@stored
def test_a_refresh_sets_states_to_outputs_multipliers_to_zero_and_leaves_the_statistics(
    method: parlay.Method, factor: int, tmp_path: Path
) -> None:
    model = problems.with_norm()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    running = engine(model, 12, method, tmp_path, downsample=factor)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    for _ in range(3):
        running.parallel_step(batch(12))
    old = [link.states.tensor().clone() for link in running.own.links]
    violations = running.refresh([batch(12)], never)
    with unchanged_buffers(model):
        plain = backpropagate(parlay.partition(model, 3, images(2)[0]), *images(12), factor)
    for k, link in enumerate(running.own.links):
        assert relative(link.states.tensor(), plain.outputs[k]) < 1e-5
        assert violations[k] == pytest.approx(relative(old[k], plain.outputs[k]), rel=1e-4)
        assert violations[k] > 1e-3
        assert float(link.s2) == pytest.approx(float(plain.outputs[k].square().mean()), rel=1e-4)
        assert link.multipliers is None or not link.multipliers.tensor().any()
    assert running.filled
    assert running.refresh([batch(6), batch(6)], lambda: True) is None  # stopped
    assert not running.filled


@stored
def test_states_are_set_anew_whenever_a_parallel_phase_begins(method: parlay.Method) -> None:
    rows = fit(problems.dense(), images(20), method, 8, schedule="alternate:2:1").records
    assert "".join(row["phase"][0] for row in rows) == "spsppspp"
    assert [row["epoch"] for row in rows if row["refresh_seconds"] > 0] == [1, 3, 6]
    assert [row["epoch"] for row in rows if row["violation_at_entry"] is not None] == [3, 6]


@stored
def test_the_violation_of_a_step_is_that_of_the_states_it_found(method: parlay.Method, tmp_path: Path) -> None:
    running = engine(problems.dense(), 8, method, tmp_path)
    for link, size in zip(running.own.links, (1.5, 1.25), strict=True):
        link.states.load(size * link.states.tensor().clone())
    running.parallel_step(batch(8))
    assert running.totals.violations()[0] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("method", "kind"), [(AugmentedLagrangian(), "host"), (Penalty(), "file")])
def test_a_step_through_windows_is_the_same_as_one_on_the_stores(
    method: parlay.Method, kind: str, tmp_path: Path
) -> None:
    """As captured steps see stores in host memory."""

    def stepped(windows: bool) -> list[Tensor]:
        model = problems.without_norm()
        running = engine(model, 16, method, tmp_path / str(windows), store=kind, batch_size=8)
        parallel, run, links = running.steps.parallel, running.steps.parallel.run, running.own.links
        captures = Captures(running.own, compile=False) if windows else None
        if captures is not None:
            parallel.run = lambda inputs, compiled=False: run(inputs, compiled=True)  # noqa: ARG005
        for epoch, ids in enumerate([torch.arange(8), torch.arange(8, 16), torch.tensor([15, 4, 6, 1, 3, 8, 10, 12])]):
            entering = batch(ids, epoch=epoch)
            if captures is not None:
                captures.batch = entering
            with captures.through_windows() if captures is not None else nullcontext():
                running.parallel_step(entering)
        return [problems.weights(model), *(link.states.tensor().clone() for link in links)]

    assert all(torch.equal(a, b) for a, b in zip(stepped(True), stepped(False), strict=True))
