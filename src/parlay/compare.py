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
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from parlay import methods
from parlay.config.keys import check_retired, flag, nearest, parse, said
from parlay.config.recipe import ASIDE, KEYS, RECIPE_BYTES, Recipe, make_recipe
from parlay.errors import InputError
from parlay.files import exists, read_bounded
from parlay.run.progress import Progress, clock
from parlay.run.records import SUMMARY, is_begun, read_summary

OVER = ("finished", "diverged")
"""A run that has ended so is not run again: that a method diverges is a result too."""

LONGEST_ROW = 200  # characters: its run folders are named by it
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
    seeds = [int(part) for part in parts if re.fullmatch("[0-9]{1,19}", part)]
    if len(set(seeds)) < len(parts):
        raise InputError(f"seeds is '{said(text)}': write different whole numbers with commas, as in 0,1,2")
    return seeds


def plan(rows: Sequence[Row], seeds: Sequence[int], base: Mapping[str, Any], out: Path) -> list[Planned]:
    """The runs, seed by seed, so that an early look at the table finds something of every row.

    A key of `base` that a method has no use for, such as the beta of serial training, is left out for it.
    """
    made = {}
    for row in rows:
        left_out = set(methods.every_option()) - set(methods.option_names(row.keys["method"]))
        keys = {**{name: value for name, value in base.items() if name not in left_out}, **row.keys, "out": None}
        with _naming(row.text):
            made[row.text] = make_recipe(keys, {"seed": seeds[0]})
            methods.check_options(made[row.text].method, made[row.text].options)
    for text, filled in _filled(made).items():
        made[text] = replace(made[text], options=filled)
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
    if len(text) > LONGEST_ROW:
        raise InputError(f"'{said(text)}' in methods has {len(text)} characters: write at most {LONGEST_ROW}")
    method, *parts = _NEXT_KEY.split(text)
    if method not in methods.names():
        if not method.replace("-", "").isalnum():
            raise InputError(f"cannot read '{said(text)}' in methods: write a method and keys, as in al:downsample=2")
        methods.check_options(method, {})
    own = {key.name: key for key in KEYS}
    known, keys = {flag(name): name for name in (*own, *methods.every_option())}, {"method": method}
    for part in parts:
        name, _, value = part.partition("=")
        name = flag(name)
        if name not in known:
            check_retired(name, value, method)
            raise InputError(f"unknown key '{said(name)}' in '{said(text)}': write {nearest(name, known)}")
        field = known[name]
        if field in keys:
            raise InputError(f"'{text}' gives {name} twice: write it once")
        if field in _COMMON or name.startswith("synthetic"):
            whole = {"seed": "--seeds 0,1,2", "out": "--out DIR", "tensorboard": "--tensorboard"}
            instead = whole.get(name, f"--{name} {value}")
            raise InputError(f"{name} is the same in all rows of a comparison: write {instead}, not '{text}'")
        keys[field] = parse(value, own.get(field) or methods.option_of(field))
    return Row(text, keys)


def _filled(made: Mapping[str, Recipe]) -> dict[str, dict[str, Any]]:
    """What the methods fill in, so that a run made with another default is not taken for one of these.

    Whatever can be refused is refused here, before the first run.
    """
    from parlay.run import setup as run

    seen: dict[Recipe, str] = {}
    for text, recipe in made.items():
        even = replace(recipe, partition="even") if recipe.partition == "cost" else recipe  # not measured twice
        with _naming(text):
            resolved = replace(run.set_up(even).recipe, partition=recipe.partition)
        if resolved in seen:
            raise InputError(f"'{seen[resolved]}' and '{text}' are the same: leave one of them out")
        seen[resolved] = text
    return {text: own.options for own, text in seen.items()}


def _cut_once(recipe: Recipe, folders: Sequence[Path]) -> Recipe:
    """A cut by cost is measured for the first run of a row; the others, and those of another day, are cut there too."""
    if recipe.partition != "cost" or recipe.method == "serial" or recipe.stages == 1:
        return recipe
    from parlay.run import setup as run

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
    return is_begun(one.folder)


def is_over(one: Planned) -> bool:
    """Has it been made already? A folder with a run of something else is refused."""
    if not exists(one.folder / "recipe.toml"):
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
        return tomllib.loads(read_bounded(folder / "recipe.toml", RECIPE_BYTES).decode())
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{folder} is damaged ({error}): delete it, or write another --out") from None


def status_of(folder: Path) -> str | None:
    """None where there is no summary: the run was killed, or another process is at it."""
    summary = read_summary(folder / SUMMARY)
    return None if summary is None else str(summary["status"])


def _asked(recipe: Recipe) -> dict[str, Any]:
    """The keys that a run's own recipe must agree with: not those that it fills in, nor those of places and records."""
    filled: tuple[str, ...] = ASIDE
    if recipe.method == "serial":
        filled += ("stages", "partition", "schedule")
    return {flag(name): value for name, value in recipe.values().items() if name not in filled}


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
