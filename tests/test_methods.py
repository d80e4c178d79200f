"""The registry of methods answers without torch, and what it says is what the methods' classes do."""

import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from parlay import Streamed, methods
from parlay.errors import InputError


@pytest.mark.parametrize("name", methods.names()[1:])
def test_a_registered_method_has_its_options_and_its_timing_in_its_class(name: str) -> None:
    kind = methods.load(name)
    assert {option.name for option in methods.options(name)} == set(methods.option_names(name))
    assert all(option.metadata["help"] and option.type for option in methods.options(name))
    assert set(methods.option_names(name)) <= {key.name for key in fields(kind)}
    method = kind()
    assert methods.streams(name) == isinstance(method, Streamed)
    if isinstance(method, Streamed):
        entry, lag = methods.timing(name)
        assert [lag(k, 5) for k in range(5)] == [method.lag(k, 5) for k in range(5)]
        assert [entry(k, 5) for k in range(5)] == [method.entry(k, 5) for k in range(5)]


def test_the_registry_answers_without_torch() -> None:
    script = (
        "import sys; from parlay import methods as m; "
        "print([m.label(n) for n in m.names()], m.option_names('al'), m.timing('replay').lag(0, 3)); "
        "print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert told.startswith("['Serial', 'Penalty', 'AL', 'Replay',")
    assert told.endswith("('beta', 'beta_final', 'detail', 'reach') 4\nFalse\n")


@dataclass(frozen=True)
class Mine:
    strength: float = 2.0
    word: str | None = None


def test_a_new_method_is_registered_with_all_fields_as_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    methods.register("mine", f"{__name__}:Mine", label="Mine")
    assert methods.names()[-1] == "mine"
    assert methods.load("mine") is Mine
    assert methods.make("mine", {"strength": 3, "word": "yes"}) == Mine(3, "yes")
    with pytest.raises(InputError, match="strength is 'yes': write a number"):
        methods.make("mine", {"strength": "yes"})
    found = methods.options("mine")
    assert [(o.name, o.type, o.default) for o in found] == [("strength", float, 2.0), ("word", str | None, None)]


def test_an_unknown_method_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown method 'penality': write one of serial, .* \(nearest: penalty\)"):
        methods.load("penality")


def test_serial_training_is_a_name_without_a_class() -> None:
    assert methods.load("serial") is methods.make("serial", {}) is None
    with pytest.raises(InputError, match="beta is not for method 'serial': leave it out"):
        methods.make("serial", {"beta": 1.0})


def test_a_method_is_made_with_checked_keys() -> None:
    assert methods.make("al", {"beta": 2, "reach": 1.0}).beta == 2
    for given in ({"beta": "much"}, {"beta": True}, {"beta": float("inf")}, {"beta": 1e300}, {"beta": -1.0}):
        with pytest.raises(InputError, match=r"^beta is "):
            methods.make("al", given)
    with pytest.raises(InputError, match="unknown key 'order'"):
        methods.make("penalty", {"order": "joint"})  # for Python alone
