"""The command line. Flags come from the recipe's fields; torch is loaded only once there is something to run.

Exit codes: 0 finished, 1 the run failed, 2 wrong input, answered in one line that says what to write instead.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parlay import __version__, faults
from parlay.errors import InputError, StageLost
from parlay.launch import places, worker
from parlay.recipe import AUTO, DATASETS, METHODS, Recipe, flag, make_recipe, nearest, read_recipe

if TYPE_CHECKING:
    from parlay.progress import Progress
    from parlay.training import Result

FINISHED, FAILED, WRONG = 0, 1, 2
EXIT_CODES = {"finished": FINISHED, "interrupted": FAILED, "diverged": FAILED, "failed": FAILED}


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    try:
        parser = _parser()
        _check_command(parser, words)
        given, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(parser, given, unknown[0])
        given.line = shlex.join(["parlay", *words])
        return int(given.run(given))
    except InputError as error:
        return _say_no(str(error), WRONG, error)
    except KeyboardInterrupt:
        return _say_no("interrupted", FAILED)
    except MemoryError as error:
        line = f"out of memory ({error}): write --store file, --downsample 2 or a smaller --batch-size"
        return _say_no(line, FAILED, error)
    except (_OutOfMemory, StageLost) as error:
        return _say_no(str(error), FAILED, error)
    except BrokenPipeError:
        return FAILED
    except Exception as error:  # the last resort: a line for the user, the rest for whoever asks for it
        if os.environ.get("PARLAY_DEBUG") == "1":
            traceback.print_exc()
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return _say_no(f"{what} (PARLAY_DEBUG=1 shows where)", FAILED, error)


class _OutOfMemory(Exception):
    """With what would take less."""


def _train(given: argparse.Namespace) -> int:
    out = Path(given.out) if given.out else None
    base = _recipe_keys(given, out)
    recipe, tried = _with_stages(base, _given_keys(given))
    if tried:
        print(f"parlay: {tried[0]}", file=sys.stderr)
    if places.is_worker() and (recipe.engine == "distributed" or (recipe.engine == "auto" and places.world_size() > 1)):
        return _train_rank(given, replace(recipe, engine="distributed"))
    out = Path(recipe.out) if recipe.out else _new_folder(recipe)
    if not given.resume and (out / "records.jsonl").exists():
        raise InputError(f"{out} holds a run already: write --resume to go on with it, or another --out")
    if recipe.engine == "distributed":
        return _launch(given, recipe, out)
    _refuse_launching(given)
    faults.arm(_stages(recipe))
    from parlay.progress import for_terminal

    result = _fit(recipe, out, given.resume, for_terminal())
    return _end(result.summary, out, given.json)


def _train_rank(given: argparse.Namespace, recipe: Recipe) -> int:
    """One process of several; all of them come here with the same words."""
    stages = _stages(recipe)
    places.check_world(stages, recipe.replicas)
    worker.begin(stages * recipe.replicas)
    faults.arm(stages)
    if recipe.out is None:
        raise InputError("several processes need to know their run folder: write --out DIR")
    out, first, resume = Path(recipe.out), places.rank() == 0, given.resume or places.restarted()
    if first and not resume and (out / "records.jsonl").exists():
        raise InputError(f"{out} holds a run already: write --resume to go on with it, or another --out")
    from parlay.progress import Silent, for_terminal

    result = _fit(recipe, out, resume, for_terminal() if first else Silent())
    worker.leave(worker.Word(EXIT_CODES[result.status], result.status))
    if first and not worker.supervised():
        return _end(result.summary, out, given.json)
    return EXIT_CODES[result.status]


def _launch(given: argparse.Namespace, recipe: Recipe, out: Path) -> int:
    """A process for every stage of the run, and this one to watch over them."""
    from parlay.launch import command
    from parlay.launch.supervisor import Launch

    port = given.port if given.port is not None else places.whole_number("MASTER_PORT", 0) or None
    if port is not None and not 0 < port < 1 << 16:
        raise InputError(f"port is {port}: write a number from 1 to {(1 << 16) - 1}, or none for a free one")
    summary = command.train(Launch(recipe, out, given.resume, port, given.max_restarts))
    return _end(summary, out, given.json)


def _refuse_launching(given: argparse.Namespace) -> None:
    for name, value in (("max-restarts", given.max_restarts), ("port", given.port)):
        if value:
            raise InputError(f"--{name} is for several processes: leave it out, or write --engine distributed")


def _stages(recipe: Recipe) -> int:
    """Serial training is not cut."""
    return 1 if recipe.method == "serial" else recipe.stages


def _fit(recipe: Recipe, out: Path, resume: bool, progress: Progress) -> Result:
    from parlay import run
    from parlay.memory import keep_freed_memory

    keep_freed_memory()
    try:
        return run.train(recipe, out, resume, progress)
    except RuntimeError as error:
        # CUDA's has a class of its own, the CPU's only its text
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        smaller = max(recipe.batch_size // 2, 1)
        line = f"out of memory: write --batch-size {smaller}, --store host or --downsample 2"
        raise _OutOfMemory(line) from error


def _end(summary: dict[str, Any], out: Path, json: bool) -> int:
    """The report, and the result on standard output or the line that tells it."""
    from parlay import report
    from parlay.records import dumps

    if summary["epochs"]:
        report.write([out], out / "report.html", out.name)
    if json:
        print(dumps(summary, indent=2))
    if summary["status"] == "failed":
        return _say_no(summary["message"], FAILED)
    if not json:
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


def _plan(given: argparse.Namespace) -> int:
    recipe, tried = _with_stages(_recipe_keys(given, None), _given_keys(given))
    from parlay.plan import plan
    from parlay.records import dumps

    forecast = plan(recipe)
    if tried:
        forecast["tried"] = tried[1]
    if given.json:
        print(dumps(forecast, indent=2))
        return FINISHED
    of = f"{forecast['blocks']} blocks, {forecast['parameters']:,} parameters"
    print(f"{forecast['model']} on {forecast['dataset']}: {of}")
    if tried:
        print(tried[0])
    bounds = [0, *forecast["cuts"], forecast["blocks"]]
    arriving = ["the input", *("x".join(map(str, shape)) for shape in forecast["interfaces"])]
    for k, (ms, shape) in enumerate(zip(forecast["stage_ms"], arriving, strict=True)):
        print(f"  stage {k}: blocks {bounds[k]:>3} to {bounds[k + 1] - 1:>3}  {ms:8.2f} ms a step  takes {shape}")
    where = f"kept on: {forecast['store']}" if forecast["fits"] else forecast["problem"]
    print(f"states and multipliers: {forecast['auxiliary_gib']:.2f} GiB, {where}")
    how = "projected from the stage times, no communication"
    if "link_gib_per_second" in forecast:
        crossing = sum(forecast["exchange_bytes"]) / (1 << 20)
        how = f"stages measured side by side, {crossing:.1f} MiB a step at {forecast['link_gib_per_second']:.1f} GiB/s"
    print(
        f"speed-up on {forecast['stages']} devices ({how}): "
        f"{forecast['speedup_parallel_epoch']:.2f} in a parallel epoch, {forecast['speedup']:.2f} over the schedule"
    )
    return FINISHED


def _bench(given: argparse.Namespace) -> int:
    from parlay import bench

    recipe = make_recipe({**bench.DEFAULTS, **_recipe_keys(given, None)}, _given_keys(given))
    for word, value in (("rounds", given.rounds), ("steps", given.steps)):
        if value < 1:
            raise InputError(f"{word} is {value}: write a number of at least 1")
    file = Path(given.file) if given.file else None
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InputError(f"cannot write {file}: write --out with a file in a folder that exists")
    from rich.console import Console

    from parlay.bench import core, table
    from parlay.records import dumps, environment, write_json

    console, load = Console(stderr=True, highlight=False), os.getloadavg()[0]
    with console.status("") as status:
        recipe, rows = bench.run(recipe, given.rounds, given.steps, status.update)
    measured = {"rounds": given.rounds, "steps": given.steps, "cuts": recipe.partition, "spread": "quartiles"}
    about = {**environment([recipe.device] * recipe.stages), "processor": bench.processor(), "load_before": load}
    found = core.as_json(rows, about, given.line, **measured)
    if file is not None:
        write_json(file, found)
    if given.json:
        print(dumps(found, indent=2))
    else:
        table.show(rows, Console(highlight=False, width=None if sys.stdout.isatty() else 140))
    return FINISHED


def _compare(given: argparse.Namespace) -> int:
    if places.is_worker():
        raise InputError("compare starts its processes itself: write parlay compare without torchrun")
    base = read_recipe(Path(given.recipe), ("methods", "seeds")) if given.recipe else {}
    methods = given.methods or _joined("methods", base.pop("methods", None)) or ",".join(METHODS)
    seeds = given.seeds or _joined("seeds", base.pop("seeds", None)) or str(base.get("seed", 0))
    keys = {**base, **_given_keys(given)}
    common = make_recipe(keys, {"method": "serial"})  # refuses what is wrong in any row
    from parlay import compare

    rows, numbers = compare.read_rows(methods), compare.read_seeds(seeds)
    out = Path(common.out) if common.out else Path("runs") / f"compare-{common.dataset}-{common.model}"
    planned = compare.plan(rows, numbers, keys, out)
    from parlay import report
    from parlay.progress import for_terminal
    from parlay.records import dumps, write_json
    from parlay.report import console

    status = compare.carry_out(planned, _fit_any, for_terminal())
    folders, found = compare.there(planned), compare.table(planned)
    about = {name: getattr(common, name) for name in ("dataset", "model", "epochs", "batch_size")}
    told = {"status": status, **about, "seeds": numbers, "command": given.line, "rows": found}
    if folders:
        write_json(out / "comparison.json", told)
        report.write(
            folders, out / "report.html", f"{common.model} on {common.dataset}, by several methods", timed=True
        )
    if given.json:
        print(dumps(told, indent=2))
    elif folders:
        console.compare({one.folder: one.row.text for one in planned if one.folder in folders})
        console.say(f"report: {out / 'report.html'}")
    if status == "interrupted":
        return _say_no(f"interrupted: the same command goes on with {out}", FAILED)
    return FINISHED if status == "finished" else FAILED


def _fit_any(recipe: Recipe, out: Path, resume: bool, progress: Progress) -> dict[str, Any]:
    """By the engine that the recipe asks for; the run folder is left as `train` leaves it."""
    from parlay import report

    if recipe.engine == "distributed":
        from parlay.launch import command
        from parlay.launch.supervisor import Launch

        summary = command.train(Launch(recipe, out, resume))
    else:
        summary = _fit(recipe, out, resume, progress).summary
    if summary["epochs"]:
        report.write([out], out / "report.html", out.name)
    return summary


def _joined(name: str, value: Any) -> str:
    """A list of a recipe as the flag would have it."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InputError(f"{name} is {value!r} in the recipe: write a list, as in ['serial', 'al'] or [0, 1]")
    return ",".join(map(str, value))


