"""The parallel thing equals the plain thing. That whole runs equal plain programs says test_twins.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Delayed, Local, Penalty, Replay
from parlay.data import CropAndFlip
from parlay.data.batches import half
from parlay.engine.engine import Engine
from parlay.link.states import Pair
from parlay.partitioning import Partition
from problems import NETWORKS, backpropagate, batch, images, never, recorded, relative, trainer

SAMPLES, ROWS, BATCHES = 64, 6, 11  # streamed; the last batch is incomplete
ROUNDING = 2e-5  # of float32, through a network with batch norm: 5e-6 is seen
BETAS = (0.01, 3.0, 1000.0)
Data = tuple[Tensor, Tensor]
CASES = [  # network, stages, factor of downsampling
    *(("batch norm", 2, 1), ("no batch norm", 3, 2), ("batch norm", 5, 2)),
    *(("no batch norm", 2, 2), ("batch norm", 3, 1), ("no batch norm", 5, 1)),
]


def frozen(
    network: str, stages: int, method: parlay.Method, factor: int, to: Path, samples: int = 12
) -> tuple[Partition, Data, Engine]:
    """An engine whose states are the outputs, and whose weights stay as they are."""
    data = images(samples)
    cut = parlay.partition(NETWORKS[network](), stages, data[0][:ROWS])
    size = ROWS if method.fresh_inputs else samples
    running = problems.engine(cut, data, method, folder=to, downsample=factor, batch_size=size)
    running.refresh([batch(samples)], never)
    return cut, data, running


def trained(model: nn.Sequential, stages: int, method: parlay.Method | None, schedule: str, **options: Any) -> Tensor:
    """Weights and batch statistics."""
    data = images(21)
    cut = parlay.partition(model, stages, data[0][:2])
    given = {"batch_size": 8, "seed": 5, "schedule": schedule, **options}
    assert trainer(cut, method, **given).fit(data, epochs=3).status == "finished"
    return torch.cat([problems.weights(model), problems.statistics(model)])


def noisy() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.1)) for block in problems.with_norm()))


# One stage


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Penalty(), Replay(), Delayed(), Local()], ids=str)
def test_one_stage_is_serial_training_bit_for_bit(method: parlay.Method) -> None:
    """Streamed methods see images that are augmented anew, as serial training does."""
    augment = CropAndFlip(2) if method.fresh_inputs else None
    serial = trained(noisy(), 1, None, "serial", augment=augment)
    assert torch.equal(trained(noisy(), 1, method, "parallel", augment=augment), serial)
    assert not torch.equal(trained(noisy(), 3, method, "parallel", augment=augment), serial)


@pytest.mark.parametrize("network", NETWORKS)
def test_serial_training_is_the_same_at_any_cut_bit_for_bit(network: str) -> None:
    one, three, five = (trained(NETWORKS[network](), stages, None, "serial") for stages in (1, 3, 5))
    assert torch.equal(one, three)
    assert torch.equal(one, five)


# The augmented Lagrangian, λ = x and κ = p; the penalty, λ = x − p/(2b)


@pytest.mark.parametrize(("case", "beta"), [(case, BETAS[n % 3]) for n, case in enumerate(CASES)])
def test_states_at_outputs_and_multipliers_at_adjoints_give_the_gradients_of_backpropagation(
    case: tuple[str, int, int], beta: float, tmp_path: Path
) -> None:
    network, stages, factor = case
    cut, data, running = frozen(network, stages, AugmentedLagrangian(detail=0.0), factor, tmp_path)
    plain = backpropagate(cut, *data, factor)
    problems.hold_multipliers(running, plain.adjoints)
    running.parallel_step(batch(12, beta=beta))
    for k in range(stages):
        assert relative(recorded(running, k), plain.gradients[k]) < ROUNDING
    for k, link in enumerate(running.own.links):  # and they are a fixed point of the update
        assert relative(link.states.tensor(), plain.outputs[k]) < ROUNDING
        assert relative(link.multipliers.tensor(), plain.adjoints[k]) < ROUNDING


@pytest.mark.parametrize(("case", "beta"), [(case, BETAS[n % 2]) for n, case in enumerate(CASES)])
def test_with_frozen_weights_the_penalty_comes_to_the_gradients_of_backpropagation_over_each_half_batch(
    case: tuple[str, int, int], beta: float, tmp_path: Path
) -> None:
    (network, stages, factor), method, ids = case, Penalty(detail=0.0), torch.arange(12)
    cut, data, running = frozen(network, stages, method, factor, tmp_path)
    halves = [(half(ids) == n).nonzero().squeeze(1) for n in range(2)]
    plain = [backpropagate(cut, data[0][its], data[1][its], factor) for its in halves]
    for visit in range(2 * stages + 2):  # forward through the stages, and back
        running.parallel_step(batch(12, epoch=visit, beta=beta))
        for k in range(stages) if visit >= 2 * stages else ():
            turn = method.share(ids, visit, k)
            n = int(half(turn[0]))
            assert torch.equal(turn, halves[n])
            assert relative(recorded(running, k), plain[n].gradients[k]) < ROUNDING
    for k, link in enumerate(running.own.links):  # what stage k computes next is displaced
        b = method.stiffness(torch.tensor(beta), link.elements, link.s2)
        turn = method.share(ids, visit + 1, k)
        same = plain[int(half(turn[0]))]
        displaced = same.outputs[k] - same.adjoints[k] / (2 * b)
        assert relative(link.states.tensor()[turn], displaced) < ROUNDING


def test_red_black_gives_every_stage_every_sample_in_two_epochs_and_its_neighbours_the_others() -> None:
    method, ids = Penalty(), torch.tensor([7, 2, 9, 4, 0])
    for epoch in range(4):
        now, later = ([set(ids[method.share(ids, e, k)].tolist()) for k in range(5)] for e in (epoch, epoch + 1))
        for k in range(5):
            assert now[k] | later[k] == set(ids.tolist())
            assert not now[k] & later[k]
            assert k == 0 or not now[k] & now[k - 1]


class Held(AugmentedLagrangian):
    """In the order of the penalty method, with multipliers that stay zero."""

    computed = Penalty.computed
    share = Penalty.share

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:
        state = Penalty.update(self, pair, x, p, b, s2).state
        return Pair(state, torch.zeros_like(state))


@pytest.mark.parametrize(("network", "stages", "factor"), [("batch norm", 2, 2), ("no batch norm", 3, 1)])
def test_with_multipliers_held_at_zero_the_augmented_lagrangian_is_the_penalty_method_bit_for_bit(
    network: str, stages: int, factor: int
) -> None:
    held, penalty = (
        trained(NETWORKS[network](), stages, method, "alternate:2:1", downsample=factor)
        for method in (Held(beta=2.0), Penalty(beta=2.0))
    )
    assert torch.equal(held, penalty)


# Streamed methods: gradients that are some steps old. The pull of replay towards the first pass is nothing here.


@pytest.mark.parametrize(
    ("method", "case"),
    [
        (method, case)
        for n, case in enumerate([*CASES, ("no batch norm", 1, 1)])
        for method in ([Replay(beta=0.0)] if n % 2 else [Delayed(), Replay(beta=0.3)])
    ],
    ids=str,
)
def test_with_frozen_weights_every_stage_has_the_gradient_of_backpropagation_of_every_batch_once(
    method: parlay.Method, case: tuple[str, int, int], tmp_path: Path
) -> None:
    network, stages, factor = case
    cut, data, running = frozen(network, stages, method, factor, tmp_path, SAMPLES)
    steps = [batch(ids, 0, step) for step, ids in enumerate(torch.split(torch.arange(SAMPLES), ROWS))]
    wanted = [backpropagate(cut, data[0][b.ids], data[1][b.ids], factor).gradients for b in steps]
    done: list[list[int]] = [[] for _ in range(stages)]
    for step in range(BATCHES + 2 * (stages - 1)):  # the last ones as `finish` does
        running.steps.step(steps[step] if step < BATCHES else None, running.totals)
        for k in range(stages):
            late = step - 2 * (stages - 1) + k  # the batch whose turn it is
            if 0 <= late < BATCHES:
                done[k].append(late)
                assert relative(recorded(running, k), wanted[late][k]) < ROUNDING
            else:  # before its first adjoint has come, a stage makes no update
                assert recorded(running, k) is None or late >= BATCHES
    assert running.steps.parallel.clock.empty
    assert done == [list(range(BATCHES))] * stages
    assert running.totals.counts == [SAMPLES] * stages
