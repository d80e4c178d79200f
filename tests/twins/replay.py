"""Features replay (Huo et al. 2018): when the adjoint of a batch has come, its kept input is replayed.

τ         a step: stage k passes batch τ − k on, and replays batch τ − k − L with L = 2 (K − 1 − k)
λ[k, t]   what stage k has received of batch t: DS of the output of stage k-1
p[k, t]   the adjoint of λ[k, t] per sample
"""

import torch

from twins.problem import Problem


def train(problem: Problem, β: float = 8.0, predict: float = 0.0, M: int = 1, bound: float = 0.1) -> None:
    K, DS, US = problem.K, problem.DS, problem.US
    for epochs in problem.parallel_phases():
        batch = [step for epoch in epochs for step in problem.steps(epoch)]
        T = len(batch)
        λ = {(0, t): problem.images(batch[t], augmented=True) for t in range(T)}
        p, full = {}, {0: None}

        for τ in range(T + 2 * (K - 1)):
            rate = batch[min(τ, T - 1)].rate  # of the batch that enters now, or was the last to do so
            for k in range(K):
                L = 2 * (K - 1 - k)

                # forward, for the next stage alone: with weights predicted for the time of the answer
                t = τ - k
                if k < K - 1 and 0 <= t < T:
                    with torch.no_grad():
                        W = problem.ahead(k, predict * L, rate) if predict else None
                        X = problem.forward(k, US(λ[k, t], full[k]), batch[t], W)
                    full[k + 1], λ[k + 1, t] = X.shape, DS(X)

                # the answer: the gradient of ⟨p, x⟩ + b ‖x − x_then‖² at the weights of now
                t = τ - k - L
                if 0 <= t < T:
                    λ_t = λ[k, t].clone().requires_grad_(k > 0)
                    X, n = problem.forward(k, US(λ_t, full[k]), batch[t]), len(λ_t)
                    if k == K - 1:
                        problem.φ(X, batch[t].ids).backward()
                    else:
                        x, x_then = DS(X), λ[k + 1, t]
                        moved = x.detach() - x_then
                        b = β * (2 / L) ** (5 / 3) / (x[0].numel() * x_then.square().mean())
                        b = torch.minimum(b, bound * p[k + 1, t].norm() / (2 * moved.norm()).clamp_min(1e-12))
                        x.backward((p[k + 1, t] + 2 * b * moved) / n)
                    if k > 0:
                        p[k, t] = n * λ_t.grad
                    problem.update(k, rate, M)
        for k in range(K):
            problem.apply(k, rate)
