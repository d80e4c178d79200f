"""The main job on the embedded data: ResNet-20 on 8x8 digits, serially and with its layers in parallel.

Nine runs of the same network, data, seed and epochs, and a forecast for a device per stage; a table at the end and a
page to open.
"""

import argparse
import shutil
import time
from pathlib import Path

from parlay import Recipe, progress, report, run
from parlay.plan import plan
from parlay.records import write_json

METHODS = {
    "serial": {"method": "serial"},
    "penalty": {"method": "penalty", "schedule": "parallel"},
    "al": {"method": "al", "schedule": "parallel"},
    "ds-sph-al": {"method": "al", "schedule": "alternate:4:1", "downsample": 2},
    "replay": {"method": "replay", "schedule": "parallel"},
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("runs/demo"))
    ask.add_argument("--epochs", type=int, default=15)
    given = ask.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    began = time.monotonic()
    folders = []
    for name, keys in METHODS.items():
        for stages in (1,) if name == "serial" else (2, 3):
            folders.append(given.out / (name if name == "serial" else f"{name}-k{stages}"))
            print(f"\n{folders[-1].name}", flush=True)
            recipe = Recipe(stages=stages, epochs=given.epochs, checkpoint_every=0, **keys)
            run.train(recipe, folders[-1], resume=False, progress=progress.for_terminal())
    print(f"\n{len(folders)} runs in {time.monotonic() - began:.0f} s\n")
    write_json(given.out / "plan.json", plan(Recipe(stages=3, epochs=given.epochs)))
    report.report([*folders, given.out / "plan.json"], given.out / "report.html")


if __name__ == "__main__":
    main()
