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

import home_compare  # noqa: E402
import home_queue  # noqa: E402
import home_records  # noqa: E402
import home_rows  # noqa: E402

from parlay.errors import InputError  # noqa: E402

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
        return fail(wrong)
    if given.only in (None, "accuracy"):
        try:
            home_queue.make(home_rows.jobs(given.digits), given.out, given.data_dir, home_queue.Shown())
        except InputError as error:
            return fail(str(error))
    if given.only in (None, "time"):
        import home_speed  # torch, which a comparison does without

        wrong = home_speed.refused()
        if wrong and given.only == "time":
            return fail(wrong)
        print_line(wrong or "timing, some minutes: nothing else should run now")
        for problem in home_rows.problems(given.digits) if not wrong else ():
            with home_queue.console().status("") as status:  # only seen on a terminal
                home_speed.measure(problem, given.out, status.update)
            print_line(f"{home_speed.file(given.out, problem)} is there")
    if given.only in (None, "compare"):
        if not given.out.is_dir():
            return fail(f"no folder {given.out} to compare: write --out with one of this command, or no --only")
        print("\n".join(home_compare.compare(home_records.read(given.out), recorded())))
    return 0


def recorded() -> home_records.Table:
    import records

    return home_records.read(records.runs(HERE.name))


def print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fail(text: str) -> int:
    print_line(f"run.py: {text}")
    return 2


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
