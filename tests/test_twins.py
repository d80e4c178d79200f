"""Each method of Parlay ends with the weights of its reference twin, bit for bit: both round alike, on one thread."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
from parlay.data import CropAndFlip

TWINS = Path(__file__).parent / "twins"
CLASSES = 3
BATCH = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def images(samples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.rand(samples, 1, 8, 8, generator=random), torch.randint(CLASSES, (samples,), generator=random)


def residual() -> nn.Sequential:
    """With batch norm; feature maps of sides 8, 4 and 2."""
    return parlay.build_model("resnet8", (1, 8, 8), CLASSES)


def dropping() -> nn.Sequential:
    """Without batch norm, with dropout; feature maps of the odd side 7."""

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.Tanh(), nn.Dropout(0.3))

    return nn.Sequential(nn.Conv2d(1, 6, 2), *(block() for _ in range(4)), nn.Flatten(), nn.Linear(294, CLASSES))


@dataclass(frozen=True)
class Case:
    twin: str
    method: Any
    schedule: str = "parallel"
    stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    """Of the twin; the method has the same."""
    network: Callable[[], nn.Sequential] = residual
    downsample: int = 1
    augment: CropAndFlip | None = None
    clip: float | None = None
    samples: int = 37
    """The last batch has 5."""


CASES = {
    "serial": Case("serial", None, "serial", augment=CropAndFlip(2)),
    "al, K = 1": Case("serial", parlay.AugmentedLagrangian(), stages=1),
    "penalty, K = 1": Case("serial", parlay.Penalty(), "alternate:2:1", stages=1, network=dropping),
    "replay, K = 1": Case("serial", parlay.Replay(), stages=1, network=dropping, augment=CropAndFlip(2)),
    "delayed, K = 1": Case("serial", parlay.Delayed(), "alternate:2:1", stages=1, augment=CropAndFlip(2)),
    "local, K = 1": Case("serial", parlay.Local(), stages=1, augment=CropAndFlip(2)),
    "al, K = 2, augmented serial epochs": Case(
        "al", parlay.AugmentedLagrangian(), "alternate:2:1", stages=2, augment=CropAndFlip(2)
    ),
    "al, K = 3": Case("al", parlay.AugmentedLagrangian(reach=0.05), options={"reach": 0.05}),
    "al, downsampled": Case("al", parlay.AugmentedLagrangian(), "alternate:2:1", downsample=2),
    "al, downsampled with detail, dropout": Case(
        "al", parlay.AugmentedLagrangian(detail=0.3), options={"detail": 0.3}, network=dropping, downsample=2
    ),
    "al, clipped": Case("al", parlay.AugmentedLagrangian(), "alternate:2:1", clip=0.5),
    "penalty, K = 2": Case("penalty", parlay.Penalty(), stages=2),
    "penalty, K = 3": Case("penalty", parlay.Penalty(beta=1.0), "alternate:2:1", options={"β": 1.0}),
    "penalty, downsampled, dropout": Case("penalty", parlay.Penalty(), network=dropping, downsample=2),
    "penalty, a last batch of one": Case("penalty", parlay.Penalty(), network=dropping, samples=33),
    "replay, K = 2, augmented": Case("replay", parlay.Replay(), "alternate:2:1", stages=2, augment=CropAndFlip(2)),
    "replay, K = 3": Case("replay", parlay.Replay()),
    "replay, predicted": Case("replay", parlay.Replay(predict=0.5), "alternate:2:1", options={"predict": 0.5}),
    "replay, accumulated": Case("replay", parlay.Replay(accumulate=2), "alternate:2:1", options={"M": 2}),
    "replay, downsampled, dropout": Case("replay", parlay.Replay(), network=dropping, downsample=2),
    "delayed, K = 2": Case("delayed", parlay.Delayed(), "alternate:2:1", stages=2),
    "delayed, K = 3, predicted": Case("delayed", parlay.Delayed(predict=0.5), options={"predict": 0.5}),
    "delayed, accumulated": Case("delayed", parlay.Delayed(accumulate=2), stages=2, options={"M": 2}),
    "delayed, dropout": Case("delayed", parlay.Delayed(), network=dropping, downsample=2),
    "local, K = 2, augmented": Case("local", parlay.Local(), "alternate:2:1", stages=2, augment=CropAndFlip(2)),
    "local, K = 3, downsampled, dropout": Case("local", parlay.Local(), network=dropping, downsample=2),
}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}
EPOCHS, SEED = 5, 5  # the phases of alternate:2:1 are S P S P P


def cut(case: Case) -> parlay.Partition:
    torch.manual_seed(0)
    return parlay.partition(case.network(), case.stages, images(2)[0])


def weights(case: Case, stages: parlay.Partition) -> Tensor:
    """With the batch statistics, where they are not estimated anew after the last epoch."""
    found = dict(stages.model.named_parameters())
    if case.twin == "serial":
        found = {**found, **dict(stages.model.named_buffers())}
    return torch.cat([w.detach().float().flatten() for w in found.values()])


def moved(name: str, trained: Tensor) -> float:
    """How far training has taken the weights."""
    return float((trained - weights(CASES[name], cut(CASES[name]))).norm())


@cache
def by_parlay(name: str) -> Tensor:
    case = CASES[name]
    stages = cut(case)
    trainer = parlay.Trainer(
        stages,
        nn.CrossEntropyLoss(),
        case.method,
        case.schedule,
        optimizer=lambda weights: torch.optim.SGD(weights, **SGD),
        downsample=case.downsample,
        augment=case.augment,
        clip=case.clip,
        batch_size=BATCH,
        seed=SEED,
        device="cpu",
    )
    assert trainer.fit(images(case.samples), epochs=EPOCHS).status == "finished"
    return weights(case, stages)


def by_twin(name: str) -> Tensor:
    case = CASES[name]
    stages = cut(case)
    problem = importlib.import_module("twins.problem").Problem(
        stages.stages,
        images(case.samples),
        parlay.Schedule.parse(case.schedule).phases(EPOCHS),
        batch_size=BATCH,
        seed=SEED,
        downsample=case.downsample,
        augment=case.augment,
        clip=case.clip,
        **SGD,
    )
    heads = {"shapes": stages.shapes, "classes": CLASSES} if case.twin == "local" else {}
    importlib.import_module(f"twins.{case.twin}").train(problem, **heads, **case.options)
    return weights(case, stages)


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_the_twin(name: str) -> None:
    ours = by_parlay(name)
    assert 0.1 < moved(name, ours) < 100
    assert torch.equal(by_twin(name), ours)


MISTAKES = [
    ("serial", "problem", "(epoch + number / ", "(epoch + (number + 1) / "),
    ("serial", "problem", "x = self.images(step, augmented=True)", "x = self.images(step, augmented=False)"),
    ("al, K = 3", "al", "p[k] = n * λ_k.grad", "p[k] = λ_k.grad"),
    ("al, K = 3", "al", "κ[k][ids] = p[k]", "κ[k][ids] += p[k]"),
    ("al, K = 3", "al", "near(x[k], λ_next, reach) * ", ""),
    ("al, K = 3", "problem", "torch.lerp(s2, now, 0.1)", "torch.lerp(s2, now, 0.2)"),
    ("al, clipped", "problem", "self.clipped(self.f[k].parameters())", "pass"),
    ("al, downsampled", "al", "(x[k][0].numel() * s2", "(X[0].numel() * s2"),
    ("al, downsampled with detail, dropout", "al", "US(x[k], full", "US(λ_next, full"),
    ("penalty, K = 3", "penalty", "step.epoch + k", "step.epoch"),
    ("penalty, K = 3", "penalty", "p[k] / (2 * b", "p[k] / (b"),
    ("replay, K = 3", "replay", "L = 2 * (K - 1 - k)", "L = 2 * (K - 1 - k) + 1"),
    ("replay, K = 3", "replay", "batch[min(τ, T - 1)]", "batch[min(max(τ - 1, 0), T - 1)]"),
    ("replay, K = 3", "replay", "moved.norm()", "moved.norm() / 2"),
    ("replay, K = 3", "replay", "(5 / 3)", "(2 / 3)"),
    ("replay, K = 2, augmented", "replay", "batch[t], augmented=True", "batch[t], augmented=False"),
    ("replay, predicted", "replay", "predict * L", "predict * (L - 1)"),
    ("replay, accumulated", "problem", "k, M * rate)", "k, rate)"),
    ("replay, downsampled, dropout", "problem", "step.epoch, step.number, k)", "step.epoch, step.number, 0)"),
    ("delayed, K = 3, predicted", "delayed", "L = 2 * (K - 1 - k)", "L = 2 * (K - 1 - k) + 1"),
    ("delayed, K = 3, predicted", "delayed", "predict * L", "predict * (L - 1)"),
    ("delayed, K = 2", "delayed", "p[k + 1, t] / n", "p[k + 1, t] / problem.batch_size"),
    ("local, K = 2, augmented", "local", "t = τ - k", "t = τ - 2 * k"),
    ("local, K = 2, augmented", "local", "nn.GroupNorm(1,", "nn.GroupNorm(2,"),
]


@pytest.mark.parametrize(("name", "file", "right", "wrong"), MISTAKES)
def test_a_mistake_in_a_twin_is_found(
    name: str, file: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in dict.fromkeys(("problem", CASES[name].twin)):  # anew, as one takes the other
        source = (TWINS / f"{each}.py").read_text(encoding="utf-8")
        assert source.count(right) == (each == file)
        module = ModuleType(f"twins.{each}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(source.replace(right, wrong), module.__dict__)
    ours = by_parlay(name)
    assert (by_twin(name) - ours).norm() > 1e-4 * moved(name, ours)  # rounding alone would be below 1e-5
