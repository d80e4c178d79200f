"""A table to check at home: digits and a part of MNIST on two cores, every method, K = 2 and 3, five seeds.

    parlay data fetch mnist --data-dir data       once; or leave MNIST out with --digits
    python results/laptop/run.py

Runs that lie in --out are not made again, so a stopped command goes on where it was. At its end it says where what came
out differs from the recorded table.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]

import home_queue  # noqa: E402
import home_rows  # noqa: E402

PARTS = ("accuracy", "time", "compare")


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--digits", action="store_true", help="the digits alone: a quarter of the time, no files needed")
    ask.add_argument("--out", type=Path, default=Path("runs/laptop"), metavar="DIR", help="default: runs/laptop")
    ask.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="of MNIST; default: data")
    ask.add_argument("--only", choices=PARTS, help="one of the three things that this does, in place of all")
    given = ask.parse_args()
    wrong = refused(given.out, given.data_dir, given.digits or given.only in ("time", "compare"))
    if wrong:
        print(f"run.py: {wrong}", file=sys.stderr)
        return 2
    if given.only in (None, "accuracy"):
        home_queue.make(home_rows.jobs(given.digits), given.out, given.data_dir, home_queue.Shown())
    return 0


def refused(out: Path, data_dir: Path, digits: bool) -> str | None:
    """What is wrong with what was asked for, and what to write instead."""
    if out.exists() and not out.is_dir():
        return f"{out} is a file: write --out with a folder"
    if digits:
        return None
    from parlay.data.layouts import find

    if find("mnist", data_dir) is None:
        fetch = f"parlay data fetch mnist --data-dir {data_dir}"
        return f"no files of MNIST in the folder {data_dir}: get them with `{fetch}`, or write --digits"
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
