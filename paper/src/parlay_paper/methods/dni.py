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

from parlay.batch import Pass
from parlay.config.keys import option
from parlay.errors import InputError
from parlay.link.link import LinkEnd
from parlay.link.queue import QueueLink, Slots
from parlay.methods.streamed import Streamed
from parlay.stage.worker import Place, Worker
from parlay_paper.methods.side import FOLLOW, adam

CONDITIONS = ("labels", "none")
TINY = 1e-30


@final
@dataclass(frozen=True)
class DNI(Streamed):
    """Predicted adjoints."""

    guesses: ClassVar[bool] = True

    condition: str = option("labels", "what the synthesiser sees beside the features", CONDITIONS)
    """The authors' images need labels to be learned well."""
    synthesiser_lr: float = option(1e-3, "of its Adam", form="LR", above=0, most=1e30)
    """Adam's usual rate. The loss is relative to the size of the adjoints, which shrink while the network learns."""

    def lag(self, k: int, stages: int) -> int:
        """There in the next step, and back in the one after."""
        return 2 if k < stages - 1 else 0

    def delay(self, stages: int) -> int:  # noqa: ARG002
        return 0

    def link(self, end: LinkEnd) -> QueueLink:
        return QueueLink(end, self.lag(end.k - 1, end.stages), pulled=True)

    def worker(self, place: Place) -> Worker:
        return Worker(place) if place.last else GuessingWorker(place, self)

    def queued(self, k: int, stages: int) -> tuple[int, int]:
        lag = self.lag(k, stages)
        return 0, (lag + 1 if lag else 0)


@final
class GuessingWorker(Worker):
    def __init__(self, place: Place, method: DNI) -> None:
        super().__init__(place)
        assert isinstance(place.after, QueueLink)
        self.link = place.after
        told = place.classes if method.condition == "labels" else 0
        if told is None:
            raise InputError("the synthesiser is told labels, and the targets are not classes: write condition none")
        self.told = told
        shape = self.link.small
        self.network = place.network(lambda: synthesiser(shape, told), adam(method.synthesiser_lr))
        self.side = self.network
        self.scale = torch.zeros((), device=place.stage.device)
        """Running root mean square of the adjoints: a network learns numbers of about 1, adjoints are far smaller."""
        self.error = torch.ones((), device=place.stage.device)
        """What the guesses leave unexplained of the adjoints, as a share of their square."""
        self._labels = Slots(method.lag(place.k, place.stages) + 1, place.rows, place.fixed)
        """Of the batches on their way: in a captured step a late pass has no ids to ask for them by."""
        self.slot_counts = (self._labels.count,)
        self._before = self.scale, self.error
        """Both as the last step has left them: a stage trains before its synthesiser learns."""
        self._learned = torch.zeros((), device=place.stage.device)

    def begin(self, rate: Tensor | float) -> None:
        super().begin(rate)
        self._before = self.scale.clone(), self.error.clone()
        self._learned = torch.zeros_like(self.scale)

    def learn(self, p: Pass) -> None:
        """From the synthesiser's error relative to the adjoint: 1 is that of one that knows nothing and says zero."""
        adjoint = self.link.adjoint(p)
        now = adjoint.square().mean().sqrt()
        self.scale.copy_(torch.where(self.scale == 0, now, torch.lerp(self.scale, now, FOLLOW)))
        error = self.guess(self.link.outputs.take(p), self._labels.take(p), self.scale) - adjoint
        loss = error.square().sum() / adjoint.square().sum().clamp_min(TINY)
        loss.backward()  # type: ignore[no-untyped-call]
        self._learned = loss.detach()
        self.error.lerp_(self._learned.clamp_max(1.0), FOLLOW)
        self.trained = True

    def loss(self, p: Pass) -> Tensor:
        """That of the guess which was learned from in this step; not finite where what is trained on now is not."""
        output, labels = self._small.detach(), self.targets(p).to(self.stage.device)
        self._labels.put(p, labels)
        scale, error = self._before
        with torch.no_grad():
            self._guess = bounded(self.guess(output, labels, scale), scale, error)
        return self._learned + 0 * (self._guess.sum() + output.float().sum())

    def backward(self, p: Pass) -> None:
        if self._small.requires_grad:  # not where a first stage has nothing to train
            torch.autograd.backward(self._small, (self._guess / p.rows).to(self._small.dtype))
        self.answer(p)

    def guess(self, output: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """The adjoint of these outputs, per sample."""
        if self.told:
            # one-hot by a comparison: the library's own function looks at the numbers, which a captured step cannot
            told = (labels[:, None] == torch.arange(self.told, device=labels.device)).to(output.dtype)
            if output.dim() == 4:
                told = told[:, :, None, None].expand(-1, -1, *output.shape[2:])
                output = torch.cat([output, told], 1)
            else:
                told = told.view(len(told), *[1] * (output.dim() - 2), -1).expand(*output.shape[:-1], -1)
                output = torch.cat([output, told], -1)
        return scale * self.network.forward(output).float()

    def learned(self) -> dict[str, Tensor]:
        return super().learned() | {"scale": self.scale, "error": self.error}

    def load_learned(self, kept: Mapping[str, Tensor]) -> bool:
        if not super().load_learned(kept):
            return False
        self.scale.copy_(kept["scale"])
        self.error.copy_(kept["error"])
        return True

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self._labels.tensors("labels")

    def load(self, kept: Mapping[str, Tensor]) -> None:
        super().load(kept)
        self._labels.load("labels", kept, self.stage.device)

    @property
    def bytes(self) -> int:
        return super().bytes + self._labels.bytes


def bounded(guess: Tensor, scale: Tensor, error: Tensor) -> Tensor:
    """No larger than the part of the adjoints that is known: √(1 − error) of their size.

    A guess grows with the features, and they with the guess; without the bound runs diverged (results/streaming).
    """
    size = guess.square().mean().sqrt().clamp_min(TINY)
    return guess * ((1 - error).sqrt() * scale / size).clamp_max(1.0)


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
