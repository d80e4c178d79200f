"""The queue of a long reproduction, run within a budget of minutes: its rows lie in a TOML file, in their order.

    [serial-da-s0]         its name here
    command = "parlay reproduce table1 --epochs 200 --rows serial-da --out paper/results/full"
    minutes = 12.0         alone, as far as is known
    state = "open"         or done, or failed
    why = ""               its accuracy, or what went wrong
    commit = ""            whose code ran it

In: the file, and the run folders. Out: the file with what has become of each row. No torch at the top.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from parlay.compare import Planned, begun, status_of
from parlay.config.keys import nearest
from parlay.errors import InputError
from parlay.files import write_whole
from parlay.run.records import RECORDS, SUMMARY, Record, read_records, read_summary

OPEN, DONE, FAILED = STATES = ("open", "done", "failed")
MEASURED = 3  # epochs; the first ones compile, so the fastest of them counts
SIDE_BY_SIDE = 1.25  # times as fast as one by one, on an H200 (docs/reproducing.md)
REACHED = 2.0  # times the budget is more work than it can hold


@final
@dataclass(frozen=True)
class Entry:
    """A row of the queue."""

    command: str
    minutes: float | None = None
    """Alone. None: unknown, and the row cannot be served within a budget."""
    state: str = OPEN
    why: str = ""
    commit: str = ""


@final
class Queue:
    """The file, written anew whenever a row has changed; the comment at its top stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text()
            content = tomllib.loads(text)
        except FileNotFoundError:
            raise InputError(f"no queue at {path}: write the path of a TOML file") from None
        except (ValueError, OSError) as error:
            raise InputError(
                f"{path} is no queue ({error}): write a TOML file with a table for each row, as in [serial-da-s0]"
            ) from None
        found = re.match(r"(#.*\n)*", text)
        self.head = found[0] if found else ""
        self.entries = {name: _entry(f"[{name}] of {path}", keys) for name, keys in content.items()}
        self._refuse_other_histories()

    def chosen(self, names: Sequence[str], minutes: float) -> list[str]:
        """The open rows of these names; where none are given, as many of the next as could be reached in the minutes:
        to plan a row takes seconds of the GPU too."""
        for name in names:
            if name not in self.entries:
                raise InputError(f"{self.path} has no row '{name}': write {nearest(name, self.entries or ['a row'])}")
            if self.entries[name].state != OPEN:
                raise InputError(f"{name} is {self.entries[name].state}: leave it out, or write state = 'open' for it")
        found, work = [], 0.0
        for name, entry in self.entries.items():
            if entry.state == OPEN and (name in names if names else work <= REACHED * minutes):
                found.append(name)
                needed = entry.minutes or 0.0
                work += needed if needed <= minutes else 0.0
        return found

    def note(self, one: Planned, said: str | None = None) -> None:
        """What has become of a row; `said`: its process has ended with these words."""
        name, status = one.row.text, status_of(one.folder)
        old = new = self.entries[name]
        if status == "finished":
            new = replace(old, state=DONE, why=_result(one.folder))
        elif status == "diverged" or not (said or "interrupted").startswith("interrupted"):
            new = replace(old, state=FAILED, why=said or status or "")
        if (new != old or begun(one)) and not old.commit:
            new = replace(new, commit=code_commit())
        if new != old:
            self.entries[name] = new
            tables = [f"[{_key(name)}]\n{_toml(entry)}" for name, entry in self.entries.items()]
            write_whole(self.path, "\n".join([*([self.head] if self.head else []), *tables]))

    def needed(self, one: Planned) -> float | None:
        """Minutes for the epochs that are left: by the row's own first epochs, by the queue before there are three."""
        rows, epochs = _records(one.folder), one.recipe.epochs
        left = max(epochs - len(rows), 0)
        if len(rows) >= MEASURED:
            return left * min(float(row["seconds"]) for row in rows[:MEASURED]) / 60
        minutes = self.entries[one.row.text].minutes
        return None if minutes is None else minutes * left / epochs

    def standing(self, planned: Sequence[Planned]) -> list[dict[str, Any]]:
        """All rows, and of those that were asked for how far they are."""
        runs = {one.row.text: one for one in planned}
        rows = []
        for name, entry in self.entries.items():
            far: dict[str, Any] = {"epochs_done": None, "epochs": None, "minutes_left": entry.minutes}
            if (one := runs.get(name)) is not None:
                far = {"epochs_done": len(_records(one.folder)), "epochs": one.recipe.epochs}
                far["minutes_left"] = self.needed(one)
            rows.append({"row": name, **asdict(entry), **far})
        return rows

    def _refuse_other_histories(self) -> None:
        """A commit that ran a row must be one that a reader can look up. Outside of a repository nobody can."""
        where = self.path.absolute().parent
        commits = {entry.commit: name for name, entry in self.entries.items() if entry.commit}
        if not commits or _git(where, "rev-parse", "HEAD") is None:
            return
        for commit, name in commits.items():
            if _git(where, "merge-base", "--is-ancestor", commit, "HEAD") is None:
                raise InputError(f"the commit {commit} of {name} is not in the history: write the one that ran it")


