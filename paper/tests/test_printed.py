"""The printed variants of the stored methods: their formulas, and what they come to where the answer is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import InputError
from parlay.engine.losses import Totals
from parlay.link.states import Pair
from parlay_paper.methods.formulas import Printed
from parlay_paper.methods.joint_penalty import JointPenalty
from parlay_paper.methods.printed_lagrangian import PrintedLagrangian
from problems import NETWORKS, Regression, backpropagate, batch, engine, images, never, recorded, relative, trainer

BETAS = pytest.mark.parametrize("beta", [0.01, 3.0, 100.0])
WIDE = 1e9  # a trust region that never cuts
ONE = torch.tensor(1.0)
ROUNDING = 2e-5
SAMPLES = 12
GOLDEN = (1 + 5**0.5) / 2
FROZEN = 3  # blocks of six


@pytest.fixture
def tensors() -> list[Tensor]:
    """λ, κ, x, p: all different."""
    random = torch.Generator().manual_seed(3)
    return [torch.randn(6, 3, 2, 2, generator=random) for _ in range(4)]


# Formulas


@BETAS
def test_printed_solves_for_the_state_first_and_follows_the_printed_formula(tensors: list[Tensor], beta: float) -> None:
    (state, κ, x, p), b, η = tensors, torch.tensor(beta), 0.3
    new = PrintedLagrangian(multiplier_step=η, trust=WIDE).update(Pair(state, κ), x, p, b, ONE)
    solved = x - (p - κ) / (2 * b)
    torch.testing.assert_close(new.state, solved)
    torch.testing.assert_close(new.multiplier, κ - η / (2 * b) * (solved - x))


@BETAS
def test_a_part_of_the_step_of_hestenes_leaves_the_rest_of_the_pull_to_the_state(
    tensors: list[Tensor], beta: float
) -> None:
    (state, κ, x, p), b = tensors, torch.tensor(beta)
    part = PrintedLagrangian(multiplier="hestenes", multiplier_step=0.25, trust=WIDE)
    new = part.update(Pair(state, κ), x, p, b, ONE)
    torch.testing.assert_close(new.multiplier, κ + 0.25 * (p - κ))
    torch.testing.assert_close(new.state, x - (p - new.multiplier) / (2 * b))
    whole = PrintedLagrangian(multiplier="hestenes").update(Pair(state, κ), x, p, b, ONE)
    assert torch.equal(whole.state, x)
    assert torch.equal(whole.multiplier, p)


@pytest.mark.parametrize("kind", [JointPenalty, PrintedLagrangian])
def test_a_state_goes_a_part_of_the_way_or_as_far_as_the_rate_of_the_paper(
    tensors: list[Tensor], kind: type[Printed]
) -> None:
    (state, κ, x, p), b = tensors, torch.tensor(2.0)

    def new(**options: float) -> Tensor:
        return kind(trust=WIDE, **options).update(Pair(state, κ), x, p, b, ONE).state

    torch.testing.assert_close(new(state_step=0.3), state + 0.3 * (new() - state))
    # eq. (18): λ − η (2b (λ − x) + p − κ)
    signal = p if kind is JointPenalty else p - κ
    torch.testing.assert_close(new(state_rate=0.01), state - 0.01 * (2 * b * (state - x) + signal))


def test_the_trust_region_cuts_each_displacement_to_its_size_and_keeps_its_direction(tensors: list[Tensor]) -> None:
    _, _, x, pull = tensors
    pull = pull * torch.logspace(-3, 3, 6).view(-1, 1, 1, 1)
    d = JointPenalty(trust=0.5).displaced(torch.zeros_like(x), pull, torch.tensor(1.0), torch.tensor(4.0))
    size, wanted = (t.flatten(1).square().mean(1).sqrt() for t in (d, pull / 2))
    torch.testing.assert_close(size, wanted.clamp_max(1.0))  # 0.5 of a size of 2
    assert torch.nn.functional.cosine_similarity(d.flatten(1), -pull.flatten(1)).min() > 0.999


def test_the_penalty_is_relative_a_mean_or_the_papers_sum() -> None:
    b = {form: JointPenalty(form=form).stiffness(torch.tensor(6.0), 3, torch.tensor(2.0)) for form in ("mean", "sum")}
    assert b == {"mean": 2.0, "sum": 6.0}
    assert JointPenalty().stiffness(torch.tensor(6.0), 3, torch.tensor(2.0)) == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "max"}, "unknown form 'max': write one of relative, mean, sum"),
        ({"trust": 0.0}, "trust is 0.0: write a number greater than 0"),
        ({"state_step": 1.5}, "state-step is 1.5: write a number of at most 1"),
        ({"beta": 0.0}, "beta is 0.0: write a number greater than 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, float], said: str) -> None:
    for kind in (JointPenalty, PrintedLagrangian):
        with pytest.raises(InputError, match=said):
            kind(**options)
    with pytest.raises(InputError, match="unknown multiplier 'powell': write one of printed, hestenes"):
        PrintedLagrangian(multiplier="powell")


# Gradients


@pytest.mark.parametrize(("network", "stages", "factor"), [("batch norm", 2, 2), ("no batch norm", 3, 1)])
@BETAS
def test_a_stage_with_undisplaced_input_and_displaced_target_has_the_gradient_of_backpropagation(
    network: str, stages: int, factor: int, beta: float, tmp_path: Path
) -> None:
    """A link is undisplaced until the signal has passed it: one exact stage a step."""
    data = images(SAMPLES)
    cut = parlay.partition(NETWORKS[network](), stages, data[0][:6])
    running = engine(cut, data, JointPenalty(trust=WIDE, detail=0.0), folder=tmp_path, downsample=factor)
    running.refresh([batch(SAMPLES)], never)
    plain = backpropagate(cut, *data, factor)
    for visit in range(stages):
        running.parallel_step(batch(SAMPLES, epoch=visit, beta=beta))
        k = stages - 1 - visit
        # λ − x loses digits where it is small against x: the displacement is p/(2b)
        assert relative(recorded(running, k), plain.gradients[k]) < ROUNDING * (1 if beta < 10 else 20)


@pytest.mark.parametrize("multiplier", ["hestenes", "printed"])
def test_with_multipliers_held_at_zero_the_lagrangian_is_the_penalty_bit_for_bit(multiplier: str) -> None:
    def trained(method: parlay.Method) -> Tensor:
        data = images(20)
        cut = parlay.partition(problems.with_norm(), 3, data[0][:2])
        result = trainer(cut, method, batch_size=8, downsample=2, schedule="parallel").fit(data, epochs=4)
        return problems.weights(result.model)

    held = PrintedLagrangian(beta=2.0, trust=0.3, multiplier=multiplier, multiplier_step=0.0)
    assert torch.equal(trained(held), trained(JointPenalty(beta=2.0, trust=0.3)))


# Linear residual networks, whose minimum is that of linear regression


@dataclass
class Trained:
    network: nn.Sequential
    loss: float
    violation: list[float]
    states: list[Tensor]


def train(
    problem: Regression, method: Printed, stages: int, folder: Path, *, lr: float, steps: int, frozen: int = 0
) -> Trained:
    """Full batches and a constant rate; the last `frozen` blocks of six keep their weights."""
    network = problem.network()
    network[len(network) - frozen :].requires_grad_(False)
    cut = parlay.partition(network, stages, problem.inputs)
    given = {"loss": problems.squared_error, "optimizer": lambda weights: torch.optim.SGD(weights, lr=lr)}
    running = engine(cut, problem.data, method, folder=folder, **given)
    whole = [batch(len(problem.inputs), epoch=epoch, beta=method.beta) for epoch in range(steps)]
    running.refresh(whole[:1], never)
    for step in whole:
        running.totals = Totals()
        running.parallel_step(step)
    with torch.no_grad():
        loss = float(problems.squared_error(network(problem.inputs), problem.targets))
    states = [link.states.tensor() for link in running.own.links]  # type: ignore[attr-defined]
    return Trained(network, loss, running.totals.violations(), states)


@pytest.mark.slow
def test_the_joint_penalty_comes_the_nearer_to_the_minimum_the_larger_beta_is(tmp_path: Path) -> None:
    problem = Regression.make(noise=0.5)
    near, nearer = (
        train(problem, JointPenalty(beta, state_step=0.4), 3, tmp_path, lr=lr, steps=steps)
        for beta, lr, steps in ((10.0, 0.01, 300), (100.0, 0.002, 600))
    )
    assert problem.least < nearer.loss < near.loss < 1.05 * problem.least
    for k in range(2):  # the violation does not vanish; it goes with 1/β
        assert 4 < near.violation[k] / nearer.violation[k] < 12


@pytest.mark.parametrize("beta", [1.0, 5.0])
def test_the_joint_penalty_finds_the_known_displacement(beta: float, tmp_path: Path) -> None:
    """With the last stage frozen, f(λ) = λ Cᵀ, the states solve (λ − x)(b + CᵀC) = −R C, R the residual."""
    problem, method = Regression.make(noise=0.5), JointPenalty(beta, form="sum", state_step=0.5, trust=100.0)
    reached = train(problem, method, 2, tmp_path, lr=0.1 / (beta + 4), steps=500, frozen=FROZEN)
    with torch.no_grad():
        C = reached.network[len(reached.network) - FROZEN :](torch.eye(4)).T.double()
    R = problem.inputs.double() @ problem.best - problem.targets
    x = problem.inputs.double() @ problem.best @ torch.linalg.inv(C).T
    displaced = -R @ C @ torch.linalg.inv(beta * torch.eye(4) + C.T @ C)
    assert reached.loss == pytest.approx(problem.least, rel=1e-3)
    assert relative(reached.states[0].double(), x + displaced) < 1e-2
    assert reached.violation[0] == pytest.approx(float(displaced.norm() / x.norm()), rel=1e-2)


@pytest.mark.parametrize("state_step", [1.0, 0.5, 0.4])
def test_from_three_stages_on_the_joint_penalty_needs_state_steps_below_a_half(
    state_step: float, tmp_path: Path
) -> None:
    """λ_k ← (1 − α) λ_k + α (x_{k-1} − p_k/(2b)), and between stages near the identity p_k/(2b) is λ_k − λ_{k+1}.

    A full step at both links at once overshoots, at any β, by the golden ratio. Half steps and less converge.
    """
    problem, beta = Regression.make(noise=0.0), 1e4
    network = problem.network()
    for weight in network.parameters():
        nn.init.zeros_(weight)
    method = JointPenalty(beta, form="sum", state_step=state_step, trust=1e30)
    cut, data = parlay.partition(network, 3, problem.inputs), (problem.inputs, problem.inputs)
    running = engine(cut, data, method, folder=tmp_path, loss=problems.squared_error)
    step = batch(len(problem.inputs), beta=beta)
    running.refresh([step], never)
    states = running.own.links[0].states  # type: ignore[attr-defined]
    states.load(problem.inputs + 0.1 * torch.randn(problem.inputs.shape, generator=torch.Generator().manual_seed(0)))
    distances = []
    for _ in range(16):
        running.parallel_step(step)
        distances.append(float((states.tensor() - problem.inputs).norm()))
    factor = GOLDEN if state_step == 1 else 1 + state_step * (1 / GOLDEN - 1)
    assert distances[-1] / distances[-2] == pytest.approx(factor, rel=0.02)
