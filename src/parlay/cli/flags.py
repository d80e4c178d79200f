"""What commands have in common: a parser that answers in one line, flags made from the keys of a recipe and of the
methods, and recipes made from flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parlay import methods
from parlay.config.keys import RETIRED, check_text, flag, nearest, parse, said
from parlay.config.recipe import AUTO, KEYS, Recipe, make_recipe, read_recipe
from parlay.errors import InputError
from parlay.files import exists

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

Run = Callable[[argparse.Namespace], int]
"""What a command does with the words that it was given; the exit code comes back."""

RECIPE = "TOML file with the same keys; flags win"
SHORT = {"beta": "weight of the penalty [the method's own]"}
"""Keys of methods that stand in the short help, which is written without importing the methods."""
PATHS = ("recipe", "out", "file", "data_dir", "runs", "output", "queue")


class Parser(argparse.ArgumentParser):
    """argparse that answers wrong input in one line."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _formatter, **given})
        self.hidden: dict[str, str] = {}
        """What `--help-all` says of the flags that `--help` leaves out."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` lists what there is)")


class HelpAll(argparse.Action):
    """Shows the flags that `--help` leaves out, too."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        for name in methods.every_option():
            of = {method: one for method in methods.names() for one in methods.options(method) if one.name == name}
            defaults = ", ".join(f"{method} {one.default}" for method, one in of.items())
            parser.hidden[name] = f"{methods.option_of(name).metadata.get('help', '')} [{defaults}]"
        for action in parser._actions:
            action.help = parser.hidden.get(action.dest, action.help)
        parser.print_help()
        parser.exit()


def add_command(commands: Commands, name: str, run: Run, text: str) -> Parser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(run=run, parser=sub)
    return sub


def add_recipe_flags(parser: Parser, without: Sequence[str] = (), file: str = RECIPE, auto: bool = False) -> None:
    """`--recipe`, and a flag for every key of a recipe but these, and of the methods; `auto`: also `--stages auto`."""
    parser.usage = "%(prog)s [--FLAG VALUE ...]      defaults stand in brackets"
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all flags, also the rarely used ones")
    parser.add_argument("--recipe", metavar="FILE", help=file)
    for key in KEYS:
        if key.name not in without:
            text = ", ".join(methods.names()) if key.name == "method" else key.metadata["help"]
            text += "; auto: the fastest on this GPU" if auto and key.name == "stages" else ""
            text += "" if key.default is None or key.default is False else f" [{key.default}]"
            form = key.metadata["form"] or "|".join(map(str, key.metadata["choices"]))
            kind: dict[str, Any] = {"metavar": form}
            if key.type == "bool":  # said or not said
                kind = {"action": "store_const", "const": "on"}
            add_flag(parser, key.name, text, key.metadata["short"], **kind)
    for name in methods.every_option():
        add_flag(parser, name, SHORT.get(name, ""), name in SHORT, metavar=name[0].upper())


def add_flag(parser: Parser, name: str, text: str, short: bool, **kind: Any) -> None:
    """A flag that stands in `--help` if it is `short`, and in `--help-all` in any case."""
    parser.hidden[name] = text
    parser.add_argument(f"--{flag(name)}", dest=name, help=text if short else argparse.SUPPRESS, **kind)


def add_json(parser: Parser, text: str = "one JSON object on standard output, nothing else") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{said(text)}' is no whole number: write one, as in 3") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{said(text)}' is no number: write one, as in 0.1") from None


def check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = next(action.choices for action in parser._actions if action.dest == "command")
    assert known is not None
    if words and not words[0].startswith("-") and words[0] not in known:
        raise InputError(f"unknown command '{said(words[0])}': write parlay {nearest(words[0], known)}")


def check_paths(given: argparse.Namespace) -> None:
    for name in PATHS:
        value = getattr(given, name, None)
        for text in value if isinstance(value, list) else [value]:
            check_text(flag(name), text or "", is_path=True)


def refuse_word(parser: argparse.ArgumentParser, given: argparse.Namespace, word: str) -> NoReturn:
    sub = getattr(given, "parser", parser)
    name = word.split("=")[0]
    if name[2:] in RETIRED and any(action.dest == "recipe" for action in sub._actions):
        raise InputError(f"{name}: {RETIRED[name[2:]].instead}")
    if word.startswith("-"):
        known = [option for action in sub._actions for option in action.option_strings]
        raise InputError(f"unknown flag '{said(word)}': write {nearest(name, known)}")
    raise InputError(f"'{said(word)}' stands alone: give it to a flag, as in --dataset digits")


def recipe_keys(given: argparse.Namespace, out: Path | None) -> dict[str, Any]:
    """The keys below the flags: a recipe file's or, to go on with a run, those that it was started with."""
    if given.recipe:
        return read_recipe(Path(given.recipe), methods.every_option())
    if getattr(given, "resume", False):
        if out is None:
            raise InputError("--resume needs a run folder: write --out DIR")
        if not exists(out / "recipe.toml"):
            raise InputError(f"{out} holds no run to go on with: leave out --resume, or write the folder of a run")
        return read_recipe(out / "recipe.toml", methods.every_option())
    return {}


def given_keys(given: argparse.Namespace) -> dict[str, Any]:
    """The keys that stand in flags, typed. A number of stages may be the word auto."""
    found, known = {}, {key.name: key for key in KEYS}
    for name in (*known, *methods.every_option()):
        word = getattr(given, name, None)
        if word is not None:
            found[name] = word if word == AUTO else parse(word, known.get(name) or methods.option_of(name))
    return found


def checked(base: dict[str, Any], given: dict[str, Any]) -> Recipe:
    """The recipe; its method is known and has the keys that are given to it."""
    recipe = make_recipe(base, given)
    methods.check_options(recipe.method, recipe.options)
    return recipe


def with_stages(base: dict[str, Any], given: dict[str, Any]) -> tuple[Recipe, tuple[str, Any] | None]:
    """The recipe; where its stages are to be chosen by measurement, also what was tried: a line, and the numbers."""
    if {**base, **given}.get("stages") != AUTO:
        return checked(base, given), None
    recipe = checked(base, {**given, "stages": 2})
    from rich.console import Console

    from parlay.bench import fastest

    fastest.check(recipe)
    with Console(stderr=True, highlight=False).status("") as status:
        rows = fastest.tried(recipe, status.update)
    return fastest.chosen(recipe, rows), (fastest.line(rows), fastest.told(rows))


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=25)
