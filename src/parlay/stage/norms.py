"""Batch norm over the replicas of a stage: each normalises its share by the statistics of the whole batch.

torch's own SyncBatchNorm is for GPUs alone and wants other modules in the network. Here the network stays as it is; its
batch norms are lent another forward while they train, and have their own again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Replicas:
    """Those of a stage: which one this is, how many there are, and the sums over all of them."""

    own: int
    count: int
    summed: Callable[[Tensor], Tensor]


@final
class JointNorms:
    """The batch norms of a stage, joined with those of its replicas as long as `on`."""

    def __init__(self, module: nn.Module, replicas: Replicas) -> None:
        self.on = True
        self._replicas = replicas
        self._norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
        for norm in self._norms:
            norm.forward = partial(self._forward, norm)  # type: ignore[method-assign]

    def close(self) -> None:
        for norm in self._norms:
            del norm.forward

    def _forward(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        if not (self.on and norm.training):
            return type(norm).forward(norm, x)
        mean, variance, count = _statistics(x, self._replicas)
        if count < 2:
            raise ValueError("Expected more than 1 value per channel when training, got one in all replicas")
        _follow(norm, mean, variance * (count / (count - 1)))
        normalised: Tensor = _Normalise.apply(x, mean, variance, norm.eps, count, self._replicas)  # type: ignore[no-untyped-call]
        if norm.weight is None:
            return normalised
        return normalised * _along(norm.weight, x) + _along(norm.bias, x)


@torch.no_grad()
def _statistics(x: Tensor, replicas: Replicas) -> tuple[Tensor, Tensor, float]:
    """Mean and variance of each channel over all replicas. From the shares' own, so that nothing cancels."""
    x = x.detach().float()
    count = x.numel() // x.shape[1]
    mean = x.mean(_others(x)) if count else x.new_zeros(x.shape[1])
    squares = (x - _along(mean, x)).square().sum(_others(x))
    mine = torch.cat([mean, squares, mean.new_tensor([float(count)])])
    shares = mine.new_zeros(replicas.count, len(mine))
    shares[replicas.own] = mine
    means, squares, counts = torch.split(replicas.summed(shares), [len(mean), len(mean), 1], 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (squares.sum(0) + ((means - mean).square() * counts).sum(0)) / total
    return mean, variance, float(total)


@torch.no_grad()
def _follow(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """The running statistics, as batch norm itself moves them."""
    if not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """(x − mean) / √(variance + ε), with the gradient that goes through the statistics of all replicas."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, eps: float, count: float, replicas: Replicas
    ) -> Tensor:
        inverse = (variance + eps).rsqrt()
        normalised = (x.float() - _along(mean, x)) * _along(inverse, x)
        ctx.save_for_backward(normalised, inverse)
        ctx.count, ctx.replicas = count, replicas
        return normalised.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        normalised, inverse = ctx.saved_tensors
        g = gradient.float()
        sums = torch.stack([g.sum(_others(g)), (g * normalised).sum(_others(g))])
        plain, along = ctx.replicas.summed(sums) / ctx.count
        back = (g - _along(plain, g) - normalised * _along(along, g)) * _along(inverse, g)
        return back.to(gradient.dtype), None, None, None, None, None


def _others(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, x.dim())]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """A value per channel, shaped to meet x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
