"""The same work by several methods: one ordinary run after another, one table, one page.

In: a recipe, the methods with what is their own, seeds. Out: a folder of run folders, `comparison.json`, `report.html`.

    serial                                   a method
    al:downsample=2                          with keys of the recipe, behind colons
    al:schedule=alternate:4:1:stages=2       a key's value may hold colons
    al:partition=4,7                         and commas, as long as a number follows them

No torch at the top: wrong input is answered at once.
"""

from __future__ import annotations

import gc
import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from parlay.errors import InputError
from parlay.progress import Progress, clock
from parlay.recipe import ASIDE, METHODS, Recipe, flag, nearest

OVER = ("finished", "diverged")
"""A run that has ended so is not run again: that a method diverges is a result too."""

_NEXT_METHOD = re.compile(r",(?=\s*[A-Za-z])")
_NEXT_KEY = re.compile(r":(?=[A-Za-z_-]+=)")

_COMMON = ("dataset", "data_dir", "model", "epochs", "batch_size", "device", "seed", "out", "tensorboard")
"""What must be the same in all rows, or the comparison would not be one."""

Fit = Callable[[Recipe, Path, bool, Progress], Mapping[str, Any]]
"""Trains a recipe into a run folder, going on with it where asked to, and gives the summary."""


@final
@dataclass(frozen=True)
class Row:
    """A method and what is its own."""

    text: str
    """As it was written."""
    keys: Mapping[str, Any]
    """By the names of the recipe's fields; the method is one of them."""

    @property
    def name(self) -> str:
        """Of its run folders."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.text).strip("-")


@final
@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    row: Row
    recipe: Recipe
    folder: Path

    @property
    def title(self) -> str:
        return f"{self.row.text}, seed {self.recipe.seed}"


def read_rows(text: str) -> list[Row]:
    """The rows of `--methods`."""
    rows = [_row(part.strip()) for part in _NEXT_METHOD.split(text)]
    for n, row in enumerate(rows):
        if row.name in [other.name for other in rows[:n]]:
            raise InputError(f"methods holds '{row.text}' twice: write each row once")
    return rows


def read_seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    seeds = [int(part) for part in parts if part.isdecimal()]
    if len(set(seeds)) < len(parts):
        raise InputError(f"seeds is '{text}': write different whole numbers with commas between them, as in 0,1,2")
    return seeds


def plan(rows: Sequence[Row], seeds: Sequence[int], base: Mapping[str, Any], out: Path) -> list[Planned]:
    """The runs, seed by seed, so that an early look at the table finds something of every row.

    A key of `base` that a method has no use for, such as the beta of serial training, is left out for it.
    """
    from parlay import run

    own = {name for method in METHODS for name in run.method_keys(method)}
    made = {}
    for row in rows:
        left_out = own - run.method_keys(row.keys["method"])
        keys = {**{name: value for name, value in base.items() if name not in left_out}, **row.keys, "out": None}
        with _naming(row.text):
            made[row.text] = Recipe(**{**keys, "seed": seeds[0]})
    for text, filled in _filled(made).items():
        made[text] = replace(made[text], **filled)
    found = []
    for row in rows:
        folders = [out / f"{row.name}-s{seed}" for seed in seeds]
        recipe = _cut_once(made[row.text], folders)
        found.append([Planned(row, replace(recipe, seed=n), at) for n, at in zip(seeds, folders, strict=True)])
    return [one for seed in zip(*found, strict=True) for one in seed]


def carry_out(planned: Sequence[Planned], fit: Fit, progress: Progress) -> str:
    """Make the runs that are missing. Gives the status of the whole: finished, interrupted or failed.

    Where one fails the others still run; an interrupt ends them all, and the next call goes on from there.
    """
    left = [one for one in planned if not is_over(one)]
    if len(left) < len(planned):
        progress.line(f"{len(planned) - len(left)} of {len(planned)} runs are done already")
    together, failed = _Together(progress, len(left)), False
    try:
        for number, one in enumerate(left, 1):
            together.announce(number, one.title)
            status, message = _carried_out(one, fit, together)
            if status == "interrupted":
                return status
            if status != "finished":
                progress.line(f"{one.title}: {status}; {message}")
            failed = failed or status not in OVER
    finally:
        progress.end()
    return "failed" if failed else "finished"


def table(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """A row for every method that has a run to show, in the order in which they were asked for."""
    from parlay.report.groups import compare
    from parlay.report.load import load

    folders = there(planned)
    if not folders:
        return []
    texts = {one.folder.name: one.row.text for one in planned}
    found = {}
    for task in compare(load(folders), timed=True):
        for group, row in zip(task.configurations, task.rows, strict=True):
            about = {"folders": [run.name for run in group.runs], "values": group.values(task.score)}
            found[texts[group.runs[0].name]] = {"method": texts[group.runs[0].name], **row, **about}
    return [found[text] for text in dict.fromkeys(texts.values()) if text in found]


def there(planned: Sequence[Planned]) -> list[Path]:
    """The run folders that hold something already."""
    return [one.folder for one in planned if (one.folder / "records.jsonl").is_file()]


def _row(text: str) -> Row:
    method, *parts = _NEXT_KEY.split(text)
    if method not in METHODS:
        if not method.replace("-", "").isalnum():
            raise InputError(f"cannot read '{text}' in methods: write a method and its keys, as in al:downsample=2")
        raise InputError(f"unknown method '{method}': write one of {', '.join(METHODS)} (nearest: {_near(method)})")
    known, keys = {flag(key.name): key for key in fields(Recipe)}, {"method": method}
    for part in parts:
        name, _, value = part.partition("=")
        name = flag(name)
        if name not in known:
            raise InputError(f"unknown key '{name}' in '{text}': write {nearest(name, known)}")
        field = known[name]
        if field.name == "method" or field.name in keys:
            raise InputError(f"'{text}' gives {name} twice: write it once")
        if field.name in _COMMON or name.startswith("synthetic"):
            whole = {"seed": "--seeds 0,1,2", "out": "--out DIR", "tensorboard": "--tensorboard"}
            instead = whole.get(name, f"--{name} {value}")
            raise InputError(f"{name} is the same in all rows of a comparison: write {instead}, not '{text}'")
        keys[field.name] = _value(name, value, str(field.type).split(" | ")[0])
    return Row(text, keys)


def _value(name: str, text: str, kind: str) -> Any:
    kinds: dict[str, tuple[Callable[[str], Any], str]] = {
        "str": (str, ""),
        "int": (int, "a whole number, as in 2"),
        "float": (float, "a number, as in 0.1"),
    }
    of, form = kinds[kind]
    try:
        return of(text)
    except ValueError:
        raise InputError(f"{name} is '{text}': write {form}") from None


def _filled(made: Mapping[str, Recipe]) -> dict[str, dict[str, Any]]:
    """What the methods fill in, so that a run made with another default is not taken for one of these.

    Whatever can be refused is refused here, before the first run.
    """
    from parlay import run

    seen: dict[Recipe, str] = {}
    for text, recipe in made.items():
        even = replace(recipe, partition="even") if recipe.partition == "cost" else recipe  # not measured twice
        with _naming(text):
            resolved = replace(run.set_up(even).recipe, partition=recipe.partition)
        if resolved in seen:
            raise InputError(f"'{seen[resolved]}' and '{text}' are the same: leave one of them out")
        seen[resolved] = text
    return {text: {key: getattr(own, key) for key in run.method_keys(own.method)} for own, text in seen.items()}


def _cut_once(recipe: Recipe, folders: Sequence[Path]) -> Recipe:
    """A cut by cost is measured for the first run of a row; the others, and those of another day, are cut there too."""
    if recipe.partition != "cost" or recipe.method == "serial" or recipe.stages == 1:
        return recipe
    from parlay import run

    before = (kept(folder) for folder in folders if (folder / "recipe.toml").is_file())
    cuts = next((keys["partition"] for keys in before if "partition" in keys), None)
    return replace(recipe, partition=cuts or run.set_up(recipe).recipe.partition)


@contextmanager
def _naming(row: str) -> Iterator[None]:
    """A refusal says which row is meant."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{row}: {error}") from None


