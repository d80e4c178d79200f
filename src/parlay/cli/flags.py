"""What commands have in common: a parser that answers in one line, flags made from the recipe's fields, and recipes
made from flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parlay.errors import InputError
from parlay.files import exists
from parlay.recipe import AUTO, Recipe, flag, make_recipe, nearest, read_recipe

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Run = Callable[[argparse.Namespace], int]
"""What a command does with the words that it was given; the exit code comes back."""

RECIPE = "TOML file with the same keys; flags win"


class Parser(argparse.ArgumentParser):
    """argparse that answers wrong input in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` lists what there is)")


def add_command(commands: Commands, name: str, run: Run, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    sub.set_defaults(run=run, parser=sub)
    return sub


def add_recipe_flags(parser: argparse.ArgumentParser, without: Sequence[str] = (), file: str = RECIPE) -> None:
    """`--recipe`, and a flag for every key of a recipe but these."""
    parser.add_argument("--recipe", metavar="FILE", help=file)
    for key in fields(Recipe):
        if key.name not in without:
            add_flag(parser, key)


def add_json(parser: argparse.ArgumentParser, text: str = "one JSON object on standard output, nothing else") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def add_flag(parser: argparse.ArgumentParser, key: Field[Any]) -> None:
    if key.type == "bool":  # said or not said
        parser.add_argument(
            f"--{flag(key.name)}", dest=key.name, action="store_const", const=True, help=key.metadata["help"]
        )
        return
    kinds: dict[str, Callable[[str], Any]] = {"str": str, "int": whole_number, "float": number}
    default = "" if key.default is None else f" (default: {key.default})"
    parser.add_argument(
        f"--{flag(key.name)}",
        dest=key.name,
        type=whole_number_or_auto if key.name == "stages" else kinds[str(key.type).split(" | ")[0]],
        metavar=key.metadata["form"] or "|".join(map(str, key.metadata["choices"])),
        help=key.metadata["help"] + default,
    )


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number: write one, as in 3") from None


def whole_number_or_auto(text: str) -> int | str:
    return text if text == AUTO else whole_number(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no number: write one, as in 0.1") from None


def check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = next(action.choices for action in parser._actions if action.dest == "command")
    assert known is not None
    if words and not words[0].startswith("-") and words[0] not in known:
        raise InputError(f"unknown command '{words[0]}': write parlay {nearest(words[0], known)}")


def refuse_word(parser: argparse.ArgumentParser, given: argparse.Namespace, word: str) -> NoReturn:
    known = [option for action in getattr(given, "parser", parser)._actions for option in action.option_strings]
    if word.startswith("-"):
        raise InputError(f"unknown flag '{word}': write {nearest(word.split('=')[0], known)}")
    raise InputError(f"'{word}' stands alone: give it to a flag, as in --dataset {word}")


def recipe_keys(given: argparse.Namespace, out: Path | None) -> dict[str, Any]:
    """The keys below the flags: a recipe file's or, to go on with a run, those that it was started with."""
    if given.recipe:
        return read_recipe(Path(given.recipe))
    if getattr(given, "resume", False):
        if out is None:
            raise InputError("--resume needs a run folder: write --out DIR")
        if not exists(out / "recipe.toml"):
            raise InputError(f"{out} holds no run to go on with: leave out --resume, or write the folder of a run")
        return read_recipe(out / "recipe.toml")
    return {}


def with_stages(base: dict[str, Any], given: dict[str, Any]) -> tuple[Recipe, tuple[str, Any] | None]:
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


def given_keys(given: argparse.Namespace) -> dict[str, Any]:
    names = {key.name for key in fields(Recipe)}
    return {name: value for name, value in vars(given).items() if name in names and value is not None}
