"""Decoupled delayed gradients (Huo et al. 2018, arXiv 1804.10574): backwards through the forward pass of then.

τ          a step: stage k passes batch τ − k on, and answers batch τ − k − L with L = 2 (K − 1 − k)
λ[k, t]    what stage k has received of batch t: DS of the output of stage k-1
W[k, t]    the weights that the batch met there, predicted ahead where asked for
x[k, t]    DS of the output, with the graph of its making
p[k, t]    the adjoint of λ[k, t] per sample
"""

from twins.problem import Problem


def train(problem: Problem, predict: float = 0.0, M: int = 1) -> None:
    K, DS, US = problem.K, problem.DS, problem.US
    for epochs in problem.parallel_phases():
        batch = [step for epoch in epochs for step in problem.steps(epoch)]
        T = len(batch)
        λ = {(0, t): problem.images(batch[t], augmented=True) for t in range(T)}
        W, x, p, full = {}, {}, {}, {0: None}

        for τ in range(T + 2 * (K - 1)):
            rate = batch[min(τ, T - 1)].rate  # of the batch that enters now, or was the last to do so
            for k in range(K):
                L = 2 * (K - 1 - k)

                # forward, once
                t = τ - k
                if 0 <= t < T:
                    now = {**dict(problem.f[k].state_dict()), **problem.ahead(k, predict * L, rate)}
                    trained = dict(problem.f[k].named_parameters())
                    W[k, t] = {n: w.detach().clone().requires_grad_(n in trained) for n, w in now.items()}
                    λ[k, t] = λ[k, t].requires_grad_(k > 0)
                    X = problem.forward(k, US(λ[k, t], full[k]), batch[t], W[k, t])
                    if k == K - 1:
                        x[k, t] = problem.φ(X, batch[t].ids)
                    else:
                        x[k, t] = DS(X)
                        full[k + 1], λ[k + 1, t] = X.shape, x[k, t].detach()

                # the answer: the gradient of ⟨p, x⟩ at the weights of then, for the weights of now
                t = τ - k - L
                if 0 <= t < T:
                    n = len(λ[k, t])
                    x[k, t].backward(None if k == K - 1 else p[k + 1, t] / n)
                    for name, w in problem.f[k].named_parameters():
                        w.grad = W[k, t][name].grad if w.grad is None else w.grad + W[k, t][name].grad
                    if k > 0:
                        p[k, t] = n * λ[k, t].grad
                    problem.update(k, rate, M)
        for k in range(K):
            problem.apply(k, rate)