def _carried_out(one: Planned, fit: Fit, progress: Progress) -> tuple[str, str]:
    """How a run has ended. An error of one run is no reason to leave the others out."""
    try:
        summary = fit(one.recipe, one.folder, begun(one), progress)
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as error:
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        gc.collect()  # stages and recorded steps hold each other; the next run needs their memory
    return str(summary["status"]), str(summary["message"])


def begun(one: Planned) -> bool:
    return (one.folder / "records.jsonl").exists()


def is_over(one: Planned) -> bool:
    """Has it been made already? A folder with a run of something else is refused."""
    if not (one.folder / "recipe.toml").is_file():
        return False
    theirs = kept(one.folder)
    for name, value in _asked(one.recipe).items():
        if name in theirs and theirs[name] != value:
            raise InputError(
                f"{one.folder} holds a run with {name} {theirs[name]}, not {value}: write another --out, or delete it"
            )
    return status_of(one.folder) in OVER


def kept(folder: Path) -> dict[str, Any]:
    """The recipe of a run."""
    try:
        return tomllib.loads((folder / "recipe.toml").read_text())
    except (ValueError, OSError) as error:
        raise InputError(f"{folder} is damaged ({error}): delete it, or write another --out") from None


def status_of(folder: Path) -> str | None:
    """None where there is no summary: the run was killed, or another process is at it."""
    try:
        content = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise InputError(f"{folder} is damaged ({error}): delete it, or write another --out") from None
    return content.get("status") if isinstance(content, dict) else None


def _asked(recipe: Recipe) -> dict[str, Any]:
    """The keys that a run's own recipe must agree with: not those that it fills in, nor those of places and records."""
    filled: tuple[str, ...] = ASIDE
    if recipe.method == "serial":
        filled += ("stages", "partition", "schedule")
    values = {key.name: getattr(recipe, key.name) for key in fields(recipe) if key.name not in filled}
    return {flag(name): value for name, value in values.items() if value is not None}


def _near(method: str) -> str:
    return nearest(method, METHODS)


@final
class _Together(Progress):
    """One progress for all runs: the time left is that of the whole comparison, at the pace of the current run."""

    def __init__(self, inner: Progress, runs: int) -> None:
        self.inner, self.runs = inner, runs
        self.number, self.title = 0, ""
        self.began = time.monotonic()

    def announce(self, number: int, title: str) -> None:
        spent = f", after {clock(time.monotonic() - self.began)}" if number > 1 else ""
        self.inner.line(f"run {number} of {self.runs}: {title}{spent}")
        self.number, self.title = number, title

    def begin(self, steps: int, done: int) -> None:
        """Every run has as many steps, but for those with copies of the images."""
        self.inner.begin(steps * self.runs, steps * (self.number - 1) + done)

    def step(self, text: str) -> None:
        self.inner.step(f"run {self.number} of {self.runs}: {self.title}, {text}")

    def epoch(self, record: dict[str, Any], epochs: int) -> None:
        self.inner.epoch(record, epochs)

    def line(self, text: str) -> None:
        self.inner.line(text)

    def end(self) -> None:
        """Of one run; the next one goes on with the same bar."""
