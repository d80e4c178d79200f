"""Trained networks judged twice: as they are, and with the filter of their states, US(DS(x)), at every cut.

    python results/digits-hybrid/filtered.py runs/digits-hybrid     writes filtered.json there

Batch statistics are those of the training images in both cases, taken in the same way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import parlay
from parlay import data
from parlay.data import normalise

ROWS = ("ds-parallel", "ds-alternate", "ds-tail-hold")
SEEDS = range(5)


def filtered(x: Tensor) -> Tensor:
    return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2)


@torch.no_grad()
def judged(folder: Path, with_filter: bool) -> dict[str, float]:
    """Test accuracy and training loss."""
    facts = data.facts("digits")
    cuts = set(json.loads((folder / "summary.json").read_text())["cuts"])
    model = parlay.build_model("resnet20", facts.shape, facts.classes)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    blocks = [nn.Sequential(Filter(), block) if with_filter and n in cuts else block for n, block in enumerate(model)]
    network = nn.Sequential(*blocks)
    loaded = data.load("digits", "data")
    train, test = (normalise(split.inputs, facts.mean, facts.std) for split in (loaded.train, loaded.test))
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over the batches
    network.train()
    for part in torch.split(train, 128)[:-1]:
        network(part)
    network.eval()
    right = network(test).argmax(1) == loaded.test.targets
    loss = F.cross_entropy(network(train), loaded.train.targets)
    return {"test_accuracy": 100 * float(right.float().mean()), "train_loss": float(loss)}


class Filter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return filtered(x)


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {
        f"{row}-s{seed}": {
            name: judged(out / f"{row}-s{seed}", with_filter)
            for name, with_filter in (("as is", False), ("filtered", True))
        }
        for row in ROWS
        for seed in SEEDS
    }
    (out / "filtered.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
