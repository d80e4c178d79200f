"""What a key may hold, declared once at its field: help, choices, bounds. And the keys of earlier versions.

Recipes and the dataclasses of methods declare their keys by `option`; flags, TOML files and Python are checked alike.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, NamedTuple

from parlay.errors import InputError

LONGEST_TEXT, LONGEST_PATH, LONGEST_NAME = 1000, 4000, 255
FOLDER = "DIR"
"""The form of a key that holds a path."""


class Retired(NamedTuple):
    neutral: Any
    """The value that changes nothing: with it the key of an old recipe is ignored."""
    instead: str
    """What to write, where it has another one."""
    methods: tuple[str, ...] = ()
    """Gone from these methods alone."""


_GONE = "it gained nothing and is gone: leave it out, or use the version of Parlay that made the recipe"
_PAPER = "it belongs to the paper's formulas: leave it out here, and see the folder paper"
RETIRED = {
    "shrink": Retired(1.0, _GONE),
    "compensate": Retired(0.0, _GONE),
    "slow-start": Retired(0.0, _GONE),
    "micro-batches": Retired(0, "the pipeline chooses their number: leave it out"),
    "detail": Retired(0.0, _GONE, ("replay", "delayed")),
    "order": Retired("red-black", _PAPER, ("penalty",)),
    "trust": Retired(1.0, _PAPER, ("penalty", "al")),
    "state-step": Retired(1.0, _PAPER, ("penalty", "al")),
    "state-rate": Retired(None, _PAPER, ("penalty", "al")),
    "multiplier": Retired("hestenes", _PAPER, ("al",)),
    "multiplier-step": Retired(1.0, _PAPER, ("al",)),
    "form": Retired("relative", _PAPER, ("penalty", "al")),
}


def option(
    default: Any,
    help: str,
    choices: Iterable[Any] = (),
    form: str = "",
    *,
    short: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field that is a key: its value is at least `least`, greater than `above`, at most `most`.

    `form` stands for the value in the help; `short` keys are in the short one.
    """
    bounds = {"least": least, "above": above, "most": most}
    return field(
        default=default, metadata={"help": help, "choices": tuple(choices), "form": form, "short": short, **bounds}
    )


def flag(name: str) -> str:
    """`batch-size`, the name in flags and TOML files, of the field `batch_size`."""
    return name.replace("_", "-")


def nearest(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(word[:LONGEST_NAME], list(known), 1, 0.0)[0]


def said(value: Any) -> str:
    """A value as it can stand in a line: of bounded length, without control characters."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
    text = "".join(c if c.isprintable() else "?" for c in text[:LONGEST_NAME])
    return text if len(text) <= 80 else f"{text[:60]}..."


def parse(text: str, key: Field[Any]) -> Any:
    """The value of a key from a word of a command line."""
    word = kind_of(key).split(" | ")[0]
    try:
        if word == "bool":
            return {"on": True, "true": True, "off": False, "false": False}[text]
        return {"str": str, "int": int, "float": float}[word](text)
    except (KeyError, ValueError):
        form = {"int": "a whole number, as in 3", "float": "a number, as in 0.1", "bool": "on or off"}[word]
        raise InputError(f"{flag(key.name)} is '{said(text)}': write {form}") from None


def check_retired(key: str, value: Any, method: Any) -> bool:
    """Is this a key of an earlier version, at the value that changes nothing? Any other value is refused."""
    gone = RETIRED.get(key)
    if gone is None or (gone.methods and method not in gone.methods):
        return False
    if value != gone.neutral or isinstance(value, bool):
        raise InputError(f"{key} is {said(value)}: {gone.instead}")
    return True


def check(name: str, value: Any, kind: str, metadata: Mapping[str, Any]) -> None:
    """Type, choices and bounds of a key's value; an int is welcome where a float is asked for."""
    if value is None and "None" in kind:
        return
    kind, key = kind.split(" | ")[0], flag(name)
    wanted: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    if not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "bool"):
        words = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise InputError(f"{key} is {said(value) if not isinstance(value, str) else repr(said(value))}: write {words}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{key} is {value}: write a finite number")
    choices = metadata.get("choices")
    if choices and value not in choices:
        hint = f" (nearest: {nearest(value, choices)})" if isinstance(value, str) else ""
        raise InputError(f"unknown {key} '{said(value)}': write one of {', '.join(map(str, choices))}{hint}")
    if isinstance(value, str):
        check_text(key, value, metadata.get("form") == FOLDER)
    elif not isinstance(value, bool):
        _check_bounds(key, value, metadata)


def kind_of(key: Field[Any]) -> str:
    """int, float, str or bool; ending in ` | None` where the field may be None."""
    return key.type if isinstance(key.type, str) else getattr(key.type, "__name__", str(key.type))


def check_fields(holder: Any) -> None:
    """All keys of a dataclass instance: a recipe's, or a method's."""
    for key in fields(holder):
        if key.metadata:
            check(key.name, getattr(holder, key.name), kind_of(key), key.metadata)


def check_text(key: str, text: str, is_path: bool) -> None:
    """Of bounded length and without control characters; a path so that the system takes its names."""
    longest = LONGEST_PATH if is_path else LONGEST_TEXT
    names = text.split("/") if is_path else []
    if len(text) > longest or any(len(name.encode(errors="replace")) > LONGEST_NAME for name in names):
        raise InputError(f"{key} has {len(text)} characters: write a shorter one")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise InputError(f"{key} is '{said(text)}', with a control character: write it without")


def _check_bounds(key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    least, above, most = (metadata.get(name) for name in ("least", "above", "most"))
    if above is not None and value <= above:
        raise InputError(f"{key} is {said(value)}: write a number greater than {above}")
    if least is not None and value < least:
        raise InputError(f"{key} is {said(value)}: write a number of at least {least}")
    if most is not None and value > most:
        raise InputError(f"{key} is {said(value)}: write a number of at most {most}")
