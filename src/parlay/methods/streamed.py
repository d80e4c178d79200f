"""Methods whose states live a few steps: a batch streams through the stages, and its adjoint streams back.

    step t, stage k     forward of batch t - k                   DS(x) has come from stage k-1 a step ago
                        backward of batch t - k - 2(K-1-k)       p has come from stage k+1 a step ago

In a step every stage works on a batch of its own, and no stage waits for another. What a stage trains on is 2(K-1-k)
steps old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parlay.batch import Pass
from parlay.config.keys import option
from parlay.errors import InputError
from parlay.link.link import LinkEnd
from parlay.link.queue import QueueLink
from parlay.methods import a_stage_a_step, there_and_back
from parlay.methods.method import Method
from parlay.stage.worker import Place, Worker

TINY = 1e-12


@dataclass(frozen=True)
class Streamed(Method):
    fresh_inputs: ClassVar[bool] = True
    takes_replicas: ClassVar[bool] = False

    def entry(self, k: int, stages: int) -> int:
        return a_stage_a_step(k, stages)

    def lag(self, k: int, stages: int) -> int:
        return there_and_back(k, stages)

    def delay(self, stages: int) -> int:
        return max(self.lag(k, stages) for k in range(stages))

    def link(self, end: LinkEnd) -> QueueLink:
        return QueueLink(end, self.lag(end.k - 1, end.stages))


@dataclass(frozen=True)
class Ahead(Streamed):
    """A streamed method that can look ahead to where the weights will be when the adjoint comes."""

    predict: float = option(
        0.0, "share of its delay by which a forward pass looks ahead along the momentum", form="F", least=0, most=1000
    )
    """Along the momentum of SGD (Chen et al., SpecTrain)."""
    accumulate: int = option(1, "batches whose gradients make one update", form="N", least=1, most=1_000_000)
    """At as many times the learning rate (ADL; PETRA). In updates, the delay is that much shorter."""

    @property
    def can_be_captured(self) -> bool:
        return self.accumulate == 1


class AheadWorker(Worker):
    """Trains on the gradient of ⟨p, x⟩, where p was taken some steps ago."""

    def __init__(self, place: Place, method: Ahead) -> None:
        super().__init__(place)
        self.accumulate = method.accumulate
        self.lag = method.lag(place.k, place.stages)
        self._steps = method.predict * self.lag
        if self._steps > 0 and not place.stage.optimiser.has_momentum:
            raise InputError(
                "predict looks ahead along the momentum of SGD, and this optimiser has none: "
                "write predict 0, or take SGD with momentum"
            )

    def predicted(self) -> dict[str, Tensor]:
        """w − predict · lag · lr · momentum: where the weights will be, about, when the adjoint comes."""
        return self.stage.optimiser.ahead(self._steps) if self._steps > 0 else {}

    def adjoint(self, p: Pass) -> Tensor:
        assert isinstance(self.after, QueueLink)
        return self.after.adjoint(p)

    def back(self, x: Tensor, p: Tensor, rows: int) -> None:
        """The gradient of ⟨p, x⟩, as a mean over the samples."""
        if x.requires_grad:  # a first stage may have nothing to train
            torch.autograd.backward(x, (p / rows).to(x.dtype))
