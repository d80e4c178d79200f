"""Record the benchmark: every network and batch size in one interleaved run, and what `parlay plan` forecasts of it.

python results/cpu-bench/record.py [--rounds 9] [--steps 4]

Wants a quiet machine with two cores or more; takes some 25 minutes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROBLEMS = [(model, batch) for model in ("resnet20", "resnet56") for batch in (64, 128)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plans", type=int, default=3)
    parser.add_argument("--only-plans", action="store_true", help="keep the benchmark as it was recorded")
    parser.add_argument("--only", nargs="*", default=[f"{model}-b{batch}" for model, batch in PROBLEMS])
    given = parser.parse_args()
    for model, batch in PROBLEMS:
        name = f"{model}-b{batch}"
        if name not in given.only:
            continue
        file = Path(os.path.relpath(HERE / f"{name}.json"))
        common = ["--model", model, "--batch-size", str(batch), "--stages", "2", "--device", "cpu"]
        if not given.only_plans:
            parlay("bench", *common, "--rounds", str(given.rounds), "--steps", str(given.steps), "--out", str(file))
        cuts = json.loads(file.read_text())["cuts"]
        processes = ["--dataset", "cifar10", "--partition", cuts, "--engine", "distributed", "--schedule", "parallel"]
        told = [parlay("plan", *common, *processes, "--json") for _ in range(given.plans)]
        (HERE / f"{name}-plan.json").write_text(json.dumps([json.loads(text) for text in told], indent=2) + "\n")


def parlay(*words: str) -> str:
    print("parlay", *words, file=sys.stderr, flush=True)
    return subprocess.run(
        [sys.executable, "-m", "parlay.cli", *words], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


if __name__ == "__main__":
    main()
