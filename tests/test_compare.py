"""The same work by several methods: what a row means, that runs are made once, and what the table says of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parlay.compare import read_rows, read_seeds
from parlay.errors import InputError
from parlay.run import setup as run
from runs import SMALL, answer, listen, parlay, records, summary

ROWS = "serial,al,al:downsample=2:schedule=alternate:1:1"
FOLDERS = ("serial", "al", "al-downsample-2-schedule-alternate-1-1")


def compare(out: Path, *words: object) -> int:
    return parlay("compare", *SMALL, "--out", out, "--epochs", 3, "--stages", 2, "--schedule", "parallel", *words)


# What a row means

READ: dict[str, list[dict[str, Any]]] = {
    "serial": [{"method": "serial"}],
    "serial,al, penalty": [{"method": "serial"}, {"method": "al"}, {"method": "penalty"}],
    "al:downsample=2": [{"method": "al", "downsample": 2}],
    "al:schedule=alternate:4:1,serial": [{"method": "al", "schedule": "alternate:4:1"}, {"method": "serial"}],
    "al:schedule=tail:4:1:stages=2": [{"method": "al", "schedule": "tail:4:1", "stages": 2}],
    "al:partition=4,7,serial": [{"method": "al", "partition": "4,7"}, {"method": "serial"}],
    "al:partition=4,7:beta=1e-1": [{"method": "al", "partition": "4,7", "beta": 0.1}],
    "al:lr=1:beta_final=2": [{"method": "al", "lr": 1.0, "beta_final": 2.0}],
    "al:reach=0.5": [{"method": "al", "reach": 0.5}],
}


@pytest.mark.parametrize("text", READ)
def test_rows_are_methods_with_keys_of_their_own(text: str) -> None:
    assert [dict(row.keys) for row in read_rows(text)] == READ[text]


def test_rows_name_their_folders() -> None:
    assert [row.name for row in read_rows(ROWS)] == list(FOLDERS)
    assert read_rows("al:beta=0.5:reach=0.7")[0].name == "al-beta-0.5-reach-0.7"


def test_seeds_are_whole_numbers() -> None:
    assert read_seeds("0, 7,12") == [0, 7, 12]
    for text in ("", "0,", "1,1", "1,01", "x", "-1", "0 1", "0.5"):
        with pytest.raises(InputError, match="as in 0,1,2"):
            read_seeds(text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--methods seriel", "(nearest: serial)"),
        ("--methods serial,,al", "write a method and keys, as in al:downsample=2"),
        ("--methods al:downsample", "write a method and keys, as in al:downsample=2"),
        ("--methods al=2", "write a method and keys, as in al:downsample=2"),
        ("--methods al:downsampel=2", "write downsample"),
        ("--methods al:downsample=x", "downsample is 'x': write a whole number"),
        ("--methods al:downsample=3", "al:downsample=3: unknown downsample '3': write one of 1, 2, 4"),
        ("--methods al:beta=x", "beta is 'x': write a number"),
        ("--methods al:schedule=alternate:4", "write alternate:4:1"),
        ("--methods al:seed=1", "write --seeds 0,1,2"),
        ("--methods al:epochs=1", "epochs is the same in all rows of a comparison: write --epochs 1"),
        ("--methods al:batch-size=8", "write --batch-size 8"),
        ("--methods al:synthetic-samples=8", "write --synthetic-samples 8"),
        ("--methods al:method=al", "write it once"),
        ("--methods al:beta=1:beta=2", "write it once"),
        ("--methods al,serial,al", "'al' twice"),
        ("--methods al,al:stages=2", "'al' and 'al:stages=2' are the same: leave one of them out"),
        ("--methods serial,serial:downsample=2:reach=1", "reach is not for method 'serial'"),
        ("--methods al:stages=99", "al:stages=99: "),
        ("--seeds 1,x", "as in 0,1,2"),
        ("--seed 1", "write --seeds"),
        ("--method al", "write --methods"),
        ("--epochs 0", "write a number of at least 1"),
        ("--recipe none.toml", "no recipe at none.toml"),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path / "out", *words.split()) == 2
    assert told in answer(capsys)
    assert not (tmp_path / "out").exists()


def test_rows_and_seeds_may_stand_in_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text('methods = ["serial", "al:downsample=2"]\nseeds = [3]\nlr = 0.05\nepochs = 9\n')
    assert compare(tmp_path / "out", "--recipe", tmp_path / "c.toml", "--epochs", 1, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert ([row["method"] for row in told["rows"]], told["seeds"]) == (["serial", "al:downsample=2"], [3])
    assert (tmp_path / "out" / "al-downsample-2-s3" / "recipe.toml").read_text().count("lr = 0.05") == 1
    (tmp_path / "c.toml").write_text("seeds = 3\n")
    assert compare(tmp_path / "out", "--recipe", tmp_path / "c.toml") == 2
    assert "write a list" in answer(capsys)


def test_no_torch_is_loaded_to_read_the_rows() -> None:
    code = "import sys, parlay.compare, parlay.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Runs


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three rows with two seeds."""
    out = tmp_path_factory.mktemp("compare") / "out"
    assert compare(out, "--methods", ROWS, "--seeds", "0,1", "--beta", 2, "--report") == 0
    return out


