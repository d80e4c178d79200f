"""Quadratic penalty (section 2.2.2, appendix B.1) in the red-black order: neighbours take turns with their samples.

λ[k]         state of every sample at the cut before stage k: an output, or one displaced by −p / (2b)
s2[k]        s² of what crosses there; b = β / (D s²) is the coefficient of ‖λ − x‖²
turn[k]      in a step: the samples of stage k; stages k-1 and k+1 have the others
x[k], p[k]   in a step: DS of stage k's output, and the adjoint of λ[k] per sample
"""

import torch

from parlay.data.batches import half
from twins.problem import Problem, follow, nhwc


def train(problem: Problem, β: float = 3.0) -> None:
    K, DS, US = problem.K, problem.DS, problem.US
    for epochs in problem.parallel_phases():
        λ, s2, full = problem.initial_guess(epochs[0])
        for step in (step for epoch in epochs for step in problem.steps(epoch)):
            turn = [step.ids[(half(step.ids) + step.epoch + k) % 2 == 0] for k in range(K)]
            x, p = {}, {}

            # 1. every stage on its own problem: its states are outputs, its targets are displaced
            for k in range(K):
                n = len(turn[k])
                if n == 0:
                    continue
                if k == 0:
                    X = problem.forward(0, problem.images(step._replace(ids=turn[0]), augmented=False), step)
                else:
                    λ_k = nhwc(λ[k][turn[k]]).requires_grad_()
                    X = problem.forward(k, US(λ_k, full[k]), step)
                if k == K - 1:
                    loss = problem.φ(X, turn[k])
                else:
                    x[k] = DS(X)
                    loss = b(β, s2[k + 1], x[k]) * (x[k] - nhwc(λ[k + 1][turn[k]])).square().sum() / n
                loss.backward()
                if k > 0:
                    p[k] = n * λ_k.grad
            for k in range(K):
                problem.update(k, step.rate)

            # 2. every interface: a target becomes an output again; an input becomes a target, λ = x − p / (2b)
            for k in range(1, K):
                if k - 1 in x:
                    s2[k] = follow(s2[k], x[k - 1].detach())
                    λ[k][turn[k - 1]] = x[k - 1].detach()
                if k in p:
                    λ[k][turn[k]] -= p[k] / (2 * b(β, s2[k], p[k]))


def b(β, s2, x):
    """b = β / (D s²), D the number of elements of a sample."""
    return torch.tensor(β) / (x[0].numel() * s2)
