"""Judging the whole network: losses and accuracy, and batch statistics that belong to it.

In a parallel phase each stage normalises over its states. Before an evaluation the statistics are estimated anew
through the whole network (up to 13 points apart, measured), and afterwards the old ones are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parlay.stage.precision import in_full

Forward = Callable[[Tensor], Tensor]
Loss = Callable[..., Tensor]


@torch.no_grad()
def evaluate(forward: Forward, loss: Loss, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Mean loss over the samples and, where the targets are classes, accuracy in percent."""
    total, correct, samples, classes = [], [], 0, True
    for inputs, targets in batches:
        output = in_full(forward(inputs))
        total.append(loss(output, targets).float() * len(inputs))
        samples += len(inputs)
        classes = classes and _are_classes(output, targets)
        if classes:
            correct.append((output.argmax(1) == targets).float().mean() * len(inputs))
    result = {"loss": float(torch.stack(total).sum() / samples)}
    if classes:
        result["accuracy"] = 100 * float(torch.stack(correct).sum() / samples)
    return result


def _are_classes(output: object, targets: Tensor) -> bool:
    return isinstance(output, Tensor) and not targets.is_floating_point() and output.dim() == targets.dim() + 1


@contextmanager
def unchanged_buffers(*models: nn.Module) -> Iterator[None]:
    """Whatever passes through the models inside leaves their buffers (batch statistics) as they were."""
    saved = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)


@torch.no_grad()
def estimate_statistics(model: nn.Module, forward: Forward, batches: Iterable[Tensor]) -> None:
    """Batch statistics of the whole network: the plain mean over the given batches."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    model.train()
    for count, inputs in enumerate(batches, 1):
        for norm in norms:
            norm.momentum = 1 / count  # what None stands for; but with None every layer asks the GPU for the count
        forward(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
