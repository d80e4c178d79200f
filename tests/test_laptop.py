"""The table to check at home: its page is what the records say, and its command finds what differs from it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
HERE = ROOT / "results" / "laptop"
sys.path += [str(path) for path in (HERE, HERE.parent) if str(path) not in sys.path]

import home_compare  # noqa: E402
import home_queue  # noqa: E402
import home_records  # noqa: E402
import home_speed  # noqa: E402
import pages  # noqa: E402
import records  # noqa: E402
from home_records import Table  # noqa: E402
from home_rows import PROBLEMS, ROWS, SEEDS, Job, jobs  # noqa: E402

from parlay.bench.processes import Pool  # noqa: E402
from parlay.config.recipe import Recipe  # noqa: E402

AL = ("digits-resnet20", "al-k2")
LATE = 60.0
"""Seconds that a command may take on a busy machine."""


@pytest.fixture(scope="module")
def recorded() -> Table:
    return home_records.read(records.runs("laptop"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages as if this were the only experiment."""
    monkeypatch.setattr(pages, "experiments", lambda: ["laptop"])
    pages.tables.cache_clear()
    pages.figures.cache_clear()
    yield
    pages.tables.cache_clear()
    pages.figures.cache_clear()


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    told = [sys.executable, str(HERE / "run.py"), *map(str, words)]
    return subprocess.run(told, capture_output=True, text=True, timeout=LATE, check=False)


# The page


@pytest.mark.usefixtures("alone")
def test_the_page_is_what_the_records_say() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    assert pages.made(text, "laptop") == text
    cell = next(line for line in text.splitlines() if line.startswith("| AL, K = 2")).split("|")[2]
    assert pages.made(text.replace(cell, " 99.99 ± 0.00 "), "laptop") == text


@pytest.mark.usefixtures("alone")
def test_a_figure_is_the_mean_over_the_seeds(recorded: Table) -> None:
    folder, values = records.runs("laptop"), pages.figures("laptop")
    seeds = recorded.seeds[AL[0]]
    ours, serial = ([accuracy(folder, AL[0], row, seed) for seed in seeds] for row in (AL[1], "serial"))
    assert values["laptop/digits-resnet20-al-k2"] == pytest.approx(statistics.fmean(ours))
    assert values["laptop/digits-resnet20-al-k2-se"] == pytest.approx(statistics.stdev(ours) / len(seeds) ** 0.5)
    gap = statistics.fmean(ours) - statistics.fmean(serial)
    assert values["laptop/digits-resnet20-al-k2-to-serial"] == pytest.approx(gap)


def accuracy(folder: Path, problem: str, row: str, seed: int) -> float:
    told = json.loads((folder / f"{problem}-{row}-s{seed}" / "summary.json").read_text())
    return float(told["test_accuracy"])