@pytest.fixture
def out(done: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(done, tmp_path / "out"))


def again(out: Path, *words: object) -> int:
    return compare(out, "--methods", ROWS, "--seeds", "0,1", "--beta", 2, *words)


def stamps(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}


def test_every_run_is_an_ordinary_run_folder(done: Path, tmp_path: Path) -> None:
    names = sorted(f"{name}-s{seed}" for name in FOLDERS for seed in (0, 1))
    assert sorted(path.name for path in done.iterdir() if path.is_dir()) == names
    for name in names:
        assert (done / name / "model.safetensors").is_file()
        assert not (done / name / "report.html").exists()
    alone = ("--out", tmp_path / "alone", "--epochs", 3, "--stages", 2, "--schedule", "parallel", "--seed", 1)
    assert parlay("train", *SMALL, *alone, "--beta", 2) == 0
    assert not (tmp_path / "alone" / "report.html").exists()
    assert records(tmp_path / "alone") == records(done / "al-s1")
    assert (tmp_path / "alone" / "recipe.toml").read_text() == (done / "al-s1" / "recipe.toml").read_text()


def test_the_table_has_accuracy_time_memory_and_staleness(done: Path) -> None:
    told = json.loads((done / "comparison.json").read_text())
    assert (told["status"], told["seeds"], told["epochs"]) == ("finished", [0, 1], 3)
    assert [row["method"] for row in told["rows"]] == ROWS.split(",")
    serial, al, down = told["rows"]
    for row in told["rows"]:
        assert row["runs"] == len(row["values"]) == 2
        assert row["test_accuracy"] == pytest.approx(sum(row["values"]) / 2)
        assert row["test_accuracy_spread"] >= 0
        assert row["step_ms"] > 0
        assert row["speedup"] == pytest.approx(serial["step_ms"] / row["step_ms"])
    assert [row["staleness"] for row in told["rows"]] == [0, 3, 3]  # an epoch has three steps
    assert (serial["speedup"], serial["auxiliary_bytes"], serial["parallel_step_ms"]) == (1, 0, None)
    assert al["auxiliary_bytes"] == 4 * down["auxiliary_bytes"]
    page = (done / "report.html").read_text()
    assert "Times are measured, on cpu in one process" in page
    assert "their seconds are no speed-up" in page
    assert "speed-up over serial" not in page
    assert [row["takes_turns"] for row in told["rows"]] == [False, True, True]


