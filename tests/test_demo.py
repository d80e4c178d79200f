"""The demo trains, times two cores, says what came out whoever wins, and deletes nothing but what a demo wrote."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import recorded
from parlay.bench.core import Problem, Result, as_json
from parlay.cli import demo
from parlay.config.recipe import Recipe
from parlay.demo import folder, runs, speed
from parlay.files import FolderLock
from parlay.report.load import read_bench
from parlay.run.progress import Silent
from runs import answer, last_line, listen, parlay

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
WHY_NOT = speed.why_not

STEADY = {
    "serial": 100.0,
    "serial-two-threads": 60.0,
    "layer-parallel": 55.0,
    "pipeline-1f1b": 67.0,
    "data-parallel": 53.0,
}


def row(system: str, times: list[float], serial: list[float]) -> Result:
    """Of these milliseconds, round by round."""
    gains = tuple(b / t for b, t in zip(serial, times, strict=True))
    return Result(system, 2, Problem("resnet20", 64), tuple(value / 1000 for value in times), gains)


def rows(**changed: float | list[float]) -> list[Result]:
    """Five rounds of every system; the times of some are others than usual."""
    given = {**STEADY, **{name.replace("_", "-"): value for name, value in changed.items()}}
    times = {name: value if isinstance(value, list) else [value] * 5 for name, value in given.items()}
    return [row(name, of, times["serial"]) for name, of in times.items()]


def measured(*_: object) -> dict[str, Any]:
    found = rows()
    return as_json(found, {"torch": "2"}, "parlay demo", rounds=5, steps=2, says=speed.says(found))


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A demo of some seconds: a small network, two runs, times from a script. Gives its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "Recipe", partial(Recipe, model="resnet8", device="cpu"))
    monkeypatch.setattr(runs, "ROWS", {name: runs.ROWS[name] for name in ("serial", "al-k2")})
    monkeypatch.setattr(speed, "why_not", lambda: None)
    monkeypatch.setattr(speed, "measure", measured)
    return Path("runs/demo")


def test_it_trains_times_two_cores_and_leaves_a_page(quick: Path, capsys: Capsys) -> None:
    assert parlay("demo", "--epochs", 1) == 0
    told = capsys.readouterr()
    line = (
        "Two stages on two cores: 1.82 times one core; pipeline 1.49, data parallel 1.89: "
        "data parallel is the fastest here, so take it where the network fits."
    )
    parts = ["digits, resnet8", "resnet20, batch 64, on two cores", line, f"report: {quick / 'report.html'}"]
    assert sorted(parts, key=told.out.index) == parts
    assert told.out.count("digits, resnet8") == 1
    assert "run 2 of 2: AL" in told.err
    assert "left" in told.err
    page = (quick / "report.html").read_text()
    assert line in page
    assert "AL K=2" in page
    kept = json.loads((quick / "bench.json").read_text())
    assert kept["says"][0] == line
    assert sorted(path.name for path in Path().iterdir()) == ["runs"]


def test_with_json_the_object_stands_alone_and_another_demo_replaces_only_what_a_demo_wrote(
    quick: Path, capsys: Capsys
) -> None:
    assert parlay("demo", "--epochs", 2) == 0
    notes, weights = quick / "notes.txt", quick / "al-k2" / "mine.pt"
    notes.write_text("precious")
    weights.write_text("precious")
    (quick / "more").mkdir()
    capsys.readouterr()
    assert parlay("demo", "--epochs", 1, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert json.loads((quick / "demo.json").read_text()) == {"made_by": "parlay demo", **told}
    assert (told["status"], told["epochs"]) == ("finished", 1)
    assert [one["label"] for one in told["rows"]] == ["Serial w/o DA", "AL K=2"]
    assert told["speedups"]["layer-parallel"] == pytest.approx(100 / 55)
    assert len((quick / "al-k2" / "records.jsonl").read_text().splitlines()) == 1
    assert notes.read_text() == weights.read_text() == "precious"
    assert (quick / "more").is_dir()


def test_a_folder_of_other_things_is_refused_and_nothing_of_it_is_deleted(quick: Path, capsys: Capsys) -> None:
    assert parlay("train", "--model", "resnet8", "--epochs", 1, "--out", quick / "serial", "--device", "cpu") == 0
    capsys.readouterr()
    assert parlay("demo", "--epochs", 1) == 2
    assert (
        answer(capsys) == f"{quick} holds serial, which no demo wrote: write --out with a new folder, or move it away"
    )
    assert (quick / "serial" / "model.safetensors").exists()
    assert [path.name for path in quick.iterdir()] == ["serial"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "file"], "file is a file: write --out with a folder"),
        (["--epochs", 0], "epochs is 0: write a number of at least 1"),
        (["--epochs", "x"], "'x' is no whole number"),
        (["--stages", 2], "unknown flag '--stages'"),
    ],
)
def test_wrong_input_is_answered_in_one_line(quick: Path, words: list[object], told: str, capsys: Capsys) -> None:
    Path("file").write_text("precious")
    assert parlay("demo", *words) == 2
    assert told in answer(capsys)
    assert Path("file").read_text() == "precious"
    assert not quick.exists()


def test_a_folder_in_which_another_demo_runs_is_refused_before_anything_is_deleted(quick: Path, capsys: Capsys) -> None:
    (quick / "serial").mkdir(parents=True)
    folder.write(quick, {"status": "begun"})
    (quick / "serial" / "records.jsonl").write_text("{}\n")
    with FolderLock(quick):
        assert parlay("demo", "--epochs", 1) == 2
    assert "is in use by process" in answer(capsys)
    assert (quick / "serial" / "records.jsonl").exists()


def test_an_interrupted_demo_says_how_to_begin_again_and_is_replaced(
    quick: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        listen(patch, stop_after=3)
        assert parlay("demo", "--epochs", 1) == 1
    assert last_line(capsys) == "parlay: interrupted: the same command begins again"
    assert json.loads((quick / "demo.json").read_text())["status"] == "interrupted"
    assert parlay("demo", "--epochs", 1) == 0


def test_a_process_that_is_lost_is_told_and_the_page_of_the_runs_is_there(
    quick: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    def lost(*_: object) -> dict[str, Any]:
        raise RuntimeError("layer-parallel: process 1 ended (exit code -9)")

    monkeypatch.setattr(speed, "measure", lost)
    assert parlay("demo", "--epochs", 1) == 1
    assert last_line(capsys) == ("parlay: no speed could be timed: layer-parallel: process 1 ended (exit code -9)")
    assert "AL K=2" in (quick / "report.html").read_text()
    assert not (quick / "bench.json").exists()


def test_one_core_is_no_reason_to_fail_but_one_to_time_nothing(quick: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setattr(speed, "why_not", WHY_NOT)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert parlay("demo", "--epochs", 1) == 0
    finally:
        os.sched_setaffinity(0, before)
    said = "No speed is timed: stages that work at the same time need two cores, and this process may use one core."
    assert said in capsys.readouterr().out
    assert not (quick / "bench.json").exists()
    assert "AL K=2" in (quick / "report.html").read_text()


@pytest.mark.parametrize(
    ("quota", "told"), [("max 100000", None), ("400000 100000", None), ("150000 100000", "1.5 cores' worth of time")]
)
def test_a_container_with_the_time_of_one_core_times_nothing(
    quota: str, told: str | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(speed, "cores", lambda: [0, 1])
    monkeypatch.setattr(speed, "QUOTA", tmp_path / "cpu.max")
    assert speed.why_not() is None  # no such file
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert (told or "") in (speed.why_not() or "")
    assert (speed.why_not() is None) == (told is None)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "data parallel is the fastest here, so take it where the network fits"),
        ({"data_parallel": 70.0}, "two stages are the fastest here"),
        ({"data_parallel": 55.5}, "data parallel is as fast as any here, so take it where the network fits"),
        ({"pipeline_1f1b": 50.0}, "the pipeline is the fastest here, so take it"),
        ({"serial": 50.0, "data_parallel": 60.0}, "nothing is faster than one core here, so train serially"),
        ({"data_parallel": [54, 57, 55, 53, 58]}, "data parallel is as fast as any here"),
        ({"data_parallel": [40, 80, 55, 50, 75]}, "the rounds differ too much to name the fastest"),
        ({"data_parallel": [200, 130, 110, 160, 100]}, "the rounds differ too much to name the fastest"),
    ],
)
def test_the_line_names_the_fastest_whoever_it_is(changed: dict[str, Any], verdict: str) -> None:
    line = speed.says(rows(**changed))[0]
    assert verdict in line
    assert len(line.split()) <= 30


def test_two_threads_of_one_process_are_told_too() -> None:
    assert speed.says(rows())[1].startswith("One process with two threads: 1.67. ")
    assert "1.96, the fastest of all on these cores." in speed.says(rows(serial_two_threads=51.0))[1]


def test_figures_that_vary_are_told_with_their_spread() -> None:
    assert len(speed.says(rows())) == 2
    told = speed.says(rows(layer_parallel=[55, 50, 80, 90, 55]), 3.2)[2]
    assert told.startswith("These figures are unsteady: in the middle half of the rounds, two stages had 1.25 to 1.82")
    assert "load average 3.2" in told


def test_other_programs_at_work_are_told_even_where_the_figures_are_steady(monkeypatch: Patch) -> None:
    monkeypatch.setattr(speed, "cores", lambda: [0, 1])
    assert len(speed.says(rows(), 1.9)) == 2
    assert speed.says(rows(), 5.4)[2].startswith("Other programs were at work (load average 5.4 before)")


def test_two_cores_are_really_timed(monkeypatch: Patch) -> None:
    keys: dict[str, Any] = {"dataset": "synthetic", "model": "resnet8", "synthetic_shape": "1,8,8"}
    small = Recipe(**keys, method="al", stages=2, partition="even", batch_size=16)
    monkeypatch.setattr(speed, "RECIPE", small)
    monkeypatch.setattr(speed, "ROUNDS", (3, 3))
    found = json.loads(json.dumps(speed.measure(Silent(), "parlay demo")))
    read = read_bench(found, Path("bench.json"))
    assert [one["system"] for one in read["rows"] if not one["system"].startswith("pipeline")] == [
        *("serial", "serial-two-threads", "layer-parallel", "data-parallel")
    ]
    assert all(one["speedup"] > 0 for one in read["rows"])
    assert re.match(r"Two stages on two cores: \d", read["says"][0])
    pipeline = next(one for one in found["rows"] if one["system"].startswith("pipeline"))
    assert len(pipeline["tried_step_ms"]) == 6
    assert found["rounds"] == 3


def test_the_hybrid_row_is_the_recorded_one_that_is_level_with_serial_training() -> None:
    page, figures = recorded.module("pages").experiment("digits-hybrid"), recorded.figures("digits-hybrid")
    words = f"{page.COMMON} {page.RUNS['ds-tail-hold'][0]}".split()
    asked = {flag[2:].replace("-", "_"): value for flag, value in pairwise(words) if flag.startswith("--")}
    _, row = runs.ROWS["ds-sph-al-k3"]
    assert {key: str(value) for key, value in row.items()}.items() <= asked.items()
    assert int(asked["epochs"]) == demo.EPOCHS
    assert figures["ds-tail-hold-to-serial"] > -1
    assert figures["ds-tail-hold-lowest"] >= 95
