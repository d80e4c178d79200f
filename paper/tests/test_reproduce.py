"""The paper's tables are here to the letter, their rows are ordinary runs, and no column mixes two kinds of numbers."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parlay.compare import Planned, Row
from parlay.config.recipe import Recipe
from parlay_paper import speed
from parlay_paper.side_by_side import Concurrent
from parlay_paper.tables import EXPERIMENTS, Line
from runs import answer, is_running, listen, parlay, summary, wait_for

Capsys = pytest.CaptureFixture[str]

TINY = """
model = "resnet8"
dataset = "synthetic"
synthetic-shape = "1,8,8"
synthetic-samples = 96
batch-size = 32
device = "cpu"
"""
ROWS = "serial-da,al-k2,sph-al-k3-1to4"


def lines(name: str) -> tuple[Line, ...]:
    return EXPERIMENTS[name].lines


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[al]\nlrr = 1", "unknown key 'lrr' in [al] of {}: write 'lr'"),
        ("[all]\nlr = 1", "unknown key 'all' in {}: write 'al'"),
        ("al = 3", "al is 3 in {}: write a table of keys, as in [al]"),
        ("[al]\nlr = -1", "lr is -1: write a number greater than 0"),
        ("[al]\nstages = 2", "stages is what the rows are made of: leave it out of the recipe"),
    ],
)
def test_a_wrong_key_for_a_kind_of_rows_is_named(text: str, told: str, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    assert parlay("reproduce", "table1", "--recipe", str(path), "--out", str(tmp_path / "out")) == 2
    assert told.format(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_side_by_side_share_the_memory_of_the_device(tmp_path: Path) -> None:
    planned = [Planned(Row(f"row {n}", {}), Recipe(), tmp_path / str(n)) for n in range(3)]
    needs = {one.folder: 10 * (n + 1) for n, one in enumerate(planned)}
    first, _, third = planned

    def chosen(room: int | None, running: list[Planned]) -> Planned | None:
        runs = Concurrent([third], 3, room, needs)
        runs.running = [(one, None) for one in running]  # type: ignore[misc]
        return runs.next()

    assert chosen(5, []) is third  # alone, whatever it needs
    assert chosen(None, [first]) is third
    assert chosen(40, [first]) is None  # the first one still compiles
    first.folder.mkdir()
    (first.folder / "records.jsonl").write_text("{}\n")
    assert chosen(40, [first]) is third
    assert chosen(39, [first]) is None
    assert chosen(None, [first] * 3) is None


def test_rows_are_those_of_one_table(capsys: Capsys) -> None:
    assert parlay("reproduce", "table1", "table3", "--rows", "al-k2") == 2
    assert "write a single name" in capsys.readouterr().err


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small network and data in the place of the paper's; nothing leaves this process to be timed."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(speed, "link_speed", lambda kind: 1e9)  # noqa: ARG005
    monkeypatch.setattr(speed, "ROUNDS", 1)
    return ["table1", "--recipe", str(tmp_path / "tiny.toml"), "--epochs", "3", "--out", str(tmp_path / "out")]


def test_a_figure_without_speeds_times_nothing_and_names_the_device_of_its_runs(
    tiny: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    assert parlay("reproduce", "figure7", *tiny[1:], "--rows", "serial-da,sph-al-k3-1to4", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out/runs/cifar10/timings.json").exists()
    assert told["environment"]["devices"] == ["cpu"]
    assert not any("speed-up" in note for note in told["notes"])
    table = (tmp_path / "out/figure7/figure7.md").read_text()
    assert "speed-up, measured" not in table  # a column with nothing in it
    assert "speed-up, paper" in table


@pytest.mark.slow
def test_several_are_reproduced_at_once_and_share_their_runs(tiny: list[str], tmp_path: Path, capsys: Capsys) -> None:
    words = [*tiny[1:], "--epochs", "1"]
    assert parlay("reproduce", "figure4", "figure7", *words) == 0
    said = capsys.readouterr()
    assert said.out.count("# Figure") == said.out.count("reproduction: ") == 2
    folders = [path.name for path in (tmp_path / "out/runs/cifar10").iterdir()]
    assert len(folders) == len({line.name for name in ("figure4", "figure7") for line in lines(name)}) == 14
    assert parlay("reproduce", "figure7", "figure4", *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)["reproductions"]
    assert [one["name"] for one in told] == ["figure7", "figure4"]
    assert all(row["status"] == "1 finished" for one in told for row in one["rows"])


@pytest.mark.slow
def test_a_table_is_reproduced_from_ordinary_runs_and_goes_on_after_an_interruption(
    tiny: list[str], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["reproduce", *tiny, "--rows", ROWS, "--json"]
    listen(monkeypatch, stop_after=14)  # in the second of the runs, of 9 steps each
    assert parlay(*words) == 1
    told = capsys.readouterr()
    assert "interrupted: the same command goes on" in told.err
    first = json.loads(told.out)
    assert {row["row"]: row["status"] for row in first["rows"] if row["folders"]} == {
        "serial-da": "1 finished",
        "al-k2": "1 interrupted",
    }
    folder = tmp_path / "out/runs/cifar10/serial-da-s0"
    before = (folder / "summary.json").stat().st_mtime_ns
    listen(monkeypatch)
    assert parlay(*words) == 0
    second = json.loads(capsys.readouterr().out)
    assert (folder / "summary.json").stat().st_mtime_ns == before
    rows = {row["row"]: row for row in second["rows"]}
    assert len(rows) == 21
    for name in ROWS.split(","):
        own = summary(tmp_path / "out" / "table1" / rows[name]["folders"][0])
        assert rows[name]["status"] == "1 finished"
        assert rows[name]["value"] == own["test_accuracy"]
    assert rows["al-k2"]["memory_gib"] == pytest.approx(rows["al-k2"]["formula_gib"])
    assert rows["al-k2"]["speedup_projected"] > 0
    assert all(row["speedup_measured"] is None for row in second["rows"])  # on a CPU it would say nothing
    assert set(second["stage_ms"]) == set(second["message_ms"]) == {"2", "3"}
    assert "3 epochs in the place of 200" in second["labels"]
    assert "model resnet8 in the place of resnet110" in second["labels"]
    out = tmp_path / "out" / "table1"
    assert json.loads((out / "reproduction.json").read_text()) == second
    table = list(csv.DictReader((out / "table1.csv").read_text().splitlines()))
    assert [row["row"] for row in table] == [line.name for line in lines("table1")]
    assert [row["paper_memory"] for row in table][2:4] == ["1.53", "4.58"]
    text = (out / "table1.md").read_text()
    assert "Not the paper's experiment" in text
    assert "| AL (K=2) | 2 | parallel |" in text
    assert (out / "report.html").stat().st_size > 10_000
    assert all((out / figure["file"]).is_file() for figure in second["figures"])


@pytest.mark.slow
def test_rows_run_side_by_side_as_processes_of_the_same_command(
    tiny: list[str], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = listen(monkeypatch)
    words = ["reproduce", *tiny, "--rows", "serial-da,al-k2", "--at-once", "2", "--epochs", "1", "--json"]
    assert parlay(*words) == 0
    rows = {row["row"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [rows[name]["status"] for name in ("serial-da", "al-k2")] == ["1 finished"] * 2
    assert heard.steps == 2  # an epoch of each
    assert sum("finished; test accuracy" in line for line in heard.lines) == 2
    assert (tmp_path / "out/runs/cifar10/al-k2-s0.log").is_file()


@pytest.mark.slow
def test_when_the_command_is_killed_none_of_its_runs_is_left(tiny: list[str], tmp_path: Path) -> None:
    words = ["reproduce", *tiny, "--rows", "serial-da,al-k2", "--at-once", "2", "--epochs", "100000"]
    command = subprocess.Popen([sys.executable, "-m", "parlay.cli", *words], stderr=subprocess.DEVNULL)
    locks = [tmp_path / f"out/runs/cifar10/{name}-s0/.lock" for name in ("serial-da", "al-k2")]
    try:
        wait_for(lambda: all(lock.is_file() and lock.read_text().strip() for lock in locks))
        made = [int(lock.read_text()) for lock in locks]
        assert all(map(is_running, made))
    finally:
        command.kill()
        command.wait()
    try:
        wait_for(lambda: not any(map(is_running, made)), 5)
    finally:
        for pid in filter(is_running, made):
            os.kill(pid, signal.SIGKILL)


def test_a_run_that_was_not_compiled_is_not_made_again_where_others_are(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY + 'compile = "off"\n')
    assert parlay("reproduce", *tiny, "--rows", "serial-da") == 0
    records = tmp_path / "out/runs/cifar10/serial-da-s0/records.jsonl"
    before = records.stat().st_mtime_ns
    (tmp_path / "tiny.toml").write_text(TINY)
    assert parlay("reproduce", *tiny, "--rows", "serial-da") == 0
    assert records.stat().st_mtime_ns == before


def test_other_keys_in_a_folder_that_holds_runs_are_refused(tiny: list[str], capsys: Capsys) -> None:
    assert parlay("reproduce", *tiny, "--rows", "serial-da") == 0
    capsys.readouterr()
    assert parlay("reproduce", *tiny, "--rows", "serial-da", "--epochs", "4") == 2
    assert "holds a run with epochs 3, not 4: write another --out" in answer(capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "table1..table5"),
        ("table9", "unknown name 'table9': write one of table1"),
        ("table1 --rows serail-da", "table1 has no row 'serail-da': write serial-da"),
        ("table1 --scale 0", "scale is 0.0: write a share"),
        ("table1 --scale 2", "scale is 2.0: write a share"),
        ("table1 --at-once 0", "at-once is 0: write a number of at least 1"),
        ("table1 --epochs 0", "epochs is 0: write a number of at least 1"),
        ("table1 --seeds 0,0", "seeds is '0,0'"),
        ("table1 --recipe nowhere.toml", "no recipe at nowhere.toml"),
        ("table1 --model resnet8", "unknown flag '--model'"),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    words: str, told: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parlay("reproduce", *words.split()) == 2
    assert told in answer(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_may_not_replace_what_rows_are_made_of(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "own.toml").write_text('schedule = "serial"\n')
    assert parlay("reproduce", "table1", "--recipe", tmp_path / "own.toml", "--out", tmp_path / "out") == 2
    assert "schedule is what the rows are made of" in answer(capsys)
