"""The methods by name: the class of each, its keys in a recipe, what the report calls it, and when a batch is where.

What may be asked without torch stands here, for the command line, the report and the planner; `load` imports the class.
A new method is one file with a dataclass, and one call of `register`. A recipe names a method, never a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from importlib import import_module
from typing import Any, NamedTuple

from parlay.config.keys import check, flag, kind_of, nearest, said
from parlay.errors import InputError

SERIAL = "serial"
Steps = Callable[[int, int], int]
"""A number of steps for stage k of K."""


def at_once(k: int, stages: int) -> int:  # noqa: ARG001
    return 0


def a_stage_a_step(k: int, stages: int) -> int:  # noqa: ARG001
    return k


def there_and_back(k: int, stages: int) -> int:
    return 2 * (stages - 1 - k)


class Timing(NamedTuple):
    entry: Steps
    """Steps until a batch reaches stage k."""
    lag: Steps
    """Steps between its forward and its backward pass there."""


class _Entry(NamedTuple):
    place: str
    label: str
    meaning: str
    timing: Timing
    options: tuple[str, ...] | None


_METHODS: dict[str, _Entry] = {}


def register(
    name: str,
    place: str,
    *,
    label: str,
    meaning: str = "",
    entry: Steps = at_once,
    lag: Steps = at_once,
    options: Sequence[str] | None = None,
) -> None:
    """Make a method known. `place` is "module:Class", `label` its name in reports, `meaning` what that says.

    `options` names the fields of its dataclass that are flags and keys of a recipe; None: all of them. Where they are
    named, a wrong flag is answered without importing the class.
    """
    _METHODS[name] = _Entry(place, label, meaning, Timing(entry, lag), None if options is None else tuple(options))


def names() -> tuple[str, ...]:
    """All of them, serial training first."""
    return tuple(_METHODS)


def label(name: str) -> str:
    return _found(name).label


def meaning(name: str) -> str:
    return _found(name).meaning


def timing(name: str) -> Timing:
    return _found(name).timing


def streams(name: str) -> bool:
    """Does a batch take several steps through the stages? Then a state lives a few steps, and not a whole epoch."""
    return timing(name).entry(0, 2) + timing(name).entry(1, 2) > 0


def load(name: str) -> type[Any] | None:
    """The class of a method; None: serial training, which has none."""
    module, _, own = _found(name).place.partition(":")
    kind: type[Any] | None = getattr(import_module(module), own) if own else None
    return kind


def option_names(name: str) -> tuple[str, ...]:
    """The fields of a method's dataclass that are keys of a recipe."""
    named = _found(name).options
    if named is not None:
        return named
    kind = load(name)
    return tuple(key.name for key in fields(kind)) if kind else ()


def every_option() -> tuple[str, ...]:
    """Those of all methods."""
    return tuple(dict.fromkeys(key for name in _METHODS for key in option_names(name)))


def options(name: str) -> tuple[Field[Any], ...]:
    """The same as fields, with type, default and what `config.keys.option` declares."""
    own, kind = option_names(name), load(name)
    return tuple(key for key in fields(kind) if key.name in own) if kind else ()


def option_of(key: str) -> Field[Any]:
    """One of them by its name. It has the same type in all methods that have it."""
    return next(one for name in _METHODS for one in options(name) if one.name == key)


def check_options(name: str, given: Mapping[str, Any]) -> None:
    """Is there such a method, and does it have these keys?"""
    own = option_names(name)
    for key in given:
        if key in own:
            continue
        others = " or ".join(other for other in _METHODS if key in option_names(other))
        if not others:
            raise InputError(f"unknown key '{said(flag(key))}': write {nearest(key, own) if own else 'none'}")
        raise InputError(f"{flag(key)} is not for method '{name}': leave it out, or write method {others}")


def make(name: str, given: Mapping[str, Any]) -> Any:
    """The method with these keys, checked, and its own defaults for the others; None: serial training."""
    check_options(name, given)
    for key in options(name):
        if key.name in given:
            check(key.name, given[key.name], kind_of(key), key.metadata)
    kind = load(name)
    return kind(**given) if kind else None


def _found(name: str) -> _Entry:
    if name not in _METHODS:
        near = nearest(name, _METHODS)
        raise InputError(f"unknown method '{said(name)}': write one of {', '.join(_METHODS)} (nearest: {near})")
    return _METHODS[name]


register(SERIAL, "", label="Serial", meaning="the network is not cut", options=())
register(
    "penalty",
    "parlay.methods.penalty:Penalty",
    label="Penalty",
    meaning="quadratic penalty",
    options=("beta", "beta_final", "detail"),
)
register(
    "al",
    "parlay.methods.augmented_lagrangian:AugmentedLagrangian",
    label="AL",
    meaning="augmented Lagrangian",
    options=("beta", "beta_final", "detail", "reach"),
)
register(
    "replay",
    "parlay.methods.replay:Replay",
    label="Replay",
    meaning="delayed adjoints by a second forward pass",
    entry=a_stage_a_step,
    lag=there_and_back,
    options=("beta", "predict", "accumulate"),
)
register(
    "delayed",
    "parlay.methods.delayed:Delayed",
    label="DDG",
    meaning="decoupled delayed gradients, method delayed",
    entry=a_stage_a_step,
    lag=there_and_back,
    options=("predict", "accumulate"),
)
register(
    "local",
    "parlay.methods.local:Local",
    label="DGL",
    meaning="decoupled greedy learning, method local",
    entry=a_stage_a_step,
    options=(),
)
