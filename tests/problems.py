"""Small problems with known answers, and plain PyTorch to compare with: what the tests of the method share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parlay
from parlay.batch import Batch
from parlay.engine.engine import Engine
from parlay.link.filters import downsample
from parlay.partitioning import Partition
from parlay.run.progress import Silent

CLASSES = 3
IMAGE = (1, 8, 8)

# Networks


class Residual(nn.Module):
    """X + F(X), F without batch norm."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.inner(x)
        return x + residual


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def with_norm(seed: int = 0) -> nn.Sequential:
    """A residual network with batch norm, 8 blocks; its feature maps have sides 8, 4 and 2."""
    torch.manual_seed(seed)
    return parlay.build_model("resnet14", IMAGE, CLASSES)


def without_norm(seed: int = 0, width: int = 6) -> nn.Sequential:
    """A residual network without batch norm, 7 blocks; its feature maps have the odd side 7."""
    torch.manual_seed(seed)

    def block() -> Residual:
        return Residual(nn.Sequential(nn.Tanh(), nn.Conv2d(width, width, 3, padding=1)))

    head = nn.Sequential(Pool(), nn.Linear(width, CLASSES))
    return nn.Sequential(nn.Conv2d(1, width, 2), *(block() for _ in range(5)), head)


def dense(seed: int = 0, width: int = 8, blocks: int = 4) -> nn.Sequential:
    """A residual network of linear layers, for images as rows."""
    torch.manual_seed(seed)
    middle = (Residual(nn.Sequential(nn.Linear(width, width), nn.Tanh())) for _ in range(blocks))
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, width)), *middle, nn.Linear(width, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {"batch norm": with_norm, "no batch norm": without_norm}


def images(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random images and classes; pixels are far from zero in the mean, as those of real data are."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(samples, *IMAGE, generator=random), torch.randint(CLASSES, (samples,), generator=random)


def weights(model: nn.Module) -> Tensor:
    """All weights of a network in one row, on the CPU."""
    return torch.cat([w.detach().cpu().flatten() for w in model.parameters()])


def statistics(model: nn.Module) -> Tensor:
    """All buffers of a network in one row."""
    return torch.cat([torch.zeros(0), *(buffer.cpu().float().flatten() for buffer in model.buffers())])


# Plain PyTorch


@dataclass
class Backpropagated:
    """One pass of backpropagation through a whole network, with US(DS(x)) in the place of x at every cut."""

    gradients: list[Tensor]
    """Of every stage's weights, in one row."""
    outputs: list[Tensor]
    """DS(x) at every interface."""
    adjoints: list[Tensor]
    """Per sample, of the same."""
    loss: Tensor


def backpropagate(cut: Partition, inputs: Tensor, targets: Tensor, factor: int = 1) -> Backpropagated:
    """In train mode; the network itself is left alone."""
    cut = Partition(copy.deepcopy(cut.model).train(), cut.cuts, cut.shapes)
    reduce, outputs, x = downsample(factor), [], inputs.contiguous(memory_format=torch.channels_last)
    for k, stage in enumerate(cut.stages):
        x = stage(x)
        if k < len(cut) - 1:
            outputs.append(reduce.down(x))
            outputs[-1].retain_grad()
            x = reduce.up(outputs[-1], cut.shapes[k])
    loss = F.cross_entropy(x, targets)
    loss.backward()
    gradients = [torch.cat([w.grad.flatten() for w in stage.parameters()]) for stage in cut.stages]
    adjoints = [len(inputs) * output.grad for output in outputs]
    return Backpropagated(gradients, [output.detach() for output in outputs], adjoints, loss.detach())


# Engines, driven step by step


class Recorder(torch.optim.Optimizer):
    """Keeps the gradients of the last step, and leaves the weights as they are."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.0})
        self.kept: list[Tensor] | None = None

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        found = [w.grad for w in self.param_groups[0]["params"]]
        self.kept = None if found[0] is None else [gradient.clone() for gradient in found]


def engine(
    cut: Partition, data: tuple[Tensor, Tensor], method: parlay.Method, *, folder: Path, **options: Any
) -> Engine:
    """An engine as the trainer makes it, without a run around it; with a `Recorder` unless an optimiser is given."""
    made = trainer(cut, method, **{"schedule": "parallel", "optimizer": Recorder, **options})
    return made.engine(made._feed(data, None), folder)


def trainer(cut: Partition, method: parlay.Method | None = None, **options: Any) -> parlay.Trainer:
    """A trainer on the CPU that shows nothing."""
    return parlay.Trainer(
        cut, **{"method": method, "loss": nn.CrossEntropyLoss(), "device": "cpu", "progress": Silent(), **options}
    )


def batch(ids: Tensor | int, epoch: int = 0, step: int = 0, beta: float = 3.0, seed: int = 0) -> Batch:
    """A step on these samples, or on the first so many."""
    return Batch(torch.arange(ids) if isinstance(ids, int) else ids, epoch, step, 1.0, seed, beta)


def never() -> bool:
    return False


def recorded(running: Engine, k: int) -> Tensor | None:
    """The gradient of stage k at the last step, in one row."""
    kept = running.own.stages[k].optimiser.inner.kept
    return None if kept is None else torch.cat([gradient.flatten() for gradient in kept])


def hold_multipliers(running: Engine, multipliers: list[Tensor]) -> None:
    """Put these multipliers of all samples into the stores."""
    for link, multiplier in zip(running.own.links, multipliers, strict=True):
        link.multipliers.load(multiplier.contiguous())


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


# Linear residual networks: their minimum is that of linear regression


class LinearBlock(nn.Module):
    """X + X Wᵀ."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight.T


@dataclass
class Regression:
    """Y = X Aᵀ + noise. A product of square linear blocks can be any A near the identity: its least loss is known."""

    inputs: Tensor
    targets: Tensor

    @classmethod
    def make(cls, noise: float, samples: int = 32, width: int = 4, seed: int = 3) -> Regression:
        """Every sample stands there twice, so that both halves of the data are the same problem."""
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(samples // 2, width, generator=random)
        a = torch.eye(width) + 0.3 * torch.randn(width, width, generator=random) / width**0.5
        y = x @ a.T + noise * torch.randn(samples // 2, width, generator=random)
        return cls(x.repeat_interleave(2, 0), y.repeat_interleave(2, 0))

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    @property
    def best(self) -> Tensor:
        """The least-squares solution, with X @ best next to Y."""
        return torch.linalg.lstsq(self.inputs.double(), self.targets.double()).solution

    @property
    def least(self) -> float:
        """The loss there, the mean over the samples of ‖X best − Y‖²."""
        return float((self.inputs.double() @ self.best - self.targets).square().sum(1).mean())

    def network(self, blocks: int = 6, seed: int = 4) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(*(LinearBlock(self.inputs.shape[1], 0.05) for _ in range(blocks)))


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum(1).mean()