def _data(given: argparse.Namespace) -> int:
    doings = {"list": _data_list, "fetch": _data_fetch, "check": _data_check}
    if given.what not in doings:
        raise InputError(f"unknown word '{given.what}': write parlay data {nearest(given.what, doings)}")
    return doings[given.what](given)


def _data_list(given: argparse.Namespace) -> int:
    from parlay import data
    from parlay.records import dumps

    rows = {name: data.facts(name) for name in DATASETS}
    if given.json:
        print(
            dumps(
                {
                    name: {"shape": f.shape, "classes": f.classes, "train": f.train_size, "test": f.test_size}
                    for name, f in rows.items()
                }
            )
        )
        return FINISHED
    for name, f in rows.items():
        shape = "x".join(map(str, f.shape))
        sizes = f"{f.train_size:>6} training and {f.test_size:>6} test samples"
        print(f"{name:<10} {sizes}, {shape:<8}, {f.classes:>3} classes")
    return FINISHED


def _data_fetch(given: argparse.Namespace) -> int:
    from parlay import data

    for name in given.names or _missing_names():
        data.fetch(name, Path(given.data_dir), _show_bytes)
        print(data.check(name, Path(given.data_dir)))
    return FINISHED


def _data_check(given: argparse.Namespace) -> int:
    from parlay import data
    from parlay.records import dumps

    found = {name: data.check(name, Path(given.data_dir)) for name in given.names or _missing_names()}
    print(dumps(found) if given.json else "\n".join(found.values()))
    return FINISHED


