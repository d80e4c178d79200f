"""Synthetic gradients (DNI; Jaderberg et al. 2017, arXiv 1608.05343): a small network guesses each adjoint.

Stage k trains at once, on the adjoint that its synthesiser predicts from its output. The stage after computes the
adjoint of the same batch a step later, from its own guess, and the synthesiser learns from that. Nothing is late, but
the signal is as good as the guess. With `condition` "labels" the synthesiser is also told the labels (their cDNI).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from parlay.coupling.streaming import Ring, Sent, Site, Station, Streaming, Visit, adam, answer
from parlay.errors import InputError

CONDITIONS = ("labels", "none")
TINY = 1e-30
FOLLOW = 0.1  # of the running size of the adjoints, and of the error


@final
@dataclass(frozen=True)
class DNI(Streaming):
    """Predicted adjoints."""

    condition: str = "labels"
    """What the synthesiser sees beside the features. The authors' images need labels to be learned well."""
    synthesiser_lr: float = 1e-3
    """Adam's usual rate. The loss is relative to the size of the adjoints, which shrink while the network learns."""

    def __post_init__(self) -> None:
        if self.condition not in CONDITIONS:
            raise InputError(f"unknown condition '{self.condition}': write {' or '.join(CONDITIONS)}")
        if not 0 < self.synthesiser_lr < float("inf"):
            raise InputError(f"synthesiser-lr is {self.synthesiser_lr}: write a number greater than 0")

    def lag(self, k: int, stages: int) -> int:
        """There in the next step, and back in the one after."""
        return 2 if k < stages - 1 else 0

    def delay(self, k: int, stages: int) -> int:  # noqa: ARG002
        return 0

    def kept(self, k: int, stages: int) -> tuple[int, int]:
        lag = self.lag(k, stages)
        return 0, (lag + 1 if lag else 0)

    def station(self, site: Site) -> Station:
        return Guessing(site, self)


@final
class Guessing(Station):
    needs_targets: ClassVar[bool] = True

    def __init__(self, site: Site, method: DNI) -> None:
        super().__init__(site)
        self.lag = method.lag(site.k, site.stages)
        self.classes = site.classes if method.condition == "labels" else 0
        if self.classes is None:
            raise InputError("the synthesiser is told labels, and the targets are not classes: write condition none")
        if site.after is not None:
            shape, classes = site.after.small, self.classes
            self.beside = site.network(lambda: synthesiser(shape, classes), adam(method.synthesiser_lr))
            self.rings = {name: Ring(self.lag + 1, site.rows) for name in ("outputs", "labels")}
        self.scale = torch.zeros((), device=site.stage.device)
        """Running root mean square of the adjoints: a network learns numbers of about 1, adjoints are far smaller."""
        self.error = torch.ones((), device=site.stage.device)
        """What the guesses leave unexplained of the adjoints, as a share of their square."""

    def step(self, forth: Visit | None, features: Tensor | None, back: Visit | None, adjoint: Tensor | None) -> Sent:
        if self.site.last:
            return self.at_once(forth, features) if forth and features is not None else Sent()
        output, p, loss = None, None, None
        if forth and features is not None:
            output, p, loss = self._train(forth, features)
        if back is not None and adjoint is not None:
            learned = self._learn(back, adjoint)
            loss = learned if loss is None else learned + loss
        return Sent(output, p, loss, trained=loss is not None)

    def _train(self, forth: Visit, features: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Forward, and backward from the adjoint as guessed. Its loss is zero, or not finite where that is not."""
        state = self.state(features)
        x = self.down(self.pass_through(self.up(state), forth.seed))
        output = x.detach()
        assert forth.targets is not None
        self.rings["outputs"].put(forth, output)
        self.rings["labels"].put(forth, forth.targets)
        with torch.no_grad():
            guess = self.bounded(self.guess(output, forth.targets))
        if x.requires_grad:
            torch.autograd.backward(x, (guess / forth.rows).to(x.dtype))
        return output, answer(state, forth.rows), 0 * (guess.sum() + output.float().sum())

    def _learn(self, back: Visit, adjoint: Tensor) -> Tensor:
        """The synthesiser's error relative to the adjoint: 1 is that of one that knows nothing and says zero."""
        p = adjoint.to(self.stage.device)
        now = p.square().mean().sqrt()
        self.scale.copy_(torch.where(self.scale == 0, now, torch.lerp(self.scale, now, FOLLOW)))
        error = self.guess(self.rings["outputs"].take(back), self.rings["labels"].take(back)) - p
        loss = error.square().sum() / p.square().sum().clamp_min(TINY)
        loss.backward()  # type: ignore[no-untyped-call]
        self.error.lerp_(loss.detach().clamp_max(1.0), FOLLOW)
        return loss.detach()

    def bounded(self, guess: Tensor) -> Tensor:
        """No larger than the part of the adjoints that is known: √(1 − error) of their size.

        A guess grows with the features, and they with the guess. Without the bound ResNet-20 on CIFAR-10 diverged in
        40 steps at a learning rate of 0.1, on guesses that explained 1 % of the adjoints.
        """
        size = guess.square().mean().sqrt().clamp_min(TINY)
        return guess * ((1 - self.error).sqrt() * self.scale / size).clamp_max(1.0)

    def guess(self, output: Tensor, labels: Tensor) -> Tensor:
        """The adjoint of these outputs, per sample."""
        assert self.beside is not None
        if self.classes:
            # one-hot by a comparison: the library's own function looks at the numbers, which a recorded step cannot
            told = (labels[:, None] == torch.arange(self.classes, device=labels.device)).to(output.dtype)
            if output.dim() == 4:
                told = told[:, :, None, None].expand(-1, -1, *output.shape[2:])
                output = torch.cat([output, told], 1)
            else:
                told = told.view(len(told), *[1] * (output.dim() - 2), -1).expand(*output.shape[:-1], -1)
                output = torch.cat([output, told], -1)
        return self.scale * self.beside.forward(output).float()

    def learned(self) -> dict[str, Tensor]:
        return super().learned() | ({"scale": self.scale, "error": self.error} if self.beside is not None else {})

    def load_learned(self, kept: Mapping[str, Tensor]) -> bool:
        if not super().load_learned(kept):
            return False
        if self.beside is not None:
            self.scale.copy_(kept["scale"])
            self.error.copy_(kept["error"])
        return True


def synthesiser(shape: tuple[int, ...], told: int) -> nn.Sequential:
    """A hidden layer of the features' width; at first it says zero, as the authors' does."""
    first: nn.Conv2d | nn.Linear
    last: nn.Conv2d | nn.Linear
    if len(shape) == 3:
        first = nn.Conv2d(shape[0] + told, shape[0], 3, padding=1)
        last = nn.Conv2d(shape[0], shape[0], 3, padding=1)
    else:
        first, last = nn.Linear(shape[-1] + told, shape[-1]), nn.Linear(shape[-1], shape[-1])
    nn.init.zeros_(last.weight)
    assert last.bias is not None
    nn.init.zeros_(last.bias)
    return nn.Sequential(first, nn.ReLU(), last)
