"""Test losses of saved auto-encoders by where their batch statistics come from, as JSON.

    python results/paper/before/judge.py RUN... --data-dir data > judged.json

A run folder has `recipe.toml` and `model.safetensors`. The network is judged with the statistics that it was saved
with, and with new ones from 5,000 training images each: the first of every twelve, the second of every twelve, and a
random draw, as Parlay takes them. MNIST's training images come from two sources in turn, so that the first two know one
source each. In float32 on the CPU, a minute for each line.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

import torch
from safetensors.torch import load_file

from parlay import data, models
from parlay.data import normalise
from parlay.data.batches import drawn
from parlay.evaluate import estimate_statistics, evaluate
from parlay.models.resnet_vae import Reconstruction
from parlay.training import JUDGED


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data-dir", default="data")
    given = parser.parse_args()
    found = {}
    for run in given.runs:
        recipe = tomllib.loads((run / "recipe.toml").read_text())
        found[run.name] = judged(recipe, run / "model.safetensors", given.data_dir)
    json.dump(found, sys.stdout, indent=2)
    print()


def judged(recipe: dict, weights: Path, data_dir: str) -> dict[str, float]:
    known = data.load(recipe["dataset"], data_dir)
    network = models.build(recipe["model"], known.facts.shape, known.facts.classes)
    network.load_state_dict(load_file(weights))

    def ready(images: torch.Tensor) -> torch.Tensor:
        return normalise(images, known.facts.mean, known.facts.std)

    def test_loss() -> float:
        network.eval()
        parts = map(ready, torch.split(known.test.inputs, 500))
        return evaluate(network, Reconstruction(), ((images, images) for images in parts))["loss"]

    told = {"as saved": test_loss()}
    samples = len(known.train.inputs)
    every = samples // JUDGED
    kinds = {
        f"1st of every {every}": torch.arange(0, samples, every),
        f"2nd of every {every}": torch.arange(1, samples, every),
        "drawn": drawn(samples, JUDGED, recipe["seed"]),
    }
    for kind, ids in kinds.items():
        torch.manual_seed(0)  # the latent is sampled
        parts = [part for part in torch.split(ids, recipe["batch-size"]) if len(part) == recipe["batch-size"]]
        estimate_statistics(network, network, (ready(known.train.inputs[part]) for part in parts))
        told[kind] = test_loss()
        print(weights.parent.name, kind, told[kind], file=sys.stderr, flush=True)
    return told


main()
