"""The methods by name: the class of each, its keys in a recipe, what the report calls it, and when a batch is where.

What may be asked without torch stands here, for the command line, the report and the planner; `load` imports the class.
A new method is one file with a dataclass, and one call of `register`. A recipe names a method, never a module.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from typing import Any, NamedTuple, final, get_type_hints

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


@final
@dataclass(frozen=True)
class Option:
    """A field of a method's dataclass that is a flag and a key of a recipe."""

    name: str
    kind: str
    """int, float, str or bool; ending in ` | None` where the field may be None."""
    default: Any
    help: str
    metadata: dict[str, Any]
    """`choices`, `form` and bounds, as `config.keys.option` writes them."""


class _Entry(NamedTuple):
    place: str
    label: str
    timing: Timing
    options: tuple[str, ...] | None


_METHODS: dict[str, _Entry] = {}


def register(
    name: str,
    place: str,
    *,
    label: str,
    entry: Steps = at_once,
    lag: Steps = at_once,
    options: Sequence[str] | None = None,
) -> None:
    """Make a method known. `place` is "module:Class", `label` its name in reports.

    `options` names the fields of its dataclass that are flags and keys of a recipe; None: all of them. Where they are
    named, a wrong flag is answered without importing the class.
    """
    _METHODS[name] = _Entry(place, label, Timing(entry, lag), None if options is None else tuple(options))


def names() -> tuple[str, ...]:
    """All of them, serial training first."""
    return tuple(_METHODS)


def label(name: str) -> str:
    return _found(name).label


def timing(name: str) -> Timing:
    return _found(name).timing


def streams(name: str) -> bool:
    """Does a batch take several steps through the stages? Then a state lives a few steps, and not a whole epoch."""
    return timing(name).entry(0, 2) + timing(name).entry(1, 2) > 0


def load(name: str) -> type[Any]:
    """The class of a method. Serial training has none."""
    module, _, own = _found(name).place.partition(":")
    if not own:
        raise InputError(f"{name} training is not cut into stages: write method {', '.join(names()[1:])}")
    kind: type[Any] = getattr(import_module(module), own)
    return kind


def option_names(name: str) -> tuple[str, ...]:
    """Of the fields of a method's dataclass, those that are keys of a recipe."""
    found = _found(name)
    if found.options is not None:
        return found.options
    return tuple(key.name for key in fields(load(name)))


def options(name: str) -> tuple[Option, ...]:
    """The same with type, default and help, from the dataclass; imports it."""
    wanted = option_names(name)
    if not wanted:
        return ()
    kind = load(name)
    types = get_type_hints(kind)
    return tuple(_option(key, types[key.name]) for key in fields(kind) if key.name in wanted)


def _option(key: Any, of: Any) -> Option:
    kind = of.__name__ if isinstance(of, type) else str(of)
    metadata = dict(key.metadata) or _TODAY.get(key.name, {})
    default = None if key.default is MISSING else key.default
    return Option(key.name, kind, default, metadata.get("help", ""), metadata)


def _found(name: str) -> _Entry:
    if name not in _METHODS:
        near = difflib.get_close_matches(name, _METHODS, 1, 0.0)[0]
        raise InputError(f"unknown method '{name}': write one of {', '.join(_METHODS)} (nearest: {near})")
    return _METHODS[name]


_TODAY: dict[str, dict[str, Any]] = {
    # TODO: these go to the fields of the methods' dataclasses
    "beta": {"help": "weight of the penalty, or of replay's pull", "form": "B"},
    "beta_final": {"help": "weight of the penalty in the last epoch: it grows geometrically", "form": "B"},
    "detail": {
        "help": "weight of what downsampling leaves out; 1 is the paper's, 0.3 the default from 8 x 8 kept pixels on",
        "form": "W",
    },
    "reach": {
        "help": "how far from its state, in units of it, an output still has its multiplier in full",
        "form": "R",
    },
    "predict": {"help": "share of its delay by which a forward pass looks ahead along the momentum", "form": "F"},
    "accumulate": {"help": "batches whose gradients make one update", "form": "N"},
}

register(SERIAL, "", label="Serial", options=())
register("penalty", "parlay.coupling:Penalty", label="Penalty", options=("beta", "beta_final", "detail"))
register("al", "parlay.coupling:AugmentedLagrangian", label="AL", options=("beta", "beta_final", "detail", "reach"))
register(
    "replay",
    "parlay.coupling:Replay",
    label="Replay",
    entry=a_stage_a_step,
    lag=there_and_back,
    options=("beta", "predict", "accumulate"),
)
register(
    "delayed",
    "parlay.coupling:Delayed",
    label="DDG",
    entry=a_stage_a_step,
    lag=there_and_back,
    options=("predict", "accumulate"),
)
register("local", "parlay.coupling:Local", label="DGL", entry=a_stage_a_step, options=())
register(
    "dni",
    "parlay.coupling:DNI",
    label="DNI",
    entry=a_stage_a_step,
    lag=lambda k, stages: 2 if k < stages - 1 else 0,
    options=(),
)
register(
    "auxnet",
    "parlay.coupling:AuxNet",
    label="AuxNet",
    entry=lambda k, stages: stages - 1 - k,
    lag=lambda k, stages: 2 if k > 0 else 0,  # noqa: ARG005
    options=("beta",),
)
