"""How large a pull may be, looked at on a CPU: replay on images of half the side, with bounds on the pull.

    python results/streaming/small.py --data-dir data [--at-once 2] [--only NAME ...]

ResNet-20 on the first 20,000 images of CIFAR-10, averaged to 16 x 16, with crops and flips; 12 epochs of a cosine, or
seven at a constant learning rate. Everything else is as in `run.py`. Each run is trained by the library, in float32
and in one thread, and takes some minutes. Writes `runs/streaming/small.json`: the loss of every stage in every epoch,
how large its pull was beside p, and the test accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parlay
from parlay import data, models
from parlay.data import CropAndFlip, Split, normalise
from parlay.methods import replay
from parlay.run import records
from parlay.run.progress import Silent

SAMPLES, SIDE = 20_000, 16
RUNS: dict[str, dict[str, Any]] = {
    "serial": {"stages": 1},
    "k6-bound-0.1": {"stages": 6, "bound": 0.1},
    "k6-bound-1": {"stages": 6, "bound": 1.0},
    "k2-beta-20-bound-1": {"stages": 2, "beta": 20.0, "bound": 1.0, "epochs": 7, "rate": "constant"},
    "k2-beta-20-bound-0.2": {"stages": 2, "beta": 20.0, "bound": 0.2, "epochs": 7, "rate": "constant"},
    "k2-beta-20-bound-0.1": {"stages": 2, "beta": 20.0, "bound": 0.1, "epochs": 7, "rate": "constant"},
    "k2-beta-10-bound-0.1": {"stages": 2, "beta": 10.0, "bound": 0.1, "epochs": 7, "rate": "constant"},
    "k3-bound-0.1": {"stages": 3, "bound": 0.1},
    "k3-bound-1": {"stages": 3, "bound": 1.0},
    "k6-beta-20-bound-0.1": {"stages": 6, "beta": 20.0, "bound": 0.1},
    "k6-bound-0.05": {"stages": 6, "bound": 0.05},
    "k3-beta-20-bound-0.1": {"stages": 3, "beta": 20.0, "bound": 0.1},
    "k6-beta-40-bound-0.1": {"stages": 6, "beta": 40.0, "bound": 0.1},
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data-dir", default="data")
    ask.add_argument("--at-once", type=int, default=2)
    ask.add_argument("--only", nargs="*", default=list(RUNS))
    ask.add_argument("--out", type=Path, default=Path("runs/streaming/small.json"))
    given = ask.parse_args()
    told = json.loads(given.out.read_text()) if given.out.exists() else {"runs": {}}
    names = [name for name in given.only if name not in told["runs"]]
    with ProcessPoolExecutor(given.at_once, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        for name, (rows, pulls) in zip(names, pool.map(partial(trained, given.data_dir), names), strict=True):
            losses, accuracy = [row["losses"] for row in rows], rows[-1]["test_accuracy"]
            told["runs"][name] = {**keys(name), "losses": losses, "pulls": pulls, "test_accuracy": accuracy}
            told["command"] = "python results/streaming/small.py"
            told["environment"] = records.environment(["cpu"])
            records.write_json(given.out, told)
            print(name, f"{accuracy:.2f}", [round(each[-1], 3) for each in losses], flush=True)


def keys(name: str) -> dict[str, Any]:
    return {"beta": 10.0, "bound": replay.BOUND, "epochs": 12, "rate": "cosine", **RUNS[name]}


def trained(folder: str, name: str) -> tuple[list[records.Record], list[list[float]]]:
    torch.set_num_threads(1)
    asked = keys(name)
    replay.BOUND = asked["bound"]
    shares = watched()
    loaded = data.load("cifar10", folder)
    torch.manual_seed(0)
    model = models.build("resnet20", (3, SIDE, SIDE), 10)
    cut = parlay.partition(model, asked["stages"], torch.randn(2, 3, SIDE, SIDE))
    trainer = parlay.Trainer(
        cut,
        loss=nn.CrossEntropyLoss(),
        method=replay.Replay(beta=asked["beta"]),
        schedule="parallel" if asked["stages"] > 1 else "serial",
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=5e-4),
        rate=parlay.Rate(asked["rate"]),
        device="cpu",
        prepare=partial(normalise, mean=loaded.facts.mean, std=loaded.facts.std),
        augment=CropAndFlip(2),
        progress=Silent(),
    )
    rows = trainer.fit(small(loaded.train, SAMPLES), small(loaded.test, 5000), epochs=asked["epochs"]).records
    epochs = asked["epochs"] - 1  # the first one is serial
    return rows, [[float(part.mean()) for part in torch.tensor(own).chunk(epochs)] for _, own in sorted(shares.items())]


def watched() -> dict[int, list[float]]:
    """How large the pull of each stage is beside p, step by step, from now on."""
    shares: dict[int, list[float]] = {}
    plain = replay.ReplayWorker.stiffness

    def stiffness(self: replay.ReplayWorker, then: Tensor, moved: Tensor, p: Tensor) -> Tensor:
        b = plain(self, then, moved, p)
        shares.setdefault(self.k, []).append(float(2 * b * moved.norm() / p.norm()))
        return b

    replay.ReplayWorker.stiffness = stiffness  # type: ignore[method-assign]
    return shares


def small(split: Split, count: int) -> Split:
    images = F.avg_pool2d(split.inputs[:count].float(), 32 // SIDE).round().to(torch.uint8)
    return Split(images, split.targets[:count])


if __name__ == "__main__":
    main()
