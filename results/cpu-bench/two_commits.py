"""Two commits of Parlay timed in turn on two cores: what a change of the engine costs or brings.

    git worktree add /tmp/old OLD_COMMIT
    python results/cpu-bench/two_commits.py --old /tmp/old --new . --out results/cpu-bench/two-commits.json

Each round trains every row once with either commit, in changing order; each is a `parlay train` of its own on one
thread per process. What counts is the shorter of its parallel epochs (of `serial` its serial ones), as the records say.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = (
    "--model resnet20 --dataset synthetic --synthetic-shape 3,32,32 --synthetic-samples 1280 --batch-size 64 "
    "--device cpu --epochs 3 --judge-every 3 --checkpoint-every 0"
)
ROWS = {
    "serial": "--method serial",
    "al, one process": "--method al --stages 2 --schedule parallel --partition 4",
    "al": "--method al --stages 2 --schedule parallel --partition 4 --engine distributed",
    "penalty": "--method penalty --stages 2 --schedule parallel --partition 4 --engine distributed",
    "replay": "--method replay --stages 2 --schedule parallel --partition 4 --engine distributed",
}


def seconds(source: Path, words: str) -> float:
    """Of the shortest epoch of the kind that the run is about."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        program = [sys.executable, "-m", "parlay.cli", "train", *COMMON.split(), *words.split(), "--out", str(out)]
        subprocess.run(program, env=environment, check=True, capture_output=True, cwd=folder)
        rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    wanted = "serial" if "--method serial" in words else "parallel"
    return float(min(row["seconds"] - row["refresh_seconds"] for row in rows if row["phase"] == wanted))


def commit(source: Path) -> str:
    words = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--old", type=Path, required=True)
    ask.add_argument("--new", type=Path, required=True)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--out", type=Path, required=True)
    given = ask.parse_args()
    sources = {"old": given.old.resolve(), "new": given.new.resolve()}
    found: dict[str, dict[str, list[float]]] = {row: {"old": [], "new": []} for row in ROWS}
    for count in range(given.rounds):
        for row, words in ROWS.items():
            for which in ("old", "new") if count % 2 == 0 else ("new", "old"):
                found[row][which].append(seconds(sources[which], words))
        print(f"round {count + 1} of {given.rounds}", flush=True)
    ratios = {row: [b / a for a, b in zip(one["old"], one["new"], strict=True)] for row, one in found.items()}
    for row, values in ratios.items():
        print(f"{row:<18} new / old {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    told = {
        "commits": [commit(sources["old"]), commit(sources["new"])],
        "command": "python results/cpu-bench/two_commits.py --old OLD --new NEW",
        "common": COMMON,
        "rows": {row: {"words": ROWS[row], **one} for row, one in found.items()},
        "environment": {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__},
    }
    given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