@pytest.mark.usefixtures("alone")
def test_without_timings_the_page_says_open(recorded: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.experiment("laptop")
    monkeypatch.setattr(page, "found", lambda: replace(recorded, times={}))
    cells = [cell.strip() for line in page.tables()["time"].splitlines()[2:] for cell in line.split("|")[2:-1]]
    assert set(cells) == {"open"}
    assert not [name for name in page.figures() if name.startswith("time-")]


@pytest.mark.usefixtures("alone")
def test_times_are_those_of_a_sample_trained(recorded: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.experiment("laptop")
    monkeypatch.setattr(page, "found", lambda: timed(recorded, 1.8, 1.7, 1.9))
    assert page.figures()["time-digits-resnet20-al-k2-us"] == pytest.approx(1000 * 25.6 / 128)
    assert "| AL, K = 2 | 200 | 1.80 [1.70, 1.90] |" in page.tables()["time"]


# Against the recorded table


def test_the_same_runs_differ_in_nothing(recorded: Table) -> None:
    lines = home_compare.compare(recorded, recorded)
    assert [line for line in lines if line.startswith("accuracies")] == [f"accuracies: none of {3 * 19} differs"]
    assert [line for line in lines if line.startswith("  ")] == []


def test_a_planted_difference_is_found(recorded: Table) -> None:
    cell = recorded.cells[AL]
    worse = replace(cell, scores={seed: score - 5 for seed, score in cell.scores.items()})
    found = home_compare.compare(replace(recorded, cells={**recorded.cells, AL: worse}), recorded)
    assert f"accuracies: 1 of {3 * 19} differ" in found
    (line,) = [line for line in found if line.startswith("  ")]
    assert line.startswith("  digits, ResNet-20, AL, K = 2: ")


def test_a_difference_within_the_spread_is_none(recorded: Table) -> None:
    cell = replace(recorded.cells[AL], scores=dict(zip(SEEDS, (96.0, 97.0, 98.0, 97.5, 96.5), strict=True)))
    other = replace(cell, scores={seed: score + 1 for seed, score in cell.scores.items()})
    here, there = (replace(recorded, cells={**recorded.cells, AL: each}) for each in (cell, other))
    assert f"accuracies: none of {3 * 19} differs" in home_compare.compare(here, there)


def test_one_test_image_is_no_difference_however_small_the_spread(recorded: Table) -> None:
    cell = replace(recorded.cells[AL], scores=dict.fromkeys(SEEDS, 97.5))
    other = replace(cell, scores=dict.fromkeys(SEEDS, 97.5 + 100 / 360))
    here, there = (replace(recorded, cells={**recorded.cells, AL: each}) for each in (cell, other))
    assert f"accuracies: none of {3 * 19} differs" in home_compare.compare(here, there)


def test_a_row_that_diverges_at_home_alone_is_told(recorded: Table) -> None:
    cell = recorded.cells[AL]
    lost = replace(cell, scores={k: v for k, v in cell.scores.items() if k}, lost={0: "diverged"})
    found = home_compare.compare(replace(recorded, cells={**recorded.cells, AL: lost}), recorded)
    assert [line for line in found if f"1 of {len(cell.scores)} runs diverged here" in line]


def test_speed_ups_differ_where_their_quartiles_do_not_meet(recorded: Table) -> None:
    there = timed(recorded, 1.8, 1.7, 1.9)
    assert "speed-ups: none of 1 differs" in home_compare.compare(timed(recorded, 1.6, 1.5, 1.71), there)
    found = home_compare.compare(timed(recorded, 1.6, 1.5, 1.69), there)
    assert found[-1] == "  digits, ResNet-20, AL, K = 2: 1.60 [1.50, 1.69] here, 1.80 [1.70, 1.90] recorded"


def timed(recorded: Table, usual: float, low: float, high: float) -> Table:
    row = {"system": AL[1], "step_ms": 25.6, "batch_size": 128}
    row |= {"speedup": usual, "speedup_low": low, "speedup_high": high}
    about = {"processor": "one", "torch": "2", "commit": "x", "load_before": 0.0}
    return replace(recorded, times={AL[0]: {"rows": [row], "rounds": 1, "wall_seconds": 60, "environment": about}})


# The command


def test_a_folder_without_mnist_is_refused_in_one_line(tmp_path: Path) -> None:
    ended = command("--data-dir", tmp_path / "none", "--out", tmp_path / "out")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"no files of MNIST in the folder {tmp_path / 'none'}" in line
    assert "parlay data fetch mnist" in line
    assert "--digits" in line
    assert not (tmp_path / "out").exists()


def test_wrong_folders_for_runs_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (("--digits", "--out", tmp_path / "file"), ("--only", "compare", "--out", tmp_path / "none")):
        ended = command(*words)
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        assert "write --out" in line


def test_the_queue_makes_each_run_once_and_what_was_cut_off_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = [Job("digits-resnet8", row, 0, epochs=1) for row in ("serial", "penalty-k2", "local-k3")]
    cut_off = tmp_path / f"{todo[0].name}.partial"
    cut_off.mkdir()
    (cut_off / "records.jsonl").write_text("{}")
    home_queue.make(todo, tmp_path, tmp_path, home_queue.Shown())
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "3 of 3, 0 min left" in told[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(job.name for job in todo)
    for job in todo:
        files = {path.name for path in (tmp_path / job.name).iterdir()}
        assert files == {"cost.json", "recipe.toml", "records.jsonl", "summary.json"}
        cost: dict[str, Any] = json.loads((tmp_path / job.name / "cost.json").read_text())
        assert 0 < cost["cpu_seconds"] < LATE
    home_queue.make(todo, tmp_path, tmp_path, home_queue.Shown())
    assert capsys.readouterr().err == ""


def test_every_row_has_a_run_before_any_has_two() -> None:
    first = jobs()[: len(PROBLEMS) * len(ROWS)]
    assert {job.seed for job in first} == {0}
    assert len({(job.problem, job.row) for job in first}) == 3 * 19
    assert {job.problem for job in jobs(digits=True)} == {"digits-resnet20", "digits-resnet8"}
    for job in jobs():
        Recipe(**job.keys(Path("data")))


# The timing


@pytest.mark.parametrize(
    ("row", "trained"), [("penalty-k2", 0.5), ("sph-p-k2", 0.6), ("al-k2", 1.0), ("sph-al-k2", 1.0)]
)
def test_time_is_per_sample_trained(row: str, trained: float) -> None:
    recipe = Recipe(**Job("digits-resnet8", row, 0).keys(Path("data")))
    letters = home_speed.CYCLE if ROWS[row].hybrid else "P"
    system = home_speed.PerSample(Ten(row), letters, recipe)
    assert system.time(16) == pytest.approx(16 * 10 / trained)


class Ten:
    """In the place of a system whose steps take ten seconds each."""

    stages = 2

    def __init__(self, system: str) -> None:
        self.system = system

    def time(self, steps: int) -> float:
        assert steps in (16, 40)  # plain steps, or a whole cycle
        return 10.0 * steps


@pytest.mark.skipif(bool(home_speed.refused()), reason="stages side by side need two cores")
def test_a_stage_a_process_goes_through_whole_cycles_of_a_hybrid() -> None:
    recipe = home_speed.resolved("digits-resnet8")["sph-p-k2"]
    pool = Pool("sph-p-k2", partial(home_speed.Scheduled, replace(recipe, batch_size=16), home_speed.CYCLE), 2)
    try:
        pool.ready()
        assert pool.time(2 * 40) > 0
    finally:
        pool.close()
