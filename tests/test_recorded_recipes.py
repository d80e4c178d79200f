"""Recipes of recorded runs, from several versions of Parlay: each is still read, and its run can be resumed.

The forty in `recipes/` are chosen so that every key that a recorded recipe has ever had is in them, with every kind of
value: methods, schedules, data sets, models, options. Where a key is gone that had an effect, a line names it.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import recorded
from parlay import methods
from parlay.config.keys import RETIRED, flag
from parlay.config.recipe import make_recipe, read_recipe
from parlay.errors import InputError
from parlay.run.setup import make_method
from parlay_paper import methods as of_the_paper
from runs import STEPS, listen, records, resume, summary, train

RECIPES = sorted((Path(__file__).parent / "recipes").glob("*.toml"))
ARCHIVED = ("adaptive", "detail", "paper", "reach", "resnet20", "streaming", "tail")
SMALL = {
    # in the place of what a recorded run had: a network and data that train in a fraction of a second
    "dataset": "synthetic",
    "synthetic-shape": "1,8,8",
    "synthetic-samples": 96,
    "batch-size": 32,
    "train-samples": 0,
    "model": "resnet8",
    "device": "cpu",
    "engine": "in-process",
    "serial-phase": "auto",
    "partition": "even",
    "epochs": 3,
    "checkpoint-every": 1,
    "compile": "auto",
}
LOOSE = {"epochs", "batch-size", "lr", "seed", "beta", "trust", "weight-decay", "train-samples", "judge-every"}
"""Keys of numbers: one value stands for all."""


@pytest.fixture(autouse=True)
def _with_the_methods_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    of_the_paper.register()


def kept(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def test_there_are_forty_of_every_kind() -> None:
    assert len(RECIPES) == 40
    found = [kept(path) for path in RECIPES]
    assert {recipe["method"] for recipe in found} == set(methods.names()) - {"joint-penalty", "printed-al"}
    assert {recipe["dataset"] for recipe in found} == {"digits", "mnist", "cifar10", "cifar100", "synthetic"}
    assert len({frozenset(recipe) for recipe in found}) > 15  # as many versions and methods


@pytest.mark.parametrize("experiment", ARCHIVED)
def test_every_key_and_kind_of_value_of_a_recorded_recipe_is_among_the_forty(experiment: str) -> None:
    chosen = [kept(path) for path in RECIPES]
    known = {(key, "" if key in LOOSE else str(value)) for recipe in chosen for key, value in recipe.items()}
    every = [kept(path) for path in recorded.unpacked(experiment).rglob("recipe.toml")]
    assert every
    found = {(key, "" if key in LOOSE else str(value)) for recipe in every for key, value in recipe.items()}
    assert found - known == set()


def lost(recipe: dict[str, Any]) -> list[str]:
    """Keys that are gone and had an effect in this run."""
    gone = {key: value for key, value in RETIRED.items() if not value.methods or recipe["method"] in value.methods}
    return [key for key, value in gone.items() if key in recipe and recipe[key] != value.neutral]


RESUMED = [path for path in RECIPES if not lost(kept(path))]


def read(path: Path) -> dict[str, Any]:
    return read_recipe(path, methods.every_option())


@pytest.mark.parametrize("experiment", ARCHIVED)
def test_every_recorded_recipe_is_read_or_names_the_key_that_is_gone(experiment: str) -> None:
    for path in recorded.unpacked(experiment).rglob("recipe.toml"):
        if gone := lost(kept(path)):
            with pytest.raises(InputError, match=f"^({'|'.join(gone)}) is .*: .*(gone|paper)"):
                read(path)
        else:
            make_method(make_recipe(read(path), {}))


def test_few_of_the_forty_have_a_key_that_is_gone() -> None:
    assert len(RESUMED) >= 32


@pytest.mark.parametrize("path", RESUMED, ids=lambda path: path.stem)
def test_a_recorded_recipe_is_read_with_the_values_it_had(path: Path) -> None:
    recipe = make_recipe(read(path), {})
    found = {flag(name): value for name, value in recipe.values().items()}
    wanted = {key: value for key, value in kept(path).items() if key in found or key not in RETIRED}
    assert wanted.items() <= found.items()
    method = make_method(recipe)
    assert (method is None) == (recipe.method == "serial")
    assert {name: getattr(method, name) for name in recipe.options} == recipe.options


QUICK = list({kept(path)["method"]: path for path in RESUMED}.values())
ALL = [path if path in QUICK else pytest.param(path, marks=pytest.mark.slow) for path in RESUMED]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_run_with_a_recorded_recipe_is_resumed(path: Path, tmp_path: Path) -> None:
    """With the keys that its version knew, on a small network: what `--resume` reads is the recorded text."""
    recipe = kept(path) | {key: value for key, value in SMALL.items() if key in kept(path)}
    stages = 1 if recipe["method"] == "serial" else min(recipe["stages"], 3)
    recipe |= {"stages": stages} | ({"lr": 0.003} if recipe["optimizer"] == "adam" else {})
    asked = tmp_path / "recipe.toml"
    asked.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items()))
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, stop_after=STEPS + 1)
        assert train(out, "--recipe", asked, "--synthetic-samples", 96) == 1
    (out / "recipe.toml").write_text(asked.read_text())
    assert resume(out, *small_flags(recipe)) == 0
    assert summary(out)["status"] == "finished"
    assert [row["epoch"] for row in records(out)] == [0, 1, 2]
    assert summary(out)["method"] == recipe["method"]


def small_flags(recipe: dict[str, Any]) -> list[object]:
    """What the recorded text does not say, as it is of a version that lacked the key."""
    missing = {key: value for key, value in SMALL.items() if key not in recipe}
    return [word for key, value in missing.items() for word in (f"--{flag(key)}", value)]