def test_runs_that_are_done_are_not_made_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = stamps(out)
    (out / "report.html").unlink()
    capsys.readouterr()
    assert again(out) == 0
    told = capsys.readouterr()
    assert told.err == "6 of 6 runs are done already\n"
    assert stamps(out) == before
    assert not (out / "report.html").exists()
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["method", *ROWS.split(",")]
    assert again(out, "--report") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert (out / "report.html").is_file()


def test_runs_that_are_missing_are_made(out: Path, done: Path) -> None:
    shutil.rmtree(out / "al-s0")
    (out / "serial-s1" / "summary.json").write_text('{"status": "failed"}')
    (out / f"{FOLDERS[2]}-s0" / "summary.json").write_text('{"status": "diverged"}')  # a result, and not made again
    before = stamps(out)
    assert again(out, "--json") == 0
    after = stamps(out)
    assert {name for name in after if after[name] != before.get(name)} == {"al-s0", "serial-s1"}
    for name in ("al-s0", "serial-s1"):
        assert summary(out / name)["status"] == "finished"
        assert records(out / name) == records(done / name)


def test_an_interrupted_comparison_goes_on_where_it_stood(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    heard = listen(monkeypatch, stop_after=9 + 4)  # in the second run
    assert again(out) == 1
    assert f"interrupted: the same command goes on with {out}" in capsys.readouterr().err
    told = [line.partition(", after")[0] for line in heard.lines]
    assert told == ["run 1 of 6: serial, seed 0", "run 2 of 6: al, seed 0"]
    assert json.loads((out / "comparison.json").read_text())["status"] == "interrupted"
    assert summary(out / "al-s0")["status"] == "interrupted"
    monkeypatch.undo()
    assert again(out) == 0
    for name in ("serial-s0", "al-s0", "al-s1"):
        assert records(out / name, "violation_at_entry") == records(done / name, "violation_at_entry")


def test_a_run_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = run.train

    def failing(recipe: Any, *rest: Any) -> Any:
        if recipe.method == "al":
            raise RuntimeError("a device\nis gone")
        return train(recipe, *rest)

    monkeypatch.setattr(run, "train", failing)
    assert compare(tmp_path, "--methods", "al,serial", "--epochs", 1) == 1
    told = capsys.readouterr()
    assert "al, seed 0: failed; RuntimeError: a device is gone" in told.err.splitlines()
    assert [line.split()[0] for line in told.out.splitlines()[1:3]] == ["method", "serial"]
    assert json.loads((tmp_path / "comparison.json").read_text())["status"] == "failed"


def test_a_folder_with_other_runs_is_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = stamps(out)
    capsys.readouterr()
    assert again(out, "--lr", 0.2) == 2
    assert answer(capsys).endswith("serial-s0 holds a run with lr 0.1, not 0.2: write another --out, or delete it")
    (out / "al-s1" / "summary.json").write_text("{")
    assert again(out) == 2
    assert "summary.json is damaged (not JSON)" in answer(capsys)
    assert {**stamps(out), "al-s1": 0} == {**before, "al-s1": 0}


def test_runs_with_another_default_of_their_method_are_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = out / "al-s0" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("reach = 0.25", "reach = 0.5"))
    capsys.readouterr()
    assert again(out) == 2
    assert answer(capsys).endswith("al-s0 holds a run with reach 0.5, not 0.25: write another --out, or delete it")


def test_a_cut_by_cost_is_measured_once_for_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter(["1", "2", "3"])
    set_up = run.set_up

    def measured(recipe: Any) -> Any:
        if recipe.partition == "cost":
            recipe = run.replace(recipe, partition=next(places))
        return set_up(recipe)

    monkeypatch.setattr(run, "set_up", measured)
    for seeds in ("0,1", "0,1,2"):  # another day, another measurement: the cut stays
        assert compare(tmp_path, "--methods", "al", "--partition", "cost", "--seeds", seeds, "--epochs", 1) == 0
    cuts = [summary(tmp_path / f"al-s{seed}")["cuts"] for seed in (0, 1, 2)]
    assert cuts == [[1], [1], [1]]