@final
class Budget:
    """Minutes from now on, for these rows of a queue."""

    def __init__(self, queue: Queue, planned: Iterable[Planned], minutes: float) -> None:
        self.queue, self.minutes, self.began = queue, minutes, time.monotonic()
        unknown = [one.row.text for one in planned if queue.needed(one) is None]
        if unknown:
            where = f"write its minutes in {queue.path}, as in minutes = 12"
            raise InputError(f"{unknown[0]} has no estimate to go by: {where}")

    @property
    def left(self) -> float:
        return self.minutes - (time.monotonic() - self.began) / 60

    def over(self) -> bool:
        return self.left <= 0

    def fits(self, one: Planned, running: Sequence[Planned]) -> bool:
        """Will it end in time, and will those that run beside it?"""
        own, *others = (self.queue.needed(run) or 0.0 for run in (one, *running))
        return own <= self.left and (not others or own + sum(others) <= SIDE_BY_SIDE * self.left)


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row."""
    width = max((len(row["row"]) for row in rows), default=0)
    lines = []
    for row in rows:
        words = [row["state"], row["why"]]
        if row["state"] == OPEN:
            far = f"epoch {row['epochs_done']} of {row['epochs']}" if row["epochs_done"] else ""
            words = [OPEN, far, f"{row['minutes_left']:.1f} minutes left" if row["minutes_left"] is not None else ""]
        lines.append(f"{row['row']:<{width}}  {', '.join(word for word in words if word)}")
    return "\n".join(lines)


def code_commit() -> str:
    """The commit of the code that runs here; empty where it lies in no repository."""
    here = Path(__file__)
    tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name)
    return (_git(here.parent, "rev-parse", "--short", "HEAD") or "") if tracked else ""


def _git(where: Path, *words: str) -> str | None:
    """What it prints; None where there is no git, or where it says no."""
    if shutil.which("git") is None:
        return None
    made = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=False)
    return made.stdout.strip() if made.returncode == 0 else None


def _entry(at: str, keys: Any) -> Entry:
    known = [key.name for key in fields(Entry)]
    if not isinstance(keys, dict):
        raise InputError(f"{at} is {keys!r}: write a table for each row, as in [serial-da-s0]")
    for key, value in keys.items():
        if key not in known:
            raise InputError(f"unknown key '{key}' in {at}: write '{nearest(key, known)}'")
        if key == "minutes" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise InputError(f"minutes is {value!r} in {at}: write a number above 0")
        if key != "minutes" and not isinstance(value, str):
            raise InputError(f"{key} is {value!r} in {at}: write a text")
    if not keys.get("command"):
        raise InputError(f"{at} has no command: write that of its run, as in parlay reproduce table1")
    if keys.get("state", OPEN) not in STATES:
        raise InputError(f"state is '{keys['state']}' in {at}: write one of {', '.join(STATES)}")
    return Entry(**keys)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _toml(entry: Entry) -> str:
    values = {key: value for key, value in asdict(entry).items() if value is not None}
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def _records(folder: Path) -> list[Record]:
    return read_records(folder / RECORDS)


def _result(folder: Path) -> str:
    found = read_summary(folder / SUMMARY) or {}
    if found.get("test_accuracy") is not None:
        return f"{found['test_accuracy']:.2f} %"
    return f"test loss {found['test_loss']:.4f}" if found.get("test_loss") is not None else ""
