"""`parlay train`: one run, in this process, as one process of several, or as the one that watches over them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay import faults, process
from parlay.cli.exits import EXIT_CODES, FAILED, OutOfMemory, say_no
from parlay.cli.flags import (
    add_command,
    add_flag,
    add_json,
    add_recipe_flags,
    given_keys,
    recipe_keys,
    whole_number,
    with_stages,
)
from parlay.config.keys import check, said
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.launch import rank
from parlay.run.records import is_begun

if TYPE_CHECKING:
    from parlay.cli.flags import Commands
    from parlay.run.outcome import Result
    from parlay.run.progress import Progress


def add(commands: Commands) -> None:
    sub = add_command(commands, "train", _train, "train by one method, write a run folder")
    add_recipe_flags(sub, auto=True)
    add_json(sub)
    sub.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    sub.add_argument("--report", action="store_true", help="write report.html into the run folder at the end")
    lost = "begin so often again from the last checkpoint when a stage is lost (distributed) [0]"
    add_flag(sub, "max_restarts", lost, False, type=whole_number, default=0, metavar="N")
    meet = "where the processes meet (distributed) [a free one]"
    add_flag(sub, "port", meet, False, type=whole_number, metavar="P")


def _train(given: argparse.Namespace) -> int:
    process.end_with_launcher()
    check("max-restarts", given.max_restarts, "int", {"least": 0, "most": 1000})
    out = Path(given.out) if given.out else None
    base = recipe_keys(given, out)
    recipe, tried = with_stages(base, given_keys(given))
    if tried:
        print(f"parlay: {tried[0]}", file=sys.stderr)
    if process.is_rank() and (recipe.engine == "distributed" or (recipe.engine == "auto" and process.world_size() > 1)):
        return _train_rank(given, replace(recipe, engine="distributed"))
    out = Path(recipe.out) if recipe.out else _new_folder(recipe)
    if not given.resume and is_begun(out):
        raise InputError(f"{out} holds a run already: write --resume to go on with it, or another --out")
    if recipe.engine == "distributed":
        return _launch(given, recipe, out)
    _refuse_launching(given)
    faults.arm(_stages(recipe))
    from parlay.run.progress import for_terminal

    result = fit(recipe, out, given.resume, for_terminal())
    return _end(result.summary, out, given)


def _train_rank(given: argparse.Namespace, recipe: Recipe) -> int:
    """One process of several; all of them come here with the same words."""
    stages = _stages(recipe)
    rank.begin(stages, recipe.replicas)
    faults.arm(stages)
    if recipe.out is None:
        raise InputError("several processes need to know their run folder: write --out DIR")
    out, first, resume = Path(recipe.out), process.rank() == 0, given.resume or process.restarted()
    if first and not resume and is_begun(out):
        raise InputError(f"{out} holds a run already: write --resume to go on with it, or another --out")
    from parlay.run.progress import Silent, for_terminal

    result = fit(recipe, out, resume, for_terminal() if first else Silent())
    rank.leave(rank.ExitReport(EXIT_CODES[result.status], result.status))
    if first and not rank.supervised():
        return _end(result.summary, out, given)
    return EXIT_CODES[result.status]


def _launch(given: argparse.Namespace, recipe: Recipe, out: Path) -> int:
    """A process for every stage of the run, and this one to watch over them."""
    port = given.port if given.port is not None else process.whole_number("MASTER_PORT", 0) or None
    if port is not None and not 0 < port < 1 << 16:
        raise InputError(f"port is {said(port)}: write a number from 1 to {(1 << 16) - 1}, or none for a free one")
    from parlay.launch import summary
    from parlay.launch.supervise import Launch

    return _end(summary.train(Launch(recipe, out, given.resume, port, given.max_restarts)), out, given)


def fit_any(recipe: Recipe, out: Path, resume: bool, progress: Progress) -> dict[str, Any]:
    """By the engine that the recipe asks for; the run folder is left as `train` leaves it."""
    if recipe.engine == "distributed":
        from parlay.launch.summary import train
        from parlay.launch.supervise import Launch

        return train(Launch(recipe, out, resume))
    return fit(recipe, out, resume, progress).summary


def fit(recipe: Recipe, out: Path, resume: bool, progress: Progress) -> Result:
    from parlay.process import keep_freed_memory
    from parlay.run import setup

    keep_freed_memory()
    try:
        return setup.train(recipe, out, resume, progress)
    except RuntimeError as error:
        # CUDA's has a class of its own, the CPU's only its text
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        smaller = max(recipe.batch_size // 2, 1)
        line = f"out of memory: write --batch-size {smaller}, --store host or --downsample 2"
        raise OutOfMemory(line) from error


def _refuse_launching(given: argparse.Namespace) -> None:
    for name, value in (("max-restarts", given.max_restarts), ("port", given.port)):
        if value:
            raise InputError(f"--{name} is for several processes: leave it out, or write --engine distributed")


def _stages(recipe: Recipe) -> int:
    """Serial training is not cut."""
    return 1 if recipe.method == "serial" else recipe.stages


def _new_folder(recipe: Recipe) -> Path:
    name = f"{recipe.dataset}-{recipe.model}-{recipe.method}-k{recipe.stages}-s{recipe.seed}"
    paths = (Path("runs") / (f"{name}-{i}" if i else name) for i in range(10_000))
    return next(path for path in paths if not path.exists())


def _end(summary: dict[str, Any], out: Path, given: argparse.Namespace) -> int:
    """The report where it is asked for, and the result on standard output or the line that tells it."""
    from parlay.run.records import dumps

    if given.report and summary["epochs"]:
        from parlay import report

        report.write([out], out / "report.html", out.name)
    if given.json:
        print(dumps(summary, indent=2))
    if summary["status"] == "failed":
        return say_no(summary["message"], FAILED)
    if not given.json:
        _tell(summary, out)
    return EXIT_CODES[summary["status"]]


def _tell(summary: dict[str, Any], out: Path) -> None:
    status = summary["status"]
    score = f"test accuracy {summary['test_accuracy']:.2f} %" if summary["test_accuracy"] is not None else ""
    if not score and summary["test_loss"] is not None:
        score = f"test loss {summary['test_loss']:.4f}"
    told = [status, score, summary["message"], f"run folder {out}"]
    if status == "interrupted":
        told.append(f"go on with: parlay train --resume --out {out}")
    print("; ".join(part for part in told if part), file=sys.stdout if status == "finished" else sys.stderr)
