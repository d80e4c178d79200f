"""The command line. Flags come from the recipe's fields; torch is loaded only once there is something to run.

Exit codes: 0 finished, 1 the run failed, 2 wrong input, answered in one line that says what to write instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from parlay import __version__
from parlay.errors import InputError
from parlay.recipe import DATASETS, Recipe, flag, make_recipe, nearest, read_recipe

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
        return int(given.run(given))
    except InputError as error:
        return _say_no(str(error), WRONG)
    except KeyboardInterrupt:
        return _say_no("interrupted", FAILED)
    except MemoryError as error:
        return _say_no(f"out of memory ({error}): write --store file, --downsample 2 or a smaller --batch-size", FAILED)
    except BrokenPipeError:
        return FAILED
    except Exception as error:  # the last resort: a line for the user, the rest for whoever asks for it
        if os.environ.get("PARLAY_DEBUG") == "1":
            traceback.print_exc()
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return _say_no(f"{what} (PARLAY_DEBUG=1 shows where)", FAILED)


def _train(given: argparse.Namespace) -> int:
    out = Path(given.out) if given.out else None
    base = _recipe_keys(given, out)
    recipe = make_recipe(base, _given_keys(given))
    out = Path(recipe.out) if recipe.out else _new_folder(recipe)
    if not given.resume and (out / "records.jsonl").exists():
        raise InputError(f"{out} holds a run already: write --resume to go on with it, or another --out")
    from parlay import progress, report, run
    from parlay.records import dumps

    try:
        result = run.train(recipe, out, given.resume, progress.for_terminal())
    except RuntimeError as error:
        # CUDA's has a class of its own, the CPU's only its text
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        smaller = max(recipe.batch_size // 2, 1)
        return _say_no(f"out of memory: write --batch-size {smaller}, --store host or --downsample 2", FAILED)
    if result.records:
        report.write([out], out / "report.html", out.name)
    if given.json:
        print(dumps(result.summary, indent=2))
    else:
        _tell(result, out)
    return EXIT_CODES[result.status]


def _tell(result: Any, out: Path) -> None:
    summary = result.summary
    score = f"test accuracy {summary['test_accuracy']:.2f} %" if summary["test_accuracy"] is not None else ""
    if not score and summary["test_loss"] is not None:
        score = f"test loss {summary['test_loss']:.4f}"
    told = [result.status, score, result.message, f"run folder {out}"]
    if result.status == "interrupted":
        told.append(f"go on with: parlay train --resume --out {out}")
    print("; ".join(part for part in told if part), file=sys.stdout if result.status == "finished" else sys.stderr)


def _plan(given: argparse.Namespace) -> int:
    recipe = make_recipe(_recipe_keys(given, None), _given_keys(given))
    from parlay.plan import plan
    from parlay.records import dumps

    forecast = plan(recipe)
    if given.json:
        print(dumps(forecast, indent=2))
        return FINISHED
    of = f"{forecast['blocks']} blocks, {forecast['parameters']:,} parameters"
    print(f"{forecast['model']} on {forecast['dataset']}: {of}")
    bounds = [0, *forecast["cuts"], forecast["blocks"]]
    arriving = ["the input", *("x".join(map(str, shape)) for shape in forecast["interfaces"])]
    for k, (ms, shape) in enumerate(zip(forecast["stage_ms"], arriving, strict=True)):
        print(f"  stage {k}: blocks {bounds[k]:>3} to {bounds[k + 1] - 1:>3}  {ms:8.2f} ms a step  takes {shape}")
    where = f"kept on: {forecast['store']}" if forecast["fits"] else forecast["problem"]
    print(f"states and multipliers: {forecast['auxiliary_gib']:.2f} GiB, {where}")
    print(
        f"speed-up on {forecast['stages']} devices (projected from the stage times, no communication): "
        f"{forecast['speedup_parallel_epoch']:.2f} in a parallel epoch, {forecast['speedup']:.2f} over the schedule"
    )
    return FINISHED


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
        type=kinds[str(key.type).split(" | ")[0]],
        metavar=key.metadata["form"] or "|".join(map(str, key.metadata["choices"])),
        help=key.metadata["help"] + default,
    )


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number: write one, as in 3") from None


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


def _say_no(line: str, code: int) -> int:
    print("parlay: " + " ".join(line.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
