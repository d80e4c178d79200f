"""Streaming methods on CIFAR-10 with augmentation: the runs behind `README.md` beside this file.

    python results/streaming/run.py --data-dir data --out runs/streaming [--at-once 14] [--seconds 3600] [--only ...]

Every run is one `parlay train` with the flags below, in a process of its own; several share the GPU (an MPS daemon
helps), so their seconds are no timings. A run folder that holds a summary is not run again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from runner import Rows, main

COMMON = (
    "--dataset cifar10 --epochs 30 --batch-size 128 --augment random --schedule parallel "
    "--store-dtype bfloat16 --checkpoint-every 0"
)
R20, R110 = "--model resnet20", "--model resnet110"
B64 = "--batch-size 64 --lr 0.05"
SHRINK = "--beta 0 --shrink 0.7 --predict 0.5"
RUNS: Rows = {
    # name: (flags, seeds), the most telling first
    "serial": (f"{R20} --method serial", (0, 1, 2)),
    "replay-k3": (f"{R20} --method replay --stages 3", (0, 1, 2)),
    "replay-k2": (f"{R20} --method replay --stages 2", (0, 1, 2)),
    "serial-b64": (f"{R20} {B64} --method serial", (0, 1, 2)),
    "resnet110-serial": (f"{R110} --method serial", (0, 1, 2)),
    "resnet110-replay-k3": (f"{R110} --method replay --stages 3", (0, 1, 2)),
    "replay-k6": (f"{R20} --method replay --stages 6", (0, 1, 2)),
    "replay-k9-b64": (f"{R20} {B64} --method replay --stages 9", (0,)),
    **{
        f"{method}-k{k}": (f"{R20} --method {method} --stages {k}{more}", (0,))
        for k in (3, 2)
        for method, more in (("local", ""), ("dni", " --lr 0.02"), ("auxnet", ""), ("delayed", ""))
    },
    "try-k9-b64-shrink-0.7": (f"{R20} {B64} --method replay --stages 9 {SHRINK}", (0,)),
}

if __name__ == "__main__":
    main(COMMON, RUNS, __doc__, Path("runs/streaming"))
