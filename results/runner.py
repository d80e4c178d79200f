"""Many runs of `parlay train` from one table of rows: what the `run.py` of resnet20 and of streaming share.

Every run is a process of its own with a folder of its own, `NAME-sSEED`; one that holds a summary is not run again.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

Rows = dict[str, tuple[str, tuple[int, ...]]]
"""Name: flags and seeds."""


def main(common: str, table: Rows, text: str | None, out: Path) -> None:
    ask = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data-dir", default="data")
    ask.add_argument("--out", type=Path, default=out)
    ask.add_argument("--at-once", type=int, default=4)
    ask.add_argument("--seconds", type=float, default=float("inf"), help="stop what is still running after so long")
    ask.add_argument("--only", nargs="*", default=list(table), help="rows to run, or rows-sSEED")
    ask.add_argument("--more", default="", help="flags for all runs, such as `--compile on`")
    given = ask.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    every = [
        (name, f"{name}-s{seed}", f"{flags} --seed {seed}") for name, (flags, seeds) in table.items() for seed in seeds
    ]
    waiting = [(run, flags) for name, run, flags in every if name in given.only or run in given.only]
    waiting = [(name, flags) for name, flags in waiting if not (given.out / name / "summary.json").exists()]
    began, running = time.monotonic(), dict[str, subprocess.Popen[bytes]]()
    while (waiting or running) and time.monotonic() - began < given.seconds:
        while waiting and len(running) < given.at_once:
            name, flags = waiting.pop(0)
            words = f"{common} {flags} {given.more} --data-dir {shlex.quote(given.data_dir)}"
            running[name] = start(name, words, given.out)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(name).returncode
            last = (given.out / f"{name}.log").read_text().strip().splitlines()[-1]
            print(f"{time.monotonic() - began:6.0f} s  {name:<28} exit {code}  {last}", flush=True)
        time.sleep(0.5)
    for name, process in running.items():
        process.terminate()
        print(f"stopped: {name}", flush=True)
    for process in running.values():
        process.wait()


def start(name: str, flags: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "parlay.cli", "train", *shlex.split(flags), "--out", str(out / name)]
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
