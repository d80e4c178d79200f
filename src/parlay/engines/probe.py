"""How far a parallel step points from where backpropagation would go: cosines between their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]
"""Of a stage's weights, by their names."""


def cosines(own: Sequence[Gradients], true: Sequence[Gradients]) -> list[float]:
    """Between the gradients that the stages follow and the true ones: of all weights together, then of each stage's.

    A stage without any signal has a cosine of 0: it goes nowhere, which is not the right way.
    """
    sums = torch.tensor([_products(ours, theirs) for ours, theirs in zip(own, true, strict=True)], dtype=torch.float64)
    rows = torch.cat([sums.sum(0, keepdim=True), sums])
    return [_cosine(*row) for row in rows.tolist()]


def _products(ours: Gradients, theirs: Gradients) -> tuple[float, float, float]:
    """⟨a, b⟩, ⟨a, a⟩ and ⟨b, b⟩; a weight that only one of them moves counts in its own square alone."""
    both = sum(float((ours[name].double() * theirs[name].double()).sum()) for name in ours.keys() & theirs.keys())
    return both, _square(ours), _square(theirs)


def _square(gradients: Gradients) -> float:
    return sum(float(value.double().square().sum()) for value in gradients.values())


def _cosine(product: float, a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else float(product / (a * b) ** 0.5)
