"""ResNet-20 on CIFAR-10, 30 epochs, batch 128, K = 3: the runs behind `README.md` beside this file.

    python results/resnet20/run.py --data-dir data --out runs/resnet20 [--at-once 15] [--seconds 3600]

Every run is one `parlay train` with the flags below, in a process of its own; several share the GPU (an MPS daemon
helps), so their seconds are no timings. A run folder that holds a summary is not run again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from runner import Rows, main

COMMON = (
    "--dataset cifar10 --model resnet20 --stages 3 --epochs 30 --batch-size 128 "
    "--store-dtype bfloat16 --checkpoint-every 0"
)

ALONE = "--schedule parallel --augment none"
HYBRID = "--schedule alternate:4:1"
DECAY = "--weight-decay 1e-3"
DS = "--downsample 2 --detail 1"
RUNS: Rows = {
    # name: (flags, seeds), the most telling first
    "serial-no-da": ("--method serial --augment none", (0, 1)),
    "serial-da": ("--method serial --augment random", (0, 1)),
    "al": (f"--method al {ALONE}", (0, 1, 2, 3, 4, 5)),
    "al-r2": (f"--method al {ALONE} {DS}", (0, 1, 2, 3)),
    "al-alternate": (f"--method al {HYBRID}", (0, 1)),
    "al-r2-alternate": (f"--method al {HYBRID} {DS}", (0, 1)),
    "penalty": (f"--method penalty {ALONE}", (0, 1)),
    "penalty-alternate": (f"--method penalty {HYBRID}", (0, 1)),
    "penalty-r2": (f"--method penalty {ALONE} {DS}", (0,)),
    "al-r2-detail-0": ("--method al --schedule parallel --downsample 2 --detail 0", (0, 1)),
    "al-r2-alternate-detail-0": (f"--method al {HYBRID} --downsample 2 --detail 0", (0, 1)),
    "penalty-r2-detail-0": ("--method penalty --schedule parallel --downsample 2 --detail 0", (0,)),
    "penalty-joint": (
        "--method penalty --order joint --beta 100 --trust 0.3 --state-step 0.4 --clip 1 --schedule parallel",
        (0,),
    ),
    "serial-no-da-wd-1e-3": (f"--method serial --augment none {DECAY}", (0,)),
    "al-wd-1e-3": (f"--method al {ALONE} {DECAY}", (0, 1, 2, 3, 4, 5)),
    "al-r2-wd-1e-3": (f"--method al {ALONE} {DS} {DECAY}", (0, 1, 2, 3, 4, 5)),
    "al-r2-wd-1e-3-detail-0.3": (f"--method al {ALONE} --downsample 2 {DECAY} --detail 0.3", (0, 1, 2, 3, 4, 5)),
    "al-r2-wd-1e-3-detail-0.1": (f"--method al {ALONE} --downsample 2 {DECAY} --detail 0.1", (4, 5)),
    "al-alternate-wd-1e-3": (f"--method al {HYBRID} {DECAY}", (0, 1)),
    "al-r2-alternate-wd-1e-3": (f"--method al {HYBRID} {DS} {DECAY}", (0, 1)),
    "al-r2-alternate-wd-1e-3-detail-0.3": (f"--method al {HYBRID} --downsample 2 {DECAY} --detail 0.3", (0, 1)),
    "serial-no-da-lr-0.2": ("--method serial --augment none --lr 0.2", (0,)),
    "al-lr-0.2": (f"--method al {ALONE} --lr 0.2", (0, 1, 2, 3, 4, 5)),
    "al-r2-lr-0.2": (f"--method al {ALONE} {DS} --lr 0.2", (0, 1)),
    "al-alternate-lr-0.2": (f"--method al {HYBRID} --lr 0.2", (0, 1)),
    "al-r2-alternate-lr-0.2": (f"--method al {HYBRID} {DS} --lr 0.2", (0,)),
    "al-shrink-1.2": (f"--method al {ALONE} --shrink 1.2", (2,)),
    "al-shrink-1.5-clip-1": (f"--method al {ALONE} --shrink 1.5 --clip 1", (2,)),
    # what else might bring AL alone nearer to serial training
    "al-lr-0.2-warmup-2": (f"--method al {ALONE} --lr 0.2 --warmup 2", (4, 5)),
    "al-wd-2e-3": (f"--method al {ALONE} --weight-decay 2e-3", (4, 5)),
    "al-beta-3-to-1": (f"--method al {ALONE} --beta 3 --beta-final 1", (4, 5)),
    "al-beta-2": (f"--method al {ALONE} --beta 2", (4, 5)),
    "al-beta-4": (f"--method al {ALONE} --beta 4", (4, 5)),
}


if __name__ == "__main__":
    main(COMMON, RUNS, __doc__, Path("runs/resnet20"))
