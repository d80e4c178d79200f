"""Linear residual networks, whose minimum is that of linear regression: every method reaches it, the augmented
Lagrangian without a violation, the penalty method with the one of appendix B, λ − x = −p/(2b)."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch

import parlay
import problems
from parlay import AugmentedLagrangian, Delayed, Method, Penalty, Replay
from parlay.engine.engine import Engine
from parlay.engine.losses import Totals
from problems import Regression, batch, never, relative, squared_error

FROZEN = 3


def train(
    problem: Regression, method: Method, stages: int, folder: Path, *, lr: float, steps: int, frozen: int = 0
) -> tuple[Engine, float]:
    """Full batches and a constant rate; the last `frozen` blocks of six keep their weights. Gives the loss, too."""
    network = problem.network()
    network[len(network) - frozen :].requires_grad_(False)
    cut = parlay.partition(network, stages, problem.inputs)
    sgd = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=lr)}
    running = problems.engine(cut, problem.data, method, folder=folder, loss=squared_error, **sgd)
    beta = method.weight(0, 1) or 0.0
    whole = [batch(len(problem.inputs), epoch=epoch, beta=beta) for epoch in range(steps)]
    running.refresh(whole[:1], never)
    for step in whole:
        running.totals = Totals()
        running.parallel_step(step)
    with torch.no_grad():
        return running, float(squared_error(network(problem.inputs), problem.targets))


REACHING: dict[str, tuple[Method, float, int]] = {  # learning rate, steps
    "augmented Lagrangian, beta 1": (AugmentedLagrangian(beta=1.0), 0.01, 300),
    "augmented Lagrangian, beta 10": (AugmentedLagrangian(beta=10.0), 0.006, 400),
    "penalty": (Penalty(), 0.02, 250),
    "penalty, beta 0.01": (Penalty(beta=0.01), 0.01, 300),
    "replay": (Replay(), 0.01, 300),
    "delayed": (Delayed(), 0.01, 300),
}


@pytest.mark.parametrize(("case", "stages"), list(zip(REACHING, cycle([5, 2, 2, 5]), strict=False)))
def test_every_method_reaches_the_least_squares_solution(case: str, stages: int, tmp_path: Path) -> None:
    problem, (method, lr, steps) = Regression.make(noise=0.5), REACHING[case]
    running, loss = train(problem, method, stages, tmp_path, lr=lr, steps=steps)
    assert problem.least > 0.1
    assert loss == pytest.approx(problem.least, rel=1e-3)
    assert relative(running.model(torch.eye(4)).detach().double(), problem.best) < 0.03


@pytest.mark.parametrize("beta", [0.3, 3.0])
@pytest.mark.parametrize("kind", [AugmentedLagrangian, Penalty])
def test_states_multipliers_and_violations_are_the_known_ones(
    kind: type[AugmentedLagrangian | Penalty], beta: float, tmp_path: Path
) -> None:
    """With the last stage frozen, f(λ) = λ Cᵀ, all of the answer is known: with R the residual of the regression and
    x the output of the first stage there, p = 2 R C at λ = x."""
    problem = Regression.make(noise=0.5)
    running, loss = train(problem, kind(beta=beta), 2, tmp_path, lr=0.1 / (beta + 4), steps=400, frozen=FROZEN)
    with torch.no_grad():
        C = running.model[FROZEN:](torch.eye(4)).T.double()
    p = 2 * (problem.inputs.double() @ problem.best - problem.targets) @ C
    x = problem.inputs.double() @ problem.best @ torch.linalg.inv(C).T
    (link,), (violation,) = running.own.links, running.totals.violations()
    assert loss == pytest.approx(problem.least, rel=1e-4)
    if kind is AugmentedLagrangian:
        assert violation < 1e-4
        assert relative(link.states.tensor().double(), x) < 5e-3
        assert relative(link.multipliers.tensor().double(), p) < 5e-3
    else:
        b = beta / (4 * float(link.s2))
        assert violation == pytest.approx(float((p / (2 * b)).norm() / x.norm()), rel=1e-2)
