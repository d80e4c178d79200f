"""Features replay (Huo et al. 2018, arXiv 1807.04511): the answer to a batch is applied by replaying its kept input.

Stage k passes batch t on at step t + k and keeps its input. The adjoint comes back 2(K-1-k) steps later; then the kept
input goes through the stage once more, at the weights of now, and the adjoint through that pass backwards. Nothing is
kept but inputs, of 2(K-1-k) batches. It costs a second forward pass.

The adjoint p is exact for the stages behind, as they were when the batch passed them. With weights that stand still,
every gradient is that of backpropagation.

Where it meets the methods that keep states: ⟨p, x⟩, which a replayed stage minimises, has the gradient of b ‖λ − x‖²
with λ = x − p/(2b) at the x of that moment. So this is a penalty method whose states live 2(K-1-k) steps, not an epoch,
and b drops out. With `beta` the pull towards the x of the first pass comes back, b ‖x − x_then‖² + ⟨p, x⟩: that is the
augmented Lagrangian with λ = x_then and κ = p, again with states that live so long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from parlay.coupling.streaming import (
    TINY,
    Late,
    LateStation,
    Ring,
    Sent,
    Site,
    Station,
    Visit,
    answer,
    backward,
    copied,
)
from parlay.errors import InputError

BOUND = 0.1
"""Of the pull, relative to p. Usually it is less; it is more where outputs swing. The bound helps a stage to recover
from that, and does not make sure of it (results/streaming, "Rules for the pull")."""


@final
@dataclass(frozen=True)
class Replay(Late):
    """Kept inputs, replayed when the adjoint has come."""

    beta: float = 8.0
    """Weight of the pull towards the output of the first pass at a delay of two steps, relative to the features; 0:
    none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < float("inf"):
            raise InputError(f"beta is {self.beta}: write a number of at least 0")

    def pull(self, lag: int) -> float:
        """Of the pull over so many steps.

        It answers to what the updates of the delay have done, so it is a feedback: with a common movement v of the
        outputs, v ← m v − G (v + ... + v of lag − 1 steps ago), which swings without end where G is too large. For
        m = 0.9 the largest G falls as lag^(-5/3), and the weight with it.
        """
        return self.beta * (2 / lag) ** (5 / 3) if lag else 0.0

    def kept(self, k: int, stages: int) -> tuple[int, int]:
        lag = self.lag(k, stages)
        return (lag + 1 if lag else 0), (lag + 1 if lag and self.beta else 0)

    def work(self, k: int, stages: int) -> float:
        """A forward pass is about a third of both."""
        return 4 / 3 if self.lag(k, stages) else 1.0

    def station(self, site: Site) -> Station:
        return Replaying(site, self)


@final
class Replaying(LateStation):
    def __init__(self, site: Site, method: Replay) -> None:
        super().__init__(site, method)
        self.beta = method.pull(self.lag)
        kept = ("inputs", "outputs") if self.beta else ("inputs",)
        self.rings = {name: Ring(self.lag + 1, site.rows) for name in kept} if self.lag else {}

    def step(self, forth: Visit | None, features: Tensor | None, back: Visit | None, adjoint: Tensor | None) -> Sent:
        if self.lag == 0:
            return self.at_once(forth, features, self.method.shrink) if forth and features is not None else Sent()
        output = self._first(forth, features) if forth and features is not None else None
        if back is None or adjoint is None:
            return Sent(output)
        p, loss = self._again(back, adjoint)
        return Sent(output, p, loss, trained=True)

    @torch.no_grad()
    def _first(self, forth: Visit, features: Tensor) -> Tensor:
        """Only for the stage after: batch statistics are counted once, when the batch is replayed."""
        features = features.to(self.stage.device)
        self.rings["inputs"].put(forth, features)
        untouched = copied(self.stage.module.named_buffers())
        x = self.pass_through(self.up(features), forth.seed, untouched | self.predicted())
        output = self.down(x)
        if self.beta:
            self.rings["outputs"].put(forth, output)
        return output

    def _again(self, back: Visit, adjoint: Tensor) -> tuple[Tensor | None, Tensor]:
        """The gradient of ⟨p, x⟩, for the stage and for the one before it."""
        state = self.state(self.rings["inputs"].take(back))
        whole = self.pass_through(self.up(state), back.seed)
        x = self.down(whole)
        p = adjoint.to(x.device)
        loss = (p * x.detach()).sum() / back.rows
        if self.beta:
            then = self.rings["outputs"].take(back).float()
            moved = x.detach().float() - then
            b = self.stiffness(then, moved, p)
            loss = loss + b * moved.square().sum() / back.rows
            p = p + 2 * b * moved
        backward(x, p / back.rows, self.roughness(whole, x))
        return answer(state, back.rows, self.method.shrink), loss

    def stiffness(self, then: Tensor, moved: Tensor, p: Tensor) -> Tensor:
        """b of the pull, which is never larger than `BOUND` times p."""
        b = self.beta / (then[0].numel() * then.square().mean().clamp_min(TINY))
        return torch.minimum(b, BOUND * p.norm() / (2 * moved.norm()).clamp_min(TINY))
