"""`parlay demo`: the main job on the embedded data in two minutes, with a page to open."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay import process
from parlay.cli.exits import FAILED, FINISHED, say_no
from parlay.cli.flags import add_command, add_json, whole_number
from parlay.cli.train import fit
from parlay.config.keys import check
from parlay.errors import InputError

if TYPE_CHECKING:
    from parlay.cli.flags import Commands
    from parlay.config.recipe import Recipe
    from parlay.run.progress import Progress

EPOCHS = 15
LEFT_TO_THE_PAGE = ("devices", "stages wait")  # a terminal may have 80 columns


def add(commands: Commands) -> None:
    sub = add_command(
        commands, "demo", _demo, "train on the embedded digits in five ways, time two cores, write a page: two minutes"
    )
    sub.add_argument("--out", default="runs/demo", metavar="DIR", help="folder of the demo (default: runs/demo)")
    sub.add_argument(
        "--epochs", type=whole_number, default=EPOCHS, metavar="E", help=f"epochs of every run (default: {EPOCHS})"
    )
    add_json(sub)


def _demo(given: argparse.Namespace) -> int:
    if process.is_rank():
        raise InputError("demo starts its processes itself: write parlay demo without torchrun")
    check("epochs", given.epochs, "int", {"least": 1, "most": 1_000_000})
    from parlay.demo import folder, runs
    from parlay.run.progress import for_terminal

    with folder.taken(Path(given.out), runs.ROWS) as out:
        planned = runs.planned(out, given.epochs)
        status = runs.train(planned, _fit, for_terminal())
        if status == "interrupted":
            folder.write(out, {"status": status})
            return say_no("interrupted: the same command begins again", FAILED)
        found = [one.folder for one in planned if (one.folder / "records.jsonl").is_file()]
        if not found:
            return say_no("no run came to the end of an epoch: the lines above say why", FAILED)
        with redirect_stdout(sys.stderr if given.json else sys.stdout):
            told = _tell(out, found, given)
        told = {"status": "failed" if told["message"] else status, **told}
        folder.write(out, told)
    if given.json:
        from parlay.run.records import dumps

        print(dumps(told, indent=2))
    if told["message"]:
        return say_no(told["message"], FAILED)
    return FINISHED if told["status"] == "finished" else FAILED


def _fit(recipe: Recipe, out: Path, resume: bool, progress: Progress) -> dict[str, Any]:
    return fit(recipe, out, resume, progress).summary


def _tell(out: Path, found: list[Path], given: argparse.Namespace) -> dict[str, Any]:
    """The table of the runs, the speeds and the page, each as soon as it is there."""
    from parlay import report
    from parlay.demo import runs, speed
    from parlay.report import tables
    from parlay.report.load import read_bench
    from parlay.run.progress import for_terminal
    from parlay.run.records import write_json

    told: dict[str, Any] = {"command": given.line, "epochs": given.epochs, "message": "", "rows": report.table(found)}
    report.show({one: runs.ROWS[one.name][0] for one in found})
    parts = [*found]
    reason, measured = speed.why_not(), None
    if reason is None:
        try:
            measured = speed.measure(for_terminal(), given.line)
        except (RuntimeError, OSError) as error:  # a process was lost, or none could be started: the runs are there
            told["message"] = f"no speed could be timed: {' '.join(str(error).split())}"
    if measured is not None:
        write_json(out / "bench.json", measured)
        parts.append(out / "bench.json")
        read = read_bench(measured, out / "bench.json")
        columns = [column for column in tables.bench(read) if column.title not in LEFT_TO_THE_PAGE]
        tables.show(f"{tables.bench_title(read)[0]}, on two cores", columns)
    told["speedups"] = {row["system"]: row["speedup"] for row in measured["rows"]} if measured else {}
    told["says"] = [reason] if reason else measured["says"] if measured else []
    for sentence in told["says"]:
        tables.say(sentence)
    page = out / "report.html"
    with redirect_stdout(StringIO()):  # its tables stand above
        report.report(parts, page)
    tables.say(f"report: {page}")
    return {**told, "page": str(page)}
