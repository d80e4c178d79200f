"""How far a parallel step points from where backpropagation would go: cosines between their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parlay.batch import Batch, Pass
from parlay.engine.evaluate import unchanged_buffers
from parlay.engine.own import Own
from parlay.stage.precision import in_full

Gradients = Mapping[str, Tensor]
"""Of a stage's weights, by their names."""


def probe(own: Own, batch: Batch) -> list[float] | None:
    """Cosines of all weights together, then of each stage's. Nothing is changed.

    None where the links hold no states, where a stage has no samples in this batch, and over several processes.
    """
    if own.world.size > 1 or not own.links or not all(link.starts and link.filled for link in own.links):
        return None
    passes = [Pass(batch, 0, *own.rows.of(batch.ids, batch.epoch, k)) for k in own.range]
    if not all(p.rows for p in passes):
        return None
    own.train_mode()
    for link in own.links:
        link.set_weight(batch.weight)
        link.gather(passes[link.k])
    with unchanged_buffers(own.model):
        for k, worker in own.workers.items():
            worker.seed(batch, None)
            worker.forward(passes[k])
            worker.loss(passes[k])
            worker.backward(passes[k])
            worker.trained = False
        ours = [stage.take_gradients() for stage in own.stages]
        kinds = {tuple(p.samples.tolist()): p for p in passes}  # stages of the same share compute the same samples
        true = {kind: _true_gradients(own, batch, p) for kind, p in kinds.items()}
    own.changed()
    return cosines(ours, [true[tuple(p.samples.tolist())][k] for k, p in enumerate(passes)])


def _true_gradients(own: Own, batch: Batch, p: Pass) -> list[Gradients]:
    """Of every stage, by backpropagation through the whole network. Random numbers are those of the parallel step."""
    x, targets = own.feed.batch(p.samples)
    for worker in own.workers.values():
        worker.seed(batch, None)
        with worker.sources[0]:
            x = worker.stage.forward(x)
    own.loss(in_full(x), targets).backward()  # type: ignore[no-untyped-call]
    return [stage.take_gradients() for stage in own.stages]


def cosines(ours: Sequence[Gradients], true: Sequence[Gradients]) -> list[float]:
    """Between the gradients that the stages follow and the true ones: of all weights together, then of each stage's.

    A stage without any signal has a cosine of 0: it goes nowhere, which is not the right way.
    """
    sums = torch.tensor([_products(own, theirs) for own, theirs in zip(ours, true, strict=True)], dtype=torch.float64)
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
