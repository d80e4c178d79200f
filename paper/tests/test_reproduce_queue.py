"""A queue of rows is served within a budget: what it cuts off goes on later, and no finished row is made again."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay.cli import make_parser
from parlay.cli.flags import checked, given_keys, recipe_keys
from parlay.compare import Planned, Row
from parlay.config.recipe import Recipe
from parlay.run import checkpoints
from parlay_paper import command as flags
from parlay_paper import side_by_side
from parlay_paper.queue import Budget, Queue
from runs import answer, parlay, records, summary

Capsys = pytest.CaptureFixture[str]
DIGITS = """
dataset = "digits"
model = "resnet8"
device = "cpu"
checkpoint-states = "off"
"""
SERIAL, AL = "serial-da-s0", "al-k2-s0"
RUNS = Path("out/runs/cifar10")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(side_by_side, "LOOK", 0.05)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums round otherwise with another number of threads
    Path("digits.toml").write_text(DIGITS)


def command(row: str, epochs: int = 4) -> str:
    return f"parlay reproduce table1 --epochs {epochs} --scale 0.3 --rows {row} --recipe digits.toml --out out"


def write(rows: dict[str, dict[str, Any]], head: str = "") -> None:
    tables = []
    for name, keys in rows.items():
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in {"minutes": 1, **keys}.items() if value is not None]
        tables.append(f"[{name}]\n" + "".join(lines))
    Path("queue.toml").write_text("\n".join([head, *tables]))


def serve(*words: object) -> int:
    return parlay("reproduce", "--queue", "queue.toml", *words)


def states() -> dict[str, str]:
    return {name: keys["state"] for name, keys in tomllib.loads(Path("queue.toml").read_text()).items()}


@pytest.mark.slow
def test_what_a_budget_cuts_off_goes_on_on_another_machine_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = "parlay train --recipe digits.toml --method al --stages 2 --epochs 1 --out out/alone"
    write({"alone": {"command": alone}, SERIAL: {"command": command("serial-da", 12)}}, "# in their order\n")
    cut = Planned(Row(SERIAL, {}), Recipe(), RUNS / SERIAL)
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "over", lambda self: side_by_side.epochs_done(cut) >= 2)  # noqa: ARG005
        assert serve("--minutes", 10, "--json") == 0
    told = {one["row"]: one for one in json.loads(capsys.readouterr().out)["rows"]}
    assert states() == {"alone": "done", SERIAL: "open"}
    assert Path("queue.toml").read_text().startswith("# in their order\n\n[alone]\n")
    assert told["alone"]["why"] == f"{summary(Path('out/alone'))['test_accuracy']:.2f} %"
    assert 2 <= told[SERIAL]["epochs_done"] < 12
    assert summary(RUNS / SERIAL)["status"] == "interrupted"

    there = tmp_path / "there"
    there.mkdir()
    for name in ("digits.toml", "queue.toml", f"{RUNS}/{SERIAL}"):  # its records and newest checkpoint; not the other
        source, target = tmp_path / name, there / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    monkeypatch.chdir(there)
    assert serve("--minutes", 10) == 0
    assert states() == {"alone": "done", SERIAL: "done"}
    assert not Path("out/alone").exists()
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()] == [["alone", "done,"], [SERIAL, "done,"]]
    assert serve("--minutes", 10) == 0  # nothing is open
    words = "train", "--recipe", str(RUNS / f"{SERIAL}.toml"), "--out", "whole"
    subprocess.run([sys.executable, "-m", "parlay.cli", *words], check=True, capture_output=True)
    assert records(RUNS / SERIAL) == records(Path("whole"))


def test_a_row_that_fails_is_said_to_and_is_not_tried_again(capsys: Capsys) -> None:
    Path("digits.toml").write_text(DIGITS.replace("digits", "cifar10"))  # which is not there
    write({SERIAL: {"command": command("serial-da")}})
    assert serve("--minutes", 10) == 1
    assert f"{SERIAL}  failed, " in capsys.readouterr().out
    assert "data" in tomllib.loads(Path("queue.toml").read_text())[SERIAL]["why"]
    assert serve("--minutes", 10) == 0
    assert states() == {SERIAL: "failed"}


def planned(name: str, epochs: int = 10) -> Planned:
    return Planned(Row(name, {}), Recipe(epochs=epochs), RUNS / name)


def measured(name: str, seconds: Sequence[float]) -> None:
    (RUNS / name).mkdir(parents=True)
    lines = [json.dumps({"epoch": n, "phase": "serial", "seconds": value}) for n, value in enumerate(seconds)]
    (RUNS / name / "records.jsonl").write_text("\n".join(lines) + "\n")


def test_a_row_begins_only_where_it_will_end_in_time_with_those_beside_it() -> None:
    write({"long": {"command": "x", "minutes": 12}, "short": {"command": "x", "minutes": 5}})
    queue, long, short = Queue(Path("queue.toml")), planned("long"), planned("short")
    assert not Budget(queue, [long, short], 11).fits(long, [])
    assert Budget(queue, [long, short], 11).fits(short, [])
    assert Budget(queue, [long, short], 13).fits(long, [])
    assert not Budget(queue, [long, short], 13).fits(short, [long])  # 17 minutes of work, at 1.25 times the pace
    assert Budget(queue, [long, short], 15).fits(short, [long])
    assert [Budget(queue, [long], minutes).over() for minutes in (1, 1e-9)] == [False, True]


def test_rows_are_planned_as_far_as_the_budget_may_reach() -> None:
    minutes = {"a": 9, "b": 30, "c": 9, "d": 9, "e": 9}
    write({name: {"command": "x", "minutes": value} for name, value in minutes.items()})
    queue = Queue(Path("queue.toml"))
    assert queue.chosen([], 10) == ["a", "b", "c", "d"]  # of b it is known later whether it has begun
    assert queue.chosen(["e"], 10) == ["e"]


def test_an_estimate_is_that_of_the_first_three_epochs_once_they_are_there() -> None:
    write({SERIAL: {"command": "x", "minutes": 100}, AL: {"command": "x", "minutes": 100}})
    measured(SERIAL, [60, 24, 30, 6])  # the first one compiles; later ones may have had less beside them
    measured(AL, [60, 24])
    queue = Queue(Path("queue.toml"))
    assert queue.needed(planned(SERIAL)) == pytest.approx(6 * 24 / 60)
    assert queue.needed(planned(AL)) == pytest.approx(80)


GOOD = {"command": command("serial-da")}


@pytest.mark.parametrize(
    ("rows", "words", "told"),
    [
        ({SERIAL: {**GOOD, "minutes": None}}, "--minutes 5", f"{SERIAL} has no estimate to go by: write its minutes"),
        ({SERIAL: {**GOOD, "state": "done"}}, f"--minutes 5 --rows {SERIAL}", f"{SERIAL} is done: leave it out"),
        ({SERIAL: GOOD}, "--minutes 5 --rows serail", f"no row 'serail': write {SERIAL}"),
        ({SERIAL: GOOD}, "", "minutes is None: write a number above 0"),
        ({SERIAL: GOOD}, "--minutes 0", "minutes is 0.0: write a number above 0"),
        ({SERIAL: GOOD}, "--minutes 5 --at-once 0", "at-once is 0"),
        ({SERIAL: GOOD}, "--minutes 5 --epochs 4", "epochs stands in the commands of the queue"),
        ({SERIAL: {**GOOD, "minutes": -1}}, "--minutes 5", "minutes is -1 in [serial-da-s0]"),
        ({SERIAL: {**GOOD, "state": "ready"}}, "--minutes 5", "state is 'ready' in [serial-da-s0]"),
        ({SERIAL: {**GOOD, "comand": "x"}}, "--minutes 5", "unknown key 'comand' in [serial-da-s0]"),
        ({SERIAL: {"command": "make demo"}}, "--minutes 5", f"{SERIAL}: the command is 'make demo'"),
        ({SERIAL: {"command": command("nothing")}}, "--minutes 5", f"{SERIAL}: table1 has no row 'nothing'"),
        ({AL: {"command": command("al-k2,al-k3")}}, "--minutes 5", f"{AL}: its command makes 2 runs"),
        ({AL: {"command": "parlay train --recipe digits.toml"}}, "--minutes 5", f"{AL}: its command has no run folder"),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    rows: dict[str, dict[str, Any]], words: str, told: str, capsys: Capsys
) -> None:
    write(rows)
    assert serve(*words.split()) == 2
    assert told in answer(capsys)
    assert not Path("out").exists()


def test_the_queue_of_the_full_length_is_one_that_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    rows = tomllib.loads((root / "paper/results/full/queue.toml").read_text())
    for name, keys in rows.items():
        words = shlex.split(keys["command"])
        assert keys["minutes"] > 0
        if words[1] == "train":
            given = make_parser().parse_args(words[1:])
            checked(recipe_keys(given, None), given_keys(given))
            folder = Path(given.out)
        else:
            (request,) = flags.requests(flags.parser().parse_args(words[2:]))
            ((folder,),) = (request.folders(line) for line in request.selected)
        assert name.removeprefix("vae-") == folder.name
        if keys["state"] == "done":
            assert keys["why"] == f"{summary(folder)['test_accuracy']:.2f} %"
            assert keys["commit"]


def test_minutes_need_a_queue_and_a_queue_its_file(capsys: Capsys) -> None:
    assert parlay("reproduce", "table1", "--minutes", 5) == 2
    assert "no estimate to go by: write --queue" in answer(capsys)
    assert serve("--minutes", 5) == 2
    assert "no queue at queue.toml" in answer(capsys)


def test_a_folder_of_other_keys_is_refused(capsys: Capsys) -> None:
    write({SERIAL: GOOD})
    (RUNS / SERIAL).mkdir(parents=True)
    recipe = Recipe(dataset="digits", model="resnet8", method="serial", augment="random", lr_schedule="step", epochs=5)
    (RUNS / SERIAL / "recipe.toml").write_text(replace(recipe, device="cpu").toml())
    assert serve("--minutes", 5) == 2
    assert "holds a run with epochs 5, not 4" in answer(capsys)


@pytest.mark.parametrize(("key", "value"), [("cuts", [2]), ("phases", "SPPP"), ("seed", 1)])
def test_a_checkpoint_of_another_row_is_refused(key: str, value: Any, capsys: Capsys) -> None:
    write({SERIAL: GOOD})
    meta = {"cuts": [], "phases": "SSSS", "seed": 0, key: value}
    meta["made_with"] = {"seed": meta.pop("seed")}
    checkpoints.save(RUNS / SERIAL / "checkpoints", 1, {"stage-0": {"weights/w": torch.zeros(1)}}, meta)
    assert serve("--minutes", 5) == 2
    assert f"is of another row (its {key} differ): take it away, or bring that of {SERIAL}" in answer(capsys)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_that_is_not_in_the_history_is_refused(capsys: Capsys) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=A", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", ".")
    git("commit", "-q", "--allow-empty", "-m", "one")
    here = git("rev-parse", "--short", "HEAD")
    write({SERIAL: {**GOOD, "commit": here, "state": "done"}})
    assert serve("--minutes", 5) == 0
    capsys.readouterr()
    write({SERIAL: {**GOOD, "commit": "0123456"}})
    assert serve("--minutes", 5) == 2
    assert f"the commit 0123456 of {SERIAL} is not in the history" in answer(capsys)
