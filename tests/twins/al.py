"""Augmented Lagrangian (section 2.2.2, appendix B), with downsampled states (section 3.1).

λ[k], κ[k]   state and multiplier of every sample at the cut before stage k, k = 1..K-1
s2[k]        s² of what crosses there; b = β / (D s²) is the coefficient of ‖λ − x‖²
x[k], p[k]   in a step: DS of stage k's output, and the adjoint of λ[k] per sample
"""

import torch
from torch import Tensor

from twins.problem import Problem, follow, nhwc


def train(problem: Problem, β: float = 3.0, reach: float = 0.25, detail: float = 0.0) -> None:
    K, DS, US = problem.K, problem.DS, problem.US
    for epochs in problem.parallel_phases():
        λ, s2, full = problem.initial_guess(epochs[0])
        κ = {k: torch.zeros_like(λ[k]) for k in λ}
        for step in (step for epoch in epochs for step in problem.steps(epoch)):
            ids, n = step.ids, len(step.ids)
            x, p = {}, {}

            # 1. every stage on its own problem: eqs. (16) and (17)
            for k in range(K):
                if k == 0:
                    X = problem.forward(0, problem.images(step, augmented=False), step)
                else:
                    λ_k = nhwc(λ[k][ids]).requires_grad_()
                    X = problem.forward(k, US(λ_k, full[k]), step)
                if k == K - 1:
                    loss = problem.φ(X, ids)
                else:
                    x[k], λ_next, κ_next = DS(X), nhwc(λ[k + 1][ids]), nhwc(κ[k + 1][ids])
                    b = torch.tensor(β) / (x[k][0].numel() * s2[k + 1])
                    loss = b * (x[k] - λ_next).square().sum() / n
                    loss = loss + (near(x[k], λ_next, reach) * per_sample(κ_next * x[k])).sum() / n
                    if detail > 0:  # what DS leaves out; the same b per element
                        b = b * (x[k][0].numel() / X[0].numel())
                        loss = loss + detail * (b * (X - US(x[k], full[k + 1])).square().sum() / n)
                loss.backward()
                if k > 0:
                    p[k] = n * λ_k.grad
            for k in range(K):
                problem.update(k, step.rate)

            # 2. every interface: eq. (20) with 2b for η/(2β), then the minimiser of (18): κ = p and λ = x
            for k in range(1, K):
                s2[k] = follow(s2[k], x[k - 1].detach())
                κ[k][ids] = p[k]
                λ[k][ids] = x[k - 1].detach()


@torch.no_grad()
def near(x: Tensor, λ: Tensor, reach: float) -> Tensor:
    """How much a multiplier counts: 1 while ‖λ − x‖ ≤ reach ‖λ‖, and less with the square of the distance beyond."""
    moved, size = (t.flatten(1).norm(dim=1) for t in (x - λ, λ))
    return (reach * size / moved).nan_to_num(nan=1.0).clamp_max(1.0).square()


def per_sample(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)
