"""Linear residual networks, whose minimum is that of linear regression: every method reaches it, the augmented
Lagrangian without a violation, the penalty method with the one of appendix B, λ − x = −p/(2b)."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Coupling, Penalty
from parlay.engines.base import Totals
from problems import Regression, batch, never, relative, squared_error

GOLDEN = (1 + 5**0.5) / 2


@dataclass
class Trained:
    network: nn.Sequential
    loss: float
    violation: list[float]
    """That the last step has seen, per interface."""
    states: list[Tensor]
    multipliers: list[Tensor | None]


def train(
    problem: Regression, method: Coupling, stages: int, folder: Path, *, lr: float, steps: int, frozen: int = 0
) -> Trained:
    """Full batches and a constant rate; the last `frozen` blocks of six keep their weights."""
    network = problem.network()
    network[len(network) - frozen :].requires_grad_(False)
    running = problems.engine(
        parlay.partition(network, stages, problem.inputs),
        problem.data,
        method,
        folder=folder,
        loss=squared_error,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=lr),
    )
    whole = [batch(len(problem.inputs), epoch=epoch, beta=method.beta) for epoch in range(steps)]
    running.refresh(whole[:1], never)
    for step in whole:
        running.totals = Totals()
        running.parallel_step(step)
    with torch.no_grad():
        loss = float(squared_error(network(problem.inputs), problem.targets))
    totals, ends = running.totals, running.interfaces
    states = [interface.states.tensor() for interface in ends]
    multipliers = [interface.multipliers.tensor() if interface.multipliers else None for interface in ends]
    return Trained(network, loss, totals.means(totals.violation), states, multipliers)


REACHING = {  # method, learning rate, steps
    "augmented Lagrangian, beta 1": (AugmentedLagrangian(beta=1.0), 0.01, 300),
    "augmented Lagrangian, beta 3": (AugmentedLagrangian(), 0.02, 200),
    "augmented Lagrangian, beta 10": (AugmentedLagrangian(beta=10.0), 0.006, 400),
    "penalty, red-black": (Penalty(), 0.02, 250),
    "penalty, red-black, beta 0.01": (Penalty(beta=0.01), 0.01, 300),
    "penalty, joint": (Penalty(beta=10.0, order="joint", state_step=0.4, trust=100.0), 0.01, 400),
}


@pytest.mark.parametrize("case", REACHING)
def test_every_method_reaches_a_minimum_without_a_residual(case: str, tmp_path: Path) -> None:
    """The adjoints vanish there, and with them all violations, though late where b is small: they are p/(2b)."""
    problem, (method, lr, steps) = Regression.make(noise=0.0), REACHING[case]
    start = float(squared_error(problem.inputs, problem.targets))
    reached = train(problem, method, 3, tmp_path, lr=lr, steps=steps)
    assert reached.loss < 1e-4 * start
    if method.beta >= 1:
        assert max(reached.violation) < 2e-3


@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("case", [case for case in REACHING if "joint" not in case])
def test_the_augmented_lagrangian_and_red_black_reach_the_least_squares_solution(
    case: str, stages: int, tmp_path: Path
) -> None:
    problem, (method, lr, steps) = Regression.make(noise=0.5), REACHING[case]
    reached = train(problem, method, stages, tmp_path, lr=lr, steps=steps)
    assert problem.least > 0.1
    assert reached.loss == pytest.approx(problem.least, rel=1e-3)
    product = reached.network(torch.eye(4)).detach().double()
    assert relative(product, problem.best) < 0.03
    if isinstance(method, AugmentedLagrangian):
        assert max(reached.violation) < 1e-3
    else:
        assert min(reached.violation) > 0.1


def test_the_joint_penalty_comes_the_nearer_to_the_minimum_the_larger_beta_is(tmp_path: Path) -> None:
    problem = Regression.make(noise=0.5)
    cases = [(10.0, 0.01, 300), (100.0, 0.002, 600)]
    reached = [
        train(problem, Penalty(beta, order="joint", state_step=0.4), 3, tmp_path, lr=lr, steps=steps)
        for beta, lr, steps in cases
    ]
    assert problem.least < reached[1].loss < reached[0].loss < 1.05 * problem.least
    for k in range(2):  # the violation does not vanish; it goes with 1/β
        assert 4 < reached[0].violation[k] / reached[1].violation[k] < 12


# With the last stage frozen, f(λ) = λ Cᵀ, all of the answer is known: with R the residual of the regression and x the
# output of the first stage there, p = 2 R C at λ = x, and the penalty's states solve (λ − x)(b + CᵀC) = −R C.

FROZEN = 3


@dataclass
class Answer:
    C: Tensor
    R: Tensor
    x: Tensor


def answer(problem: Regression, network: nn.Sequential) -> Answer:
    with torch.no_grad():
        C = network[len(network) - FROZEN :](torch.eye(4)).T.double()
    R = problem.inputs.double() @ problem.best - problem.targets
    return Answer(C, R, problem.inputs.double() @ problem.best @ torch.linalg.inv(C).T)


def norm_ratio(a: Tensor, b: Tensor) -> float:
    return float(a.norm() / b.norm())


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_the_augmented_lagrangian_finds_the_known_states_and_multipliers_at_any_fixed_beta(
    beta: float, tmp_path: Path
) -> None:
    problem, method = Regression.make(noise=0.5), AugmentedLagrangian(beta=beta, form="sum")
    reached = train(problem, method, 2, tmp_path, lr=0.1 / (beta + 4), steps=400, frozen=FROZEN)
    known = answer(problem, reached.network)
    assert reached.loss == pytest.approx(problem.least, rel=1e-4)
    assert reached.violation[0] < 1e-4
    assert relative(reached.states[0].double(), known.x) < 5e-3
    assert relative(reached.multipliers[0].double(), 2 * known.R @ known.C) < 5e-3


@pytest.mark.parametrize("beta", [1.0, 5.0])
def test_the_joint_penalty_finds_the_known_displacement(beta: float, tmp_path: Path) -> None:
    problem, method = Regression.make(noise=0.5), Penalty(beta, order="joint", form="sum", state_step=0.5, trust=100.0)
    reached = train(problem, method, 2, tmp_path, lr=0.1 / (beta + 4), steps=500, frozen=FROZEN)
    known = answer(problem, reached.network)
    displaced = -known.R @ known.C @ torch.linalg.inv(beta * torch.eye(4) + known.C.T @ known.C)
    assert reached.loss == pytest.approx(problem.least, rel=1e-3)
    assert relative(reached.states[0].double(), known.x + displaced) < 1e-2
    assert reached.violation[0] == pytest.approx(norm_ratio(displaced, known.x), rel=1e-2)
    # appendix B: −p/(2b), with the adjoint at the displaced state
    p = 2 * ((known.x + displaced) @ known.C.T - problem.targets) @ known.C
    assert reached.violation[0] == pytest.approx(norm_ratio(p / (2 * beta), known.x), rel=1e-2)


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_red_black_has_the_minimum_and_a_violation_of_the_undisplaced_adjoint(beta: float, tmp_path: Path) -> None:
    problem, method = Regression.make(noise=0.5), Penalty(beta, form="sum")
    reached = train(problem, method, 2, tmp_path, lr=0.1 / (beta + 4), steps=400, frozen=FROZEN)
    known = answer(problem, reached.network)
    assert reached.loss == pytest.approx(problem.least, rel=1e-4)
    assert reached.violation[0] == pytest.approx(norm_ratio(known.R @ known.C / beta, known.x), rel=1e-3)


# States alone: λ_k ← (1 − α) λ_k + α (x_{k-1} − p_k/(2b)). Between stages that are near the identity p_k/(2b) is
# λ_k − λ_{k+1}, so that a full step at all interfaces at once overshoots, at any β: with two of them by the golden
# ratio, with many by 3. Half steps and less converge. Neither red-black nor κ = p has this feedback.


@pytest.mark.parametrize(
    ("state_step", "factor"), [(1.0, GOLDEN), (0.5, 1 + 0.5 * (1 / GOLDEN - 1)), (0.4, 1 + 0.4 * (1 / GOLDEN - 1))]
)
def test_from_three_stages_on_the_joint_penalty_needs_state_steps_below_a_half(
    state_step: float, factor: float, tmp_path: Path
) -> None:
    problem, beta = Regression.make(noise=0.0), 1e4
    network = problem.network()
    for weight in network.parameters():
        nn.init.zeros_(weight)
    method = Penalty(beta, order="joint", form="sum", state_step=state_step, trust=1e30)
    cut, data = parlay.partition(network, 3, problem.inputs), (problem.inputs, problem.inputs)
    running = problems.engine(cut, data, method, folder=tmp_path, loss=squared_error)
    step = batch(len(problem.inputs), beta=beta)
    running.refresh([step], never)
    start = 0.1 * torch.randn(problem.inputs.shape, generator=torch.Generator().manual_seed(0))
    running.interfaces[0].states.load(problem.inputs + start)
    distances = []
    for _ in range(16):
        running.parallel_step(step)
        distances.append(float((running.interfaces[0].states.tensor() - problem.inputs).norm()))
    assert distances[-1] / distances[-2] == pytest.approx(factor, rel=0.02)
