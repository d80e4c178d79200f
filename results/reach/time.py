"""What `--reach` costs in time: epochs of `al` with and without it, in turn, as ratios. Writes time.json here."""

import json
import statistics
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import parlay
from parlay.models import build

ROUNDS, NONE = 5, 1e9


def seconds(model: str, samples: int, reach: float) -> float:
    """Of a parallel epoch: the median of three."""
    torch.manual_seed(0)
    images, labels = torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,))
    stages = parlay.partition(build(model, (3, 32, 32), 10), 3, example=images[:2])
    method = parlay.AugmentedLagrangian(reach=reach)
    trainer = parlay.Trainer(stages, loss=nn.CrossEntropyLoss(), method=method, schedule="parallel")
    epochs = trainer.fit(TensorDataset(images, labels), None, epochs=4).records
    return statistics.median(e["seconds"] - e["refresh_seconds"] for e in epochs if e["phase"] == "parallel")


def main() -> None:
    found = {}
    for model, samples in (("resnet20", 1280), ("wrn-16-4", 256)):
        ratios = []
        for n in range(ROUNDS):
            order = (0.25, NONE) if n % 2 else (NONE, 0.25)
            taken = {reach: seconds(model, samples, reach) for reach in order}
            ratios.append(taken[0.25] / taken[NONE])
        found[model] = sorted(ratios)
    Path("time.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
