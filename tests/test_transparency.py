"""The parallel thing equals the plain thing: the right auxiliary variables make every stage's gradient that of
backpropagation through the whole network. That one stage is serial training says tests/test_twins.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Penalty
from parlay.data.batches import half
from parlay.engines.in_process import InProcess
from parlay.partitioning import Partition
from problems import NETWORKS, backpropagate, batch, engine, images, never, recorded, relative, trainer

METHODS = [AugmentedLagrangian(), Penalty(), Penalty(order="joint")]
SAMPLES = 12
ROUNDING = 2e-5  # of float32, through a network with batch norm: 5e-6 is seen

networks = pytest.mark.parametrize("network", NETWORKS)
stages = pytest.mark.parametrize("stages", [2, 3, 5])
factors = pytest.mark.parametrize("factor", [1, 2])
betas = pytest.mark.parametrize("beta", [0.01, 3.0, 1000.0])


def name(method: parlay.Coupling) -> str:
    return getattr(method, "order", type(method).__name__)


def problem(network: str, stages: int) -> tuple[Partition, tuple[Tensor, Tensor]]:
    data = images(SAMPLES)
    return parlay.partition(NETWORKS[network](), stages, data[0]), data


def filled(cut: Partition, data: tuple[Tensor, Tensor], method: parlay.Coupling, factor: int, to: Path) -> InProcess:
    """An engine whose states are the outputs, and whose weights stay as they are."""
    running = engine(cut, data, method, folder=to, downsample=factor)
    running.refresh([batch(SAMPLES)], never)
    return running


# The augmented Lagrangian: λ = x and κ = p


@networks
@stages
@factors
@betas
def test_with_states_at_the_outputs_and_multipliers_at_the_adjoints_every_gradient_is_that_of_backpropagation(
    network: str, stages: int, factor: int, beta: float, tmp_path: Path
) -> None:
    cut, data = problem(network, stages)
    running = filled(cut, data, AugmentedLagrangian(detail=0.0), factor, tmp_path)
    plain = backpropagate(cut, *data, factor)
    problems.hold_multipliers(running, plain.adjoints)
    running.parallel_step(batch(SAMPLES, beta=beta))
    for k in range(stages):
        assert relative(recorded(running, k), plain.gradients[k]) < ROUNDING
    for k, interface in enumerate(running.interfaces):  # and they are a fixed point of the update
        assert relative(interface.states.tensor(), plain.outputs[k]) < ROUNDING
        assert relative(interface.multipliers.tensor(), plain.adjoints[k]) < ROUNDING


@networks
@stages
@factors
def test_with_frozen_weights_the_augmented_lagrangian_finds_the_gradients_of_backpropagation_stage_by_stage(
    network: str, stages: int, factor: int, tmp_path: Path
) -> None:
    cut, data = problem(network, stages)
    running = filled(cut, data, AugmentedLagrangian(detail=0.0), factor, tmp_path)
    plain = backpropagate(cut, *data, factor)
    for visit in range(stages):
        running.parallel_step(batch(SAMPLES, epoch=visit))
        reached = [relative(recorded(running, k), plain.gradients[k]) < ROUNDING for k in range(stages)]
        assert reached == [k >= stages - 1 - visit for k in range(stages)]


@networks
@stages
def test_what_the_detail_adds_to_a_gradient_is_that_of_the_roughness_of_the_output_alone(
    network: str, stages: int, tmp_path: Path
) -> None:
    cut, data = problem(network, stages)
    gradients = []
    for weight in (0.0, 1.0):
        running = filled(cut, data, AugmentedLagrangian(detail=weight), 2, tmp_path)
        plain = backpropagate(cut, *data, 2)
        problems.hold_multipliers(running, plain.adjoints)
        running.parallel_step(batch(SAMPLES))
        gradients.append([recorded(running, k) for k in range(stages)])
    assert torch.equal(gradients[0][-1], gradients[1][-1])  # the last stage has the loss of the network
    for k, interface in enumerate(running.interfaces):
        inputs = data[0] if k == 0 else running.interfaces[k - 1].up(plain.outputs[k - 1])
        x = cut.stages[k](inputs)
        elements = x[0].numel()
        roughness = (x - interface.up(interface.down(x))).square().sum() / SAMPLES / elements
        scale = interface.down(x).square().mean()  # the states are exact: s² is that of this very batch
        wanted = torch.autograd.grad(3.0 / scale.detach() * roughness, list(cut.stages[k].parameters()))
        added = gradients[1][k] - gradients[0][k]
        assert relative(added, torch.cat([g.flatten() for g in wanted])) < 1e-3


# The penalty: a displacement by −p/(2b) in the place of the multiplier


@networks
@stages
@factors
@betas
def test_a_stage_with_undisplaced_input_and_displaced_target_has_the_gradient_of_backpropagation(
    network: str, stages: int, factor: int, beta: float, tmp_path: Path
) -> None:
    """In the joint order each interface is undisplaced until the signal has passed it: one exact stage per visit."""
    cut, data = problem(network, stages)
    running = filled(cut, data, Penalty(order="joint", trust=1e9, detail=0.0), factor, tmp_path)
    plain = backpropagate(cut, *data, factor)
    for visit in range(stages):
        running.parallel_step(batch(SAMPLES, epoch=visit, beta=beta))
        k = stages - 1 - visit
        # λ − x loses digits where it is small against x: the displacement is p/(2b)
        assert relative(recorded(running, k), plain.gradients[k]) < ROUNDING * (1 if beta < 10 else 20)


def test_a_displaced_input_makes_an_error_of_the_size_of_the_displacement(tmp_path: Path) -> None:
    """What the joint order gets wrong, and neither red-black nor the augmented Lagrangian does."""
    cut, data = problem("no batch norm", 2)
    errors = []
    for beta in (1.0, 10.0, 100.0):
        running = filled(cut, data, Penalty(order="joint", trust=1e9), 1, tmp_path)
        plain = backpropagate(cut, *data)
        for visit in range(2):
            running.parallel_step(batch(SAMPLES, epoch=visit, beta=beta))
        errors.append(relative(recorded(running, 1), plain.gradients[1]))
    assert errors[0] > 1000 * ROUNDING
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.2)


@networks
@stages
@factors
@pytest.mark.parametrize("beta", [0.01, 3.0])
def test_with_frozen_weights_red_black_comes_to_the_gradients_of_backpropagation_over_each_half_batch(
    network: str, stages: int, factor: int, beta: float, tmp_path: Path
) -> None:
    cut, data = problem(network, stages)
    method = Penalty(detail=0.0)
    running = filled(cut, data, method, factor, tmp_path)
    halves = [(half(torch.arange(SAMPLES)) == n).nonzero().squeeze(1) for n in range(2)]
    plain = [backpropagate(cut, data[0][ids], data[1][ids], factor) for ids in halves]
    for visit in range(2 * stages):  # forward through the stages, and back
        running.parallel_step(batch(SAMPLES, epoch=visit, beta=beta))
    for visit in range(2 * stages, 2 * stages + 2):
        running.parallel_step(batch(SAMPLES, epoch=visit, beta=beta))
        for k in range(stages):
            turn = method.turn(torch.arange(SAMPLES), visit, k)
            n = int(half(turn[0]))
            assert torch.equal(turn, halves[n])
            assert relative(recorded(running, k), plain[n].gradients[k]) < ROUNDING


@stages
def test_red_black_gives_every_stage_every_sample_in_two_visits_and_its_neighbours_the_others(stages: int) -> None:
    method, ids = Penalty(), torch.tensor([7, 2, 9, 4, 0])
    for epoch in range(4):
        turns = [set(ids[method.turn(ids, epoch, k)].tolist()) for k in range(stages)]
        later = [set(ids[method.turn(ids, epoch + 1, k)].tolist()) for k in range(stages)]
        for k in range(stages):
            assert turns[k] | later[k] == set(ids.tolist())
            assert not turns[k] & later[k]
            assert k == 0 or not turns[k] & turns[k - 1]


# Multipliers at zero


def trained(model: nn.Sequential, data: tuple[Tensor, Tensor], stages: int, **options: object) -> Tensor:
    cut = parlay.partition(model, stages, data[0][:2])
    result = trainer(cut, batch_size=8, seed=5, **options).fit(data, epochs=3)
    assert result.status == "finished"
    return problems.weights(result.model)


@networks
@pytest.mark.parametrize("stages", [2, 3])
@factors
@pytest.mark.parametrize("form", ["relative", "mean"])
@pytest.mark.parametrize("multiplier", ["hestenes", "printed"])
def test_with_multipliers_held_at_zero_the_augmented_lagrangian_is_the_penalty_method_bit_for_bit(
    network: str, stages: int, factor: int, form: str, multiplier: str
) -> None:
    same = {"beta": 2.0, "trust": 0.3, "form": form}
    data, common = images(20), {"stages": stages, "downsample": factor, "schedule": "alternate:2:1"}
    penalty = trained(NETWORKS[network](), data, method=Penalty(order="joint", **same), **common)
    held = AugmentedLagrangian(multiplier=multiplier, multiplier_step=0.0, **same)
    assert torch.equal(trained(NETWORKS[network](), data, method=held, **common), penalty)
