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
PULL = "--shrink 1 --predict 0 --beta"
RUNS: Rows = {
    # name: (flags, seeds), the most telling first; what is called try-* stands in a table of its own
    "serial": (f"{R20} --method serial", (0, 1, 2)),
    "replay-k3": (f"{R20} --method replay --stages 3", (0, 1, 2)),
    "replay-k6": (f"{R20} --method replay --stages 6", (0, 1, 2)),
    "replay-k2": (f"{R20} --method replay --stages 2", (0, 1, 2)),
    "resnet110-serial": (f"{R110} --method serial", (0,)),
    "resnet110-replay-k3": (f"{R110} --method replay --stages 3", (0,)),
    **{
        f"{method}-k{k}": (f"{R20} --method {method} --stages {k}", (0,))
        for k in (3, 2)
        for method in ("local", "dni", "auxnet", "delayed")
    },
    "replay-k9": (f"{R20} --method replay --stages 9", (0,)),
    "replay-k6-alternate": (f"{R20} --method replay --stages 6 --schedule alternate:4:1", (0,)),
    "try-k6-shrink-1-compensate-0.5": (f"{R20} --method replay --stages 6 --shrink 1 --compensate 0.5", (4,)),
    "try-k6-slow-start-5": (f"{R20} --method replay --stages 6 --slow-start 5", (1,)),
    "serial-b64": (f"{R20} {B64} --method serial", (0, 1, 2)),
    "try-k6-beta-1": (f"{R20} --method replay --stages 6 {PULL} 1", (4, 5)),
    "try-k6-beta-2": (f"{R20} --method replay --stages 6 {PULL} 2", (4, 5)),
    "try-k6-beta-4": (f"{R20} --method replay --stages 6 {PULL} 4", (4, 5)),
    "try-k6-beta-2-b64": (f"{R20} {B64} --method replay --stages 6 {PULL} 2", (4, 5)),
    "try-k6-beta-4-b64": (f"{R20} {B64} --method replay --stages 6 {PULL} 4", (4, 5)),
    "try-k6-beta-2-accumulate-2": (f"{R20} --batch-size 64 --method replay --stages 6 {PULL} 2 --accumulate 2", (4, 5)),
    "try-k9-beta-2-b64": (f"{R20} {B64} --method replay --stages 9 {PULL} 2", (4, 5)),
    "try-k3-beta-2": (f"{R20} --method replay --stages 3 {PULL} 2", (4, 5)),
    "try-k3-beta-1": (f"{R20} --method replay --stages 3 {PULL} 1", (4, 5)),
    "try-k3-shrink-0.7": (f"{R20} --method replay --stages 3 --shrink 0.7 --predict 0.5 --beta 0", (4, 5)),
    "try-serial": (f"{R20} --method serial", (4, 5)),
    "try-serial-b64": (f"{R20} {B64} --method serial", (4, 5)),
    "adaptive-k3": (f"{R20} --method al --stages 3 --schedule adaptive", (0,)),
}

if __name__ == "__main__":
    main(COMMON, RUNS, __doc__, Path("runs/streaming"))
