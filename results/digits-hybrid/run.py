"""Downsampled states and serial epochs on the digits: the runs behind `README.md` beside this file.

    python results/digits-hybrid/run.py --out runs/digits-hybrid --at-once 1
    python results/digits-hybrid/filtered.py runs/digits-hybrid

Every run is one `parlay train` with the flags below, on one thread. It takes some ten seconds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from runner import Rows, main

COMMON = "--dataset digits --model resnet20 --stages 3 --epochs 15 --device cpu --checkpoint-every 0"

FIVE, TEN = tuple(range(5)), tuple(range(10))
DS = "--method al --downsample 2"
ALTERNATE = f"{DS} --schedule alternate:4:1"
RUNS: Rows = {
    # name: (flags, seeds)
    "serial": ("--method serial", TEN),
    "al-parallel": ("--method al --schedule parallel", FIVE),
    "al-alternate": ("--method al --schedule alternate:4:1", FIVE),
    "ds-parallel": (f"{DS} --schedule parallel", FIVE),
    "ds-alternate": (ALTERNATE, FIVE),
    "ds-tail": (f"{DS} --schedule tail:4:1", FIVE),
    "ds-alternate-constant": (f"{ALTERNATE} --lr-schedule constant", FIVE),
    "ds-tail-hold-0.3": (f"{DS} --schedule tail:4:1 --lr-schedule hold:0.3", FIVE),
    "ds-tail-hold": (f"{DS} --schedule tail:4:1 --lr-schedule hold", TEN),
    "ds-tail-2-hold": (f"{DS} --schedule tail:13:2 --lr-schedule hold", FIVE),
    "ds-tail-1-hold": (f"{DS} --schedule tail:14:1 --lr-schedule hold", FIVE),
    # what else might be the cause
    "detail-1": (f"{ALTERNATE} --detail 1", FIVE),
    "reach-1000": (f"{ALTERNATE} --reach 1000", FIVE),
    "lr-0.03": (f"{ALTERNATE} --lr 0.03", FIVE),
    "decay-0": (f"{ALTERNATE} --weight-decay 0", FIVE),
    "batch-64": (f"{ALTERNATE} --batch-size 64", FIVE),
    "serial-batch-64": ("--method serial --batch-size 64", FIVE),
}


if __name__ == "__main__":
    main(COMMON, RUNS, __doc__, Path("runs/digits-hybrid"))
