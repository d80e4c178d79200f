"""Features replay (Huo et al. 2018, arXiv 1807.04511): the adjoint of a batch is applied by replaying its kept input.

Stage k passes a batch on and its input stays in the link. The adjoint comes back 2(K-1-k) steps later; then the input
goes through the stage once more, at the weights of now, and the adjoint through that pass backwards. Nothing is kept
but inputs. It costs a second forward pass. With weights that stand still, every gradient is that of backpropagation.

Where it meets the stored methods: ⟨p, x⟩, which a replayed stage minimises, has the gradient of b ‖λ − x‖² with
λ = x − p/(2b) at the x of that moment. So this is a penalty method whose states live 2(K-1-k) steps, not an epoch, and
b drops out. With `beta` the pull towards the x of the first pass comes back, b ‖x − x_then‖² + ⟨p, x⟩: the augmented
Lagrangian with λ = x_then and κ = p, again with states that live so long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from parlay.batch import Pass
from parlay.config.keys import option
from parlay.link.link import LinkEnd
from parlay.link.queue import QueueLink, Slots
from parlay.methods.streamed import TINY, Ahead, AheadWorker
from parlay.stage.worker import Place, Worker, copied

BOUND = 0.1
"""Of the pull, relative to p. Usually it is less; it is more where outputs swing. The bound helps a stage to recover
from that, and does not make sure of it (results/streaming, "Rules for the pull")."""


@dataclass(frozen=True)
class Replay(Ahead):
    """Kept inputs, replayed when the adjoint has come."""

    beta: float = option(8.0, "weight of the penalty, or of the pull of replay", form="B", least=0, most=1e12)
    """Of the pull towards the output of the first pass at a lag of two steps, relative to the features; 0: none."""

    def pull(self, lag: int) -> float:
        """Weight of the pull over so many steps.

        It answers to what the updates of the delay have done, so it is a feedback: with a common movement v of the
        outputs, v ← m v − G (v + ... + v of lag − 1 steps ago), which swings without end where G is too large. For
        m = 0.9 the largest G falls as lag^(-5/3), and the weight with it.
        """
        return self.beta * (2 / lag) ** (5 / 3) if lag else 0.0

    def link(self, end: LinkEnd) -> QueueLink:
        return QueueLink(end, self.lag(end.k - 1, end.stages), pulled=self.beta > 0)

    def worker(self, place: Place) -> Worker:
        return ReplayWorker(place, self) if self.lag(place.k, place.stages) else AheadWorker(place, self)

    def work(self, k: int, stages: int) -> float:
        """A forward pass is about a third of both."""
        return 4 / 3 if self.lag(k, stages) else 1.0

    def queued(self, k: int, stages: int) -> tuple[int, int]:
        lag = self.lag(k, stages)
        return (lag + 1 if lag else 0), (lag + 1 if lag and self.beta else 0)


@final
class ReplayWorker(AheadWorker):
    def __init__(self, place: Place, method: Replay) -> None:
        super().__init__(place, method)
        self.beta = method.pull(self.lag)
        self._inputs = Slots(self.lag + 1, place.rows, place.fixed)
        """Of the first stage, which has no link to keep them."""
        self.slot_counts = (self._inputs.count,)

    @torch.no_grad()
    def forward(self, p: Pass) -> None:
        """Only for the stage after: batch statistics are counted once, in the second pass."""
        _, x = self.input(p)
        if self.before is None:
            self._inputs.put(p, x)
        untouched = copied(self.stage.module.named_buffers())
        x = self.run(x, p, untouched | self.predicted())
        assert self.after is not None
        self.after.put_output(p, x)

    def loss(self, p: Pass) -> Tensor:
        """⟨p, x⟩ of the second pass, with the pull."""
        self._state, x = (None, self._inputs.take(p)) if self.before is None else self.input(p)
        assert isinstance(self.after, QueueLink)
        self._x = self.after.down(self.run(x, p, again=True))
        x, self._p = self._x.detach(), self.adjoint(p)
        loss = (self._p * x).sum() / p.rows
        if self.beta:
            then = self.after.outputs.take(p).float()
            moved = x.float() - then
            b = self.stiffness(then, moved, self._p)
            loss = loss + b * moved.square().sum() / p.rows
            self._p = self._p + 2 * b * moved
        return loss

    def backward(self, p: Pass) -> None:
        self.back(self._x, self._p, p.rows)
        self.answer(p)

    def stiffness(self, then: Tensor, moved: Tensor, p: Tensor) -> Tensor:
        """b of the pull, which is never larger than `BOUND` times p."""
        b = self.beta / (then[0].numel() * then.square().mean().clamp_min(TINY))
        return torch.minimum(b, BOUND * p.norm() / (2 * moved.norm()).clamp_min(TINY))

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self._inputs.tensors("inputs")

    def load(self, kept: Mapping[str, Tensor]) -> None:
        super().load(kept)
        self._inputs.load("inputs", kept, self.stage.device)

    @property
    def bytes(self) -> int:
        return super().bytes + self._inputs.bytes
