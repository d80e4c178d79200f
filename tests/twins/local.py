"""Decoupled greedy learning (Belilovsky et al. 2020): stage k minimises the loss of a classifier of its own.

x[k, t]   what stage k has received of batch t, a step after stage k-1 has put it out
"""

import torch
from torch import nn

from parlay.data.batches import mixed_seed
from twins.problem import Problem

Shapes = tuple[tuple[int, ...], ...]


def train(problem: Problem, shapes: Shapes, classes: int) -> None:
    K, DS, US = problem.K, problem.DS, problem.US
    heads = [head(shape, classes, mixed_seed("beside", problem.seed, k)) for k, shape in enumerate(shapes)]
    sgd = [problem.optimizer(h) for h in heads]
    for epochs in problem.parallel_phases():
        batch = [step for epoch in epochs for step in problem.steps(epoch)]
        T = len(batch)
        x, full = {(0, t): problem.images(batch[t], augmented=True) for t in range(T)}, {0: None}
        for τ in range(T + K - 1):
            rate = batch[min(τ, T - 1)].rate
            for k in range(K):
                t = τ - k
                if 0 <= t < T:
                    X = problem.forward(k, US(x[k, t], full[k]), batch[t])
                    problem.φ(X if k == K - 1 else heads[k](X), batch[t].ids).backward()
                    problem.update(k, rate)
                    if k < K - 1:
                        full[k + 1], x[k + 1, t] = X.shape, DS(X.detach())
                        sgd[k].param_groups[0]["lr"] = problem.lr * rate
                        sgd[k].step()
                        sgd[k].zero_grad()


def head(shape: tuple[int, ...], classes: int, seed: int) -> nn.Sequential:
    """From feature maps of this shape to scores, by way of at most 4 × 4 and 2 × 2 pixels."""
    torch.manual_seed(seed)
    channels, height, width = shape
    fine, coarse = ([min(most, side) for side in (height, width)] for most in (4, 2))
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(fine),
        nn.GroupNorm(1, channels),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(coarse),
        nn.Flatten(),
        nn.Linear(channels * coarse[0] * coarse[1], classes),
    ).to(memory_format=torch.channels_last)
