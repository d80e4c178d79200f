"""A rank without torch for tests of the launcher: it beats, meets the fault of PARLAY_FAULT, and ends as a real one.

`STANDIN=steps:20,seconds:0.02,survivors:blame`: how many steps, of how many seconds, and whether a rank notices that
another one has gone (`blame`, it fails with what gloo says) or not (`blocked`).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from parlay import faults, process, signs
from parlay.launch.rank import ExitReport, begin, end, leave

ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]


def main() -> int:
    ways = dict(way.split(":") for way in os.environ.get("STANDIN", "").split(",") if way)
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    rank, ranks = process.rank(), process.world_size()
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    process.end_with_launcher()
    begin(ranks, 1)
    faults.arm(ranks)
    (out / f"here-{rank}-{ATTEMPT}").write_text(str(os.getpid()))
    print(f"rank {rank} speaks", flush=True)
    if "wrong" in ways:
        return _leave(2, message=f"nothing at {ways['wrong']}: write another")
    for step in range(int(ways.get("steps", 20))):
        signs.beat(step)
        faults.reach(step, (rank,))
        if came:
            return _leave(1, "interrupted")
        time.sleep(float(ways.get("seconds", 0.02)))
        _wait(step, rank, ranks, out)
        if ways.get("survivors") == "blame" and any(_gone(out, other) for other in range(ranks)):
            return _leave(1, message="RuntimeError: [../third_party/gloo/pair.cc] Connection closed by peer [::1]:4711")
    if rank == 0:
        summary = {"status": "finished", "message": "", "epochs": 0, "test_accuracy": 50.0, "test_loss": 1.0}
        (out / "summary.json").write_text(json.dumps(summary))
    return _leave(0, "finished")


def _leave(code: int, status: str = "", message: str = "") -> int:
    leave(ExitReport(code, status, message))
    return code


def _wait(step: int, rank: int, ranks: int, out: Path) -> None:
    """Until all have come so far, as neighbours do."""
    (out / f"step-{rank}").write_text(str(step))
    began = time.monotonic()
    while any(_at(out, other) < step and not _gone(out, other) for other in range(ranks)):
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
        pid = int((out / f"here-{rank}-{ATTEMPT}").read_text() or 0)
        return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError) as error:
        return "/proc/" in str(error.filename)


if __name__ == "__main__":
    end(main())
