"""A method of your own in one file: an augmented Lagrangian whose multipliers are running means of the adjoints.

python examples/new_method.py                             three stages in one process
torchrun --nproc-per-node 2 examples/new_method.py 2      two stages, each in a process of its own
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import parlay
from parlay.config.keys import option
from parlay.link.states import Pair, penalty
from parlay.methods.stored import Stored


@dataclass(frozen=True)
class Averaged(Stored):
    """Minimise φ + Σ b ‖λ − x‖² + ⟨κ, x⟩, with κ ← κ + pace · (p − κ): single adjoints are noisy."""

    keeps_multipliers: ClassVar[bool] = True

    beta: float = option(3.0, "weight of the penalty", above=0)
    pace: float = option(0.7, "of a new adjoint in its running mean", above=0, most=1)

    def start(self, x: Tensor) -> Pair:
        """State and multiplier of some samples, from a pass through the whole network."""
        return Pair(x, torch.zeros_like(x))

    def objective(self, x: Tensor, pair: Pair, b: Tensor) -> Tensor:
        """What the stage before the link minimises; x is its output."""
        return penalty(x, pair.state, b) + (pair.multiplier * x).sum() / len(x)

    def update(self, pair: Pair, x: Tensor | None, p: Tensor | None, b: Tensor, s2: Tensor) -> Pair:  # noqa: ARG002
        """After a step: the state is the new output, p the adjoint that the stage behind has found for the old one."""
        return Pair(x, torch.lerp(pair.multiplier, p, self.pace))


def main(stages: int, epochs: int) -> None:
    digits = load_digits()
    images, classes = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
    train, test = (images[:1437], classes[:1437]), (images[1437:], classes[1437:])
    torch.manual_seed(0)
    model = parlay.build_model("resnet8", (1, 8, 8), 10)
    cut = parlay.partition(model, stages, example=images[:2])
    trainer = parlay.Trainer(cut, nn.CrossEntropyLoss(), Averaged(), "alternate:2:1", batch_size=64, device="cpu")
    result = trainer.fit(train, test, epochs)
    print(f"{result.summary['method']}: {result.summary['test_accuracy']:.1f} %")


if __name__ == "__main__":
    main(stages=int(sys.argv[1]) if len(sys.argv) > 1 else 3, epochs=9)