def _missing_names() -> NoReturn:
    raise InputError(f"no data set named: write one or more of {', '.join(DATASETS)}")


def _show_bytes(name: str, done: int, total: int | None) -> None:
    if sys.stderr.isatty():
        share = f"{done / total:4.0%} of {total / 1e6:.0f} MB" if total else f"{done / 1e6:.0f} MB"
        print(f"\r{name}: {share}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        print(f"{name}: {done / 1e6:.0f} MB", file=sys.stderr)


def _report(given: argparse.Namespace) -> int:
    from parlay.report import report

    return report([Path(run) for run in given.runs], Path(given.output) if given.output else None)


def _recipe_keys(given: argparse.Namespace, out: Path | None) -> dict[str, Any]:
    """The keys below the flags: a recipe file's or, to go on with a run, those that it was started with."""
    if given.recipe:
        return read_recipe(Path(given.recipe))
    if getattr(given, "resume", False):
        if out is None:
            raise InputError("--resume needs a run folder: write --out DIR")
        if not (out / "recipe.toml").exists():
            raise InputError(f"{out} holds no run to go on with: leave out --resume, or write the folder of a run")
        return read_recipe(out / "recipe.toml")
    return {}


def _with_stages(base: dict[str, Any], given: dict[str, Any]) -> tuple[Recipe, tuple[str, Any] | None]:
    """The recipe; where its stages are to be chosen by measurement, also what was tried: a line, and the numbers."""
    if {**base, **given}.get("stages") != AUTO:
        return make_recipe(base, given), None
    recipe = make_recipe(base, {**given, "stages": 2})
    from rich.console import Console

    from parlay.bench import fastest

    fastest.check(recipe)
    with Console(stderr=True, highlight=False).status("") as status:
        rows = fastest.tried(recipe, status.update)
    return fastest.chosen(recipe, rows), (fastest.line(rows), fastest.told(rows))


def _given_keys(given: argparse.Namespace) -> dict[str, Any]:
    names = {key.name for key in fields(Recipe)}
    return {name: value for name, value in vars(given).items() if name in names and value is not None}


def _new_folder(recipe: Recipe) -> Path:
    name = f"{recipe.dataset}-{recipe.model}-{recipe.method}-k{recipe.stages}-s{recipe.seed}"
    paths = (Path("runs") / (f"{name}-{i}" if i else name) for i in range(10_000))
    return next(path for path in paths if not path.exists())


class _Parser(argparse.ArgumentParser):
    """argparse that answers wrong input in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` lists what there is)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="parlay", description="Train deep networks with their layers in parallel.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"parlay {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run, parser=sub)
        return sub

    for name, run, text in (
        ("train", _train, "train by one method, write a run folder"),
        ("plan", _plan, "cuts, memory and expected speed-up before anything runs"),
    ):
        sub = command(name, run, text)
        sub.add_argument("--recipe", metavar="FILE", help="TOML file with the same keys; flags win")
        for key in fields(Recipe):
            _add_flag(sub, key)
        sub.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
        if name == "train":
            sub.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
            sub.add_argument(
                "--max-restarts",
                type=_whole_number,
                default=0,
                metavar="N",
                help="begin so often again from the last checkpoint when a stage is lost (distributed; default: 0)",
            )
            sub.add_argument(
                "--port",
                type=_whole_number,
                metavar="P",
                help="where the processes meet (distributed; default: a free one)",
            )
    sub = command("compare", _compare, "the same work by several methods, one table, one report")
    sub.add_argument(
        "--recipe", metavar="FILE", help="TOML file with the same keys, methods and seeds as lists; flags win"
    )
    sub.add_argument(
        "--methods",
        metavar="ROWS",
        help="methods, each with keys of its own, as in serial,al,al:downsample=2:schedule=tail:4:1 (default: all)",
    )
    sub.add_argument("--seeds", metavar="N,N", help="every row is trained with each of them (default: 0)")
    for key in fields(Recipe):
        if key.name not in ("method", "seed"):
            _add_flag(sub, key)
    sub.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    sub = command("bench", _bench, "time per step of serial, layer-parallel, pipeline and data-parallel training")
    sub.add_argument("--recipe", metavar="FILE", help="TOML file with the same keys; flags win")
    for key in fields(Recipe):
        if key.name != "out":
            _add_flag(sub, key)
    sub.add_argument(
        "--rounds", type=_whole_number, default=5, metavar="N", help="times that every system is timed (default: 5)"
    )
    sub.add_argument(
        "--steps", type=_whole_number, default=5, metavar="N", help="steps of one timing, after a warm-up (default: 5)"
    )
    sub.add_argument("--out", dest="file", metavar="FILE", help="file for the JSON object")
    sub.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    sub = command("report", _report, "run folders to one HTML page and a table")
    sub.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    sub.add_argument("-o", "--output", metavar="FILE", help="the page; report.html beside a single run by default")
    sub = command("data", _data, "list, fetch, check the data sets")
    sub.add_argument("what", metavar="list|fetch|check")
    sub.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DATASETS))
    sub.add_argument("--data-dir", default="data", metavar="DIR", help="folder of the data sets (default: data)")
    sub.add_argument("--json", action="store_true", help="with list and check: one JSON object")
    return parser


def _add_flag(parser: argparse.ArgumentParser, key: Field[Any]) -> None:
    kinds: dict[str, Callable[[str], Any]] = {"str": str, "int": _whole_number, "float": _number}
    default = "" if key.default is None else f" (default: {key.default})"
    parser.add_argument(
        f"--{flag(key.name)}",
        dest=key.name,
        type=_whole_number_or_auto if key.name == "stages" else kinds[str(key.type).split(" | ")[0]],
        metavar=key.metadata["form"] or "|".join(map(str, key.metadata["choices"])),
        help=key.metadata["help"] + default,
    )


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number: write one, as in 3") from None


def _whole_number_or_auto(text: str) -> int | str:
    return text if text == AUTO else _whole_number(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no number: write one, as in 0.1") from None


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = next(action.choices for action in parser._actions if action.dest == "command")
    assert known is not None
    if words and not words[0].startswith("-") and words[0] not in known:
        raise InputError(f"unknown command '{words[0]}': write parlay {nearest(words[0], known)}")


def _refuse(parser: argparse.ArgumentParser, given: argparse.Namespace, word: str) -> NoReturn:
    known = [option for action in getattr(given, "parser", parser)._actions for option in action.option_strings]
    if word.startswith("-"):
        raise InputError(f"unknown flag '{word}': write {nearest(word.split('=')[0], known)}")
    raise InputError(f"'{word}' stands alone: give it to a flag, as in --dataset {word}")


def _say_no(line: str, code: int, error: BaseException | None = None) -> int:
    line = " ".join(line.split())
    if places.is_worker():
        worker.leave(worker.Word(code, error=line, lost=worker.is_of_another(error)))
    else:
        print(f"parlay: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    code = main()
    if places.is_worker():
        worker.end(code)
    sys.exit(code)
