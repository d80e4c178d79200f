"""What the side networks of both methods share: their optimiser, and how fast a running mean follows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from parlay.stage.optimiser import MakeOptimizer

FOLLOW = 0.1


def adam(lr: float) -> MakeOptimizer:
    """Their problem is not that of the stages."""

    def make(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kept = list(weights)
        on_gpu = kept[0].is_cuda
        return torch.optim.Adam(kept, lr=lr, capturable=on_gpu, fused=on_gpu or None)

    return make
