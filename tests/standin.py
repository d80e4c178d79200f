"""A rank without torch for tests of the launcher: it beats, meets the fault of PARLAY_FAULT, and ends as a real one.

`STANDIN=steps:20,survivors:blame`: how many steps, and whether a rank notices that another one has gone (`blame`, it
fails with what gloo says) or not (`blocked`).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from parlay import faults, process, signs
from parlay.launch import worker

STEP = 0.02


def main() -> int:
    ways = dict(way.split(":") for way in os.environ.get("STANDIN", "").split(",") if way)
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    rank, ranks = process.rank(), int(os.environ["WORLD_SIZE"])
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    process.end_with_launcher()
    worker.begin(ranks)
    faults.arm(ranks)
    here = out / f"here-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    here.write_text(str(os.getpid()))
    print(f"rank {rank} speaks")
    if "wrong" in ways:
        worker.leave(worker.Word(2, error=f"nothing at {ways['wrong']}: write another"))
        return 2
    for step in range(int(ways.get("steps", 20))):
        signs.beat(step)
        faults.reach(step, (rank,))
        if came:
            worker.leave(worker.Word(1, "interrupted"))
            return 1
        if ways.get("survivors") == "blame" and any(_gone(out, other) for other in range(ranks) if other != rank):
            line = "RuntimeError: [../third_party/gloo/pair.cc] Connection closed by peer [127.0.0.1]:4711"
            worker.leave(worker.Word(1, error=line))
            return 1
        _wait(step, rank, ranks, out)
    if rank == 0:
        summary = {"status": "finished", "message": "", "epochs": 0, "test_accuracy": 50.0, "test_loss": 1.0}
        (out / "summary.json").write_text(json.dumps(summary))
    worker.leave(worker.Word(0, "finished"))
    return 0


def _wait(step: int, rank: int, ranks: int, out: Path) -> None:
    """Until all have come so far, as neighbours do."""
    time.sleep(STEP)
    (out / f"step-{rank}").write_text(str(step))
    began = time.monotonic()
    while any(_at(out, other) < step for other in range(ranks)):
        if any(_gone(out, other) for other in range(ranks) if other != rank):
            return
        time.sleep(0.01)
        now = time.monotonic()
        signs.waited(now - began)
        began = now


def _at(out: Path, rank: int) -> int:
    try:
        return int((out / f"step-{rank}").read_text() or -1)
    except FileNotFoundError:
        return -1


def _gone(out: Path, rank: int) -> bool:
    """Has that rank ended? One that is not waited for yet is a zombie."""
    try:
        pid = int((out / f"here-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").read_text() or 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else "S"
    except FileNotFoundError as error:
        return "/proc/" in str(error.filename)
    return state == "Z"


if __name__ == "__main__":
    worker.end(main())
