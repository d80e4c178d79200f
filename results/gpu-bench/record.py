"""Record the benchmark of one GPU: every network and batch size, and states on the host against states on the GPU.

    python results/gpu-bench/record.py --data-dir data [--only resnet110-b128 ...] [--seconds 3600] [--out FOLDER]

The file of a bench is named after its problem and the commit, as in `resnet110-b128-d9fc585.json`.
Wants a GPU to itself. Most of the time goes to the compiler, which keeps what it has made: the second time is quicker.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from parlay.run import records

HERE = Path(__file__).parent
DEEP = "--dataset cifar10 --model resnet110 --batch-size 128 --rounds 7 --steps 40"
BENCHES = {
    # name: flags, the most telling first
    "resnet110-b128": DEEP,
    "resnet110-b128-penalty": f"{DEEP} --method penalty",
    "resnet110-b64": "--dataset cifar10 --model resnet110 --batch-size 64 --rounds 7 --steps 40",
    "wrn-40-10-b128": "--dataset cifar100 --model wrn-40-10 --batch-size 128 --rounds 5 --steps 10",
    "resnet56-b128": "--dataset cifar10 --model resnet56 --batch-size 128 --rounds 5 --steps 40",
    "resnet110-b32": "--dataset cifar10 --model resnet110 --batch-size 32 --rounds 5 --steps 40",
    "resnet110-b256": "--dataset cifar10 --model resnet110 --batch-size 256 --rounds 5 --steps 20",
    "resnet110-b512": "--dataset cifar10 --model resnet110 --batch-size 512 --rounds 5 --steps 10",
}
STORES = (
    "--dataset cifar10 --model resnet110 --method al --stages 3 --partition 15,31 --epochs 14 --batch-size 128 "
    "--schedule parallel --augment none --store-dtype float32 --compile on --checkpoint-every 0"
)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data-dir", default="data")
    ask.add_argument("--out", type=Path, default=HERE)
    ask.add_argument("--only", nargs="*", default=[*BENCHES, "stores"])
    ask.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    given = ask.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in given.only:
        if time.monotonic() - began > given.seconds:
            print(f"left out: {name}", flush=True)
            continue
        stores(given.out, given.data_dir) if name == "stores" else bench(name, given.out)
        print(f"{time.monotonic() - began:5.0f} s", flush=True)


def bench(name: str, out: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    file = out / f"{name}-{commit or 'unknown'}.json"
    parlay(f"bench --device cuda {BENCHES[name]} --store-dtype bfloat16 --out {file}", out / f"{name}.log")
    for row in json.loads(file.read_text())["rows"] if file.exists() else []:
        print(f"{name:<16} {row['system']:<22} K = {row['stages']}  {row['step_ms']:7.2f} ms  {row['speedup']:.2f}")


def stores(out: Path, data: str) -> None:
    """The same run with its states on the GPU and on the host; the last ten epochs of each count."""
    found: dict[str, list[float]] = {}
    summaries = {}
    for kind in ("device", "host"):
        run = out / f"stores-{kind}"
        parlay(f"train {STORES} --store {kind} --data-dir {data} --out {run}", out / f"{run.name}.log")
        rows = records.read_records(run / "records.jsonl")
        settled = rows[4:]  # recorded by then, and all memory in place
        found[kind] = [row["seconds"] - row["refresh_seconds"] for row in settled]
        summaries[kind] = json.loads((run / "summary.json").read_text())
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    means = {kind: statistics.mean(seconds) for kind, seconds in found.items()}
    told = {
        "epoch_seconds": found,
        "ratio": medians["host"] / medians["device"],
        "ratio_of_means": means["host"] / means["device"],
        "auxiliary_bytes": summaries["host"]["auxiliary_bytes"],
        "environment": summaries["host"]["environment"],
        "command": f"parlay train {STORES} --store host (and --store device)",
    }
    records.write_json(out / "stores.json", told)
    print(
        f"stores: {told['epoch_seconds']} host / device {told['ratio']:.3f}, by means {told['ratio_of_means']:.3f}",
        flush=True,
    )


def parlay(words: str, log: Path) -> None:
    command = [sys.executable, "-m", "parlay.cli", *shlex.split(words)]
    with log.open("wb") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "4"}).returncode
    if code:
        print(f"exit {code}: parlay {words}\n{log.read_text(errors='replace')[-800:]}", flush=True)


if __name__ == "__main__":
    main()
