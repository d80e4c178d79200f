"""The paper's tables are here to the letter, their rows are ordinary runs, and no column mixes two kinds of numbers."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parlay import run
from parlay.compare import Planned
from parlay.recipe import Recipe
from parlay.reproduce import alone, beside, columns, figures, runs, speed
from parlay.reproduce.columns import MEASURED, PROJECTED, QUOTED, Facts
from parlay.reproduce.old_load import Epoch, Run
from parlay.reproduce.paper import EXPERIMENTS, MISPRINTS, WORKLOADS, Line
from parlay.reproduce.request import Request, read_instead
from runs import SMALL, answer, is_running, listen, parlay, summary, train, wait_for

Capsys = pytest.CaptureFixture[str]

# The tables as the paper prints them.
TABLE1 = """
Serial w/o DA - 86.4 -
Serial with DA - 93.7 -
Penalty (K=2) 1.53 85.0 1.41
AL (K=2) 3.05 85.7 1.36
Penalty (K=3) 4.58 84.5 1.56
AL (K=3) 9.12 85.2 1.49
DS-P (K=2) 0.38 84.2 1.53
DS-AL (K=2) 0.57 84.1 1.42
DS-P (K=3) 1.44 83.7 1.69
DS-AL (K=3) 2.29 83.7 1.58
SPH-P (K=2) 1.53 91.8 1.30
SPH-AL (K=2) 3.05 91.8 1.27
SPH-P (K=3) 4.58 91.3 1.40
SPH-AL (K=3) 9.12 91.4 1.35
DS-SPH-P (K=2) 0.38 91.8 1.38
DS-SPH-AL (K=2) 0.57 91.6 1.31
DS-SPH-P (K=3) 1.44 91.8 1.48
DS-SPH-AL (K=3) 2.29 91.5 1.41
"""
TABLE2 = """
Serial w/o DA - 66.53 -
Serial with DA - 80.71 -
Penalty (K=3) 45.77 64.91 1.89
AL (K=3) 91.55 64.80 1.67
DS-P (K=3) 11.44 61.06 2.19
DS-AL (K=3) 22.89 60.84 1.92
SPH-P (K=3) 45.77 75.25 1.52
SPH-AL (K=3) 91.55 76.25 1.42
DS-SPH-P (K=3) 11.44 76.23 1.76
DS-SPH-AL (K=3) 22.89 76.84 1.62
"""
TABLE5 = """
Serial - 0.126 -
Penalty (K=3) - 0.149 2.33
AL (K=3) - 0.129 2.18
DS-P (K=3) - 0.160 2.41
DS-AL (K=3) - 0.137 2.25
DS-SPH-P (K=3) - 0.127 1.88
DS-SPH-AL (K=3) - 0.128 1.80
"""
# ratio, kind, then speed-up and accuracy of the penalty method and of AL
TABLE3 = """
1:4 SPH 1.40 91.25 1.35 91.38
2:3 SPH 1.27 92.36 1.24 92.64
3:2 SPH 1.16 92.85 1.14 93.13
4:1 SPH 1.07 93.18 1.07 93.75
1:4 DS-SPH 1.48 91.75 1.41 91.54
2:3 DS-SPH 1.32 92.79 1.28 92.58
3:2 DS-SPH 1.19 93.58 1.17 93.11
4:1 DS-SPH 1.08 93.62 1.08 93.66
"""
TABLE4 = """
1:4 SPH 1.52 75.25 1.42 76.25
2:3 SPH 1.34 78.02 1.28 78.32
3:2 SPH 1.21 79.40 1.17 79.63
4:1 SPH 1.09 80.00 1.08 80.67
1:4 DS-SPH 1.76 76.23 1.62 76.84
2:3 DS-SPH 1.48 78.34 1.40 78.08
3:2 DS-SPH 1.28 80.22 1.24 79.97
4:1 DS-SPH 1.12 80.69 1.11 80.37
"""

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


@pytest.mark.parametrize(("name", "text"), [("table1", TABLE1), ("table2", TABLE2), ("table5", TABLE5)])
def test_every_row_of_the_tables_is_here_with_what_the_paper_prints(name: str, text: str) -> None:
    printed = {}
    for row in text.strip().splitlines():
        label, *numbers = row.rsplit(" ", 3)
        printed[label] = tuple(None if n == "-" else float(n) for n in numbers)
    quoted = [line.quoted for line in lines(name)]
    ours = {line.label.removesuffix(", 1:4"): q for line, q in zip(lines(name), quoted, strict=True) if not line.ours}
    assert {label: (q.memory, q.value, q.speedup) for label, q in ours.items()} == printed


@pytest.mark.parametrize(("name", "text", "serial"), [("table3", TABLE3, 93.70), ("table4", TABLE4, 80.70)])
def test_every_hybrid_ratio_is_here_with_what_the_paper_prints(name: str, text: str, serial: float) -> None:
    printed: dict[str, tuple[float | None, float]] = {"Serial with DA": (None, serial)}
    for row in text.strip().splitlines():
        ratio, kind, *numbers = row.split()
        a, b, c, d = map(float, numbers)
        printed |= {f"{kind}-P (K=3), {ratio}": (a, b), f"{kind}-AL (K=3), {ratio}": (c, d)}
    found = {line.label: (line.quoted.speedup, line.quoted.value) for line in lines(name)}
    assert found == printed


def test_a_ratio_is_serial_to_parallel_epochs() -> None:
    """1:4 has 80 % of the epochs in parallel (the paper's text); alternately on CIFAR-10, at the end on CIFAR-100."""
    schedules = {line.ratio: line.keys(WORKLOADS["cifar10"])["schedule"] for line in lines("table3") if line.ratio}
    assert schedules == {"1:4": "alternate:4:1", "2:3": "alternate:3:2", "3:2": "alternate:2:3", "4:1": "alternate:1:4"}
    assert (WORKLOADS["cifar10"].hybrid, WORKLOADS["cifar100"].hybrid) == ("alternate", "tail")


def test_rows_have_a_rate_of_their_own_but_for_one_that_is_asked_for(tmp_path: Path) -> None:
    """And it is said: the paper has one rate for all."""
    wanted = {"serial-da": "cosine", "sph-al-k3-1to4": "hold:0.3"}
    plain, other = Request("table2", tmp_path), Request("table2", tmp_path, instead={"lr_schedule": "step"})
    for request, rates in (plain, wanted), (other, dict.fromkeys(wanted, "step")):
        rows = {line.name: {**request.keys(), **request.row(line).keys} for line in request.lines}
        assert {name: rows[name]["lr_schedule"] for name in wanted} == rates
    assert plain.labels() == ["lr-schedule hold:0.3 in the place of cosine (hybrids)"]
    assert other.labels() == ["lr-schedule step in the place of cosine"]


def test_a_recipe_may_have_keys_for_one_kind_of_rows(tmp_path: Path) -> None:
    """They go before those for all rows, and before the rates that a kind has; what is not the paper's is said."""
    (tmp_path / "r.toml").write_text('lr = 0.2\n[al]\nlr = 0.03\n[hybrid]\nlr-schedule = "hold"\n[serial]\nlr = 0.1\n')
    instead, of_kind = read_instead(tmp_path / "r.toml")
    request = Request("table2", tmp_path, instead=instead, of_kind=of_kind)
    rows = {line.name: {**request.keys(), **request.row(line).keys} for line in request.lines}
    rates = {name: (rows[name]["lr"], rows[name]["lr_schedule"]) for name in ("al-k3", "sph-al-k3-1to4", "serial-da")}
    assert rates == {"al-k3": (0.03, "cosine"), "sph-al-k3-1to4": (0.2, "hold"), "serial-da": (0.1, "cosine")}
    assert request.labels() == [
        "lr 0.2 in the place of 0.1",
        "lr 0.03 in the place of 0.1 (AL without serial epochs)",
        "lr-schedule hold in the place of cosine (hybrids)",
    ]


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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_has_a_name_of_its_own_and_a_valid_recipe(name: str, tmp_path: Path) -> None:
    request = Request(name, tmp_path)
    assert (
        len({line.name for line in request.lines}) == len({line.label for line in request.lines}) == len(request.lines)
    )
    for line in request.lines:
        recipe = Recipe(**{**request.keys(), **request.row(line).keys})
        run.make_method(recipe)  # refuses keys that the method does not take
        assert re.fullmatch(r"[a-z0-9-]+", line.name)


def test_the_printed_memory_is_that_of_the_formula_but_for_the_known_misprints(tmp_path: Path) -> None:
    numbers = {
        "cifar10": {2: 32 * 16 * 16, 3: 16 * 32 * 32 + 32 * 16 * 16},
        "cifar100": {3: 160 * 32 * 32 + 320 * 16 * 16},
    }
    misprinted = set()
    for name in ("table1", "table2"):
        request = Request(name, tmp_path)
        for line in request.lines:
            if line.quoted.memory is None:
                continue
            elements = numbers[request.experiment.workload][line.stages] / line.downsample**2
            gib = 50_000 * elements * 4 * (2 if line.method == "al" else 1) / 2**30
            printed = line.quoted.memory
            assert MISPRINTS.get(printed, printed) == pytest.approx(gib, abs=0.0075), line.label
            misprinted |= {printed} & MISPRINTS.keys()
    assert misprinted == MISPRINTS.keys()


@pytest.mark.parametrize(("row", "gib"), [("penalty-k2", 1.53), ("ds-al-k3", 2.29), ("sph-al-k3-1to4", 9.16)])
def test_the_column_of_the_formula_is_the_formula(row: str, gib: float, tmp_path: Path) -> None:
    request = Request("table1", tmp_path, scale=0.1, instead={"device": "cpu"})
    line = next(line for line in request.lines if line.name == row)
    assert runs.formula_bytes(runs.recipe_of(request, line)) / 2**30 == pytest.approx(gib, abs=0.005)


def test_figures_use_the_runs_of_their_tables() -> None:
    names = {name: {line.name for line in lines(name)} for name in EXPERIMENTS}
    assert names["figure7"] < names["table1"]
    assert names["figure8"] < names["table2"]
    assert names["figure5"] == names["table2"] | names["table4"]
    assert names["figure6"] < names["table5"]


def made(line: Line, number: float, parallel: bool = True) -> Run:
    """A run as it would be loaded, of two epochs."""
    epochs = tuple(
        Epoch(n, parallel and n > 1, (), 1 / n, 1 / n, number * n / 2, (0.1,) * (n - 1), (), 1.0, 0.0, 0.1, None)
        for n in (1, 2)
    )
    return Run(line.name, "finished", "", {}, "", epochs, (), 1, 2**30, 1.0, 1.0, 1.0, {}, number, 0.5)


@pytest.mark.parametrize("loss", [False, True])
def test_no_column_mixes_what_is_measured_projected_and_quoted(loss: bool) -> None:
    kinds = {column.key: column.kind for column in columns.columns(loss)}
    assert {key for key, kind in kinds.items() if kind == QUOTED} == {"paper_value", "paper_memory", "paper_speedup"}
    for line in lines("table1"):
        empty = columns.row(line, [], Facts(""), loss)
        assert all(not empty[key] for key, kind in kinds.items() if kind in (MEASURED, PROJECTED))
        full = columns.row(line, [made(line, 50.0), made(line, 60.0)], Facts("", 2**30, 1.25, 2.5), loss)
        assert (full["value"], full["seeds"]) == (0.5 if loss else 55.0, 2)
        assert (full["speedup_measured"], full["speedup_projected"]) == (1.25, 2.5)
        assert (full["speedup_measured_per_sample"], full["speedup_projected_per_sample"]) == (1.25, 2.5)
        for row in (empty, full):
            quoted = line.quoted
            assert (row["paper_value"], row["paper_memory"]) == (quoted.value, quoted.memory)
            assert row["paper_speedup"] == quoted.speedup


def test_penalty_is_also_counted_per_sample_trained() -> None:
    """A run of a serial and a parallel epoch: a stage trains on three of four samples."""
    found = columns.columns(False)
    rows = []
    for name in ("penalty-k2", "al-k2"):
        line = next(line for line in lines("table1") if line.name == name)
        run = replace(made(line, 50.0), recipe={"method": line.method, "stages": line.stages})
        rows.append(columns.row(line, [run], Facts("", 2**30, 2.0, 2.4), False))
    assert [row["trained_share"] for row in rows] == [0.75, 1.0]
    assert [row["speedup_measured_per_sample"] for row in rows] == [1.5, 2.0]
    assert [row["speedup_projected_per_sample"] for row in rows] == pytest.approx([1.8, 2.4])
    keys = [column.key for column in columns.telling(found, rows)]
    assert {"speedup_measured_per_sample", "speedup_projected_per_sample"} < set(keys)
    assert "spread" not in keys
    assert not any("per_sample" in column.key for column in columns.telling(found, rows[1:]))


def test_runs_that_have_not_finished_do_not_count() -> None:
    line = lines("table1")[2]
    row = columns.row(line, [made(line, 80.0), replace(made(line, 1.0), status="diverged")], Facts("parallel"), False)
    assert (row["value"], row["spread"], row["seeds"], row["status"]) == (80.0, None, 1, "1 finished, 1 diverged")


def test_the_projection_is_the_slowest_stage_with_its_messages() -> None:
    timing = speed.Timing(30.0, [10.0, 12.0, 8.0], [1000, 3000], 1e6, measured=1.5)
    assert timing.projected == pytest.approx(30 / 16)  # the middle stage: 12 ms, and 4000 bytes at 1000 a millisecond
    measured, projected = speed.speedups(timing, "SPPPP")
    assert measured == pytest.approx(5 / (1 + 4 / 1.5))  # eq. (11)
    assert projected == pytest.approx(5 / (1 + 4 * 16 / 30))
    assert speed.speedups(None, "SPPPP") == speed.speedups(timing, "") == (None, None)
    assert speed.speedups(replace(timing, measured=None), "SP")[0] is None


def test_what_cannot_be_timed_is_left_empty_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = speed.Timing(30.0, [10.0, 12.0], [0], 1e6, measured=None)

    def timed(recipe: Recipe, link: float) -> speed.Timing:  # noqa: ARG001
        if recipe.stages == 3:
            raise torch.OutOfMemoryError("no room\nat all")
        return known

    monkeypatch.setattr(speed, "_timed", timed)
    monkeypatch.setattr(speed, "link_speed", lambda kind: 1e9)  # noqa: ARG005
    told: list[str] = []
    recipes = [Recipe(stages=k, device="cpu") for k in (3, 2)]
    speed.Timings(tmp_path / "timings.json", "cpu").add(recipes, told.append)
    kept = speed.Timings(tmp_path / "timings.json", "cpu")
    assert (kept.of(recipes[0]), kept.of(recipes[1])) == (None, known)
    assert any(line.endswith("could not be timed: no room") for line in told)


def test_timings_of_other_hardware_are_kept_and_nothing_is_timed_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, here = tmp_path / "timings.json", speed.Timing(1.0, [1.0, 1.0], [0], 1e6, measured=None)
    there = speed.Timing(30.0, [10.0, 12.0], [0], 1e6, measured=1.5)
    known, unknown = Recipe(stages=2, device="cpu"), Recipe(stages=3, device="cpu")
    monkeypatch.setattr(speed, "_timed", lambda recipe, link: here)  # noqa: ARG005
    monkeypatch.setattr(speed, "link_speed", lambda kind: 1e9)  # noqa: ARG005
    about, told = {"devices": ["a GPU"]}, list[str]()
    content = {"device": "a GPU", "timings": {speed._key(known): asdict(there)}, "environment": about}
    path.write_text(json.dumps(content))

    timings = speed.Timings(path, "cpu")
    timings.add([known], told.append)
    assert (timings.of(known), timings.environment, told) == (there, about, [])
    timings.add([known, unknown], told.append)
    assert (timings.of(known), timings.of(unknown)) == (there, None)
    assert json.loads(path.read_text()) == content
    assert "is of a GPU; what it lacks is not timed: delete it" in told[0]

    path.unlink()
    timings = speed.Timings(path, "cpu")
    timings.add([known, unknown], told.append)
    assert (timings.of(known), timings.of(unknown)) == (here, here)
    assert timings.environment["devices"] == [timings.here] == [speed.Timings(path, "cpu").device]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_timed_alone_on_noise_does_not_diverge(stage: int) -> None:
    """At the full rate this one is not finite after a few steps."""
    keys = {"dataset": "synthetic", "synthetic_samples": 64, "synthetic_shape": "1,8,8", "device": "cpu"}
    timed = alone.Alone(Recipe(**keys, model="resnet8", method="penalty", stages=2, batch_size=16, lr=1000.0), stage)
    try:
        assert timed.time(20) > 0
    finally:
        timed.close()


def test_runs_side_by_side_share_the_memory_of_the_device(tmp_path: Path) -> None:
    planned = [
        Planned(Request("table1", tmp_path).row(line), Recipe(), tmp_path / line.name) for line in lines("table1")
    ]
    needs = {one.folder: 10 * (n + 1) for n, one in enumerate(planned)}
    going: list[Any] = []

    def chosen(room: int | None) -> int | None:
        return beside._next(planned[2:], going, 3, room, needs)

    assert chosen(5) == 0  # alone, whatever it needs
    going.append(beside._Going(planned[0], None))  # type: ignore[arg-type]
    assert chosen(None) == 0
    assert chosen(40) is None  # the first one still compiles
    planned[0].folder.mkdir()
    (planned[0].folder / "records.jsonl").write_text("{}\n")
    assert chosen(40) == 0
    assert chosen(39) is None
    assert chosen(None) == 0
    going += going * 2
    assert chosen(None) is None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_figure_can_be_drawn(name: str, tmp_path: Path) -> None:
    request = Request(name, tmp_path)
    found = [[made(line, 70.0 + n)] for n, line in enumerate(request.lines)]
    facts = Facts("", 2**30, 1.2, 1.9)
    rows = [columns.row(line, each, facts, request.loss) for line, each in zip(request.lines, found, strict=True)]
    folders = [[tmp_path / line.name] for line in request.lines]
    for (folder,) in folders:
        folder.mkdir()
        images = torch.zeros(10, 1, 8, 8, dtype=torch.uint8)
        save_file({"images": images, "reconstructions": images.clone()}, folder / "reconstructions.safetensors")
    shown = figures.Shown(request.lines, rows, found, folders, 2, request.loss)
    drawn = [one for kind in request.experiment.figures for one in figures.draw(kind, shown, name)]
    assert len({one.name for one in drawn}) == len(drawn)
    if "tradeoff" in request.experiment.figures:  # a picture for each kind of speed-up
        assert len(drawn) == 3
    for one in drawn:
        assert all(path.stat().st_size > 1000 for path in figures.save(one, tmp_path))
    bare = [columns.row(line, [], Facts(""), request.loss) for line in request.lines]
    nothing: list[list[Any]] = [[] for _ in bare]
    early = figures.Shown(request.lines, bare, nothing, nothing, 2, request.loss)
    of_the_paper = [one for kind in request.experiment.figures for one in figures.draw(kind, early, name)]
    assert len(of_the_paper) == ("tradeoff" in request.experiment.figures)


def test_rows_are_those_of_one_table(capsys: Capsys) -> None:
    assert parlay("reproduce", "table1", "table3", "--rows", "al-k2") == 2
    assert "write a single name" in capsys.readouterr().err


def test_labels_of_points_that_lie_close_do_not_cover_each_other() -> None:
    figure, axes = figures._one()
    points = [(1.70, 85.6), (1.71, 85.5), (1.705, 85.55), (2.4, 81.6), (2.41, 81.6)]
    axes.plot(*zip(*points, strict=True), "o")
    figures._written(axes, [(f"K={2 + n}", x, y) for n, (x, y) in enumerate(points)])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[:n])


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


def test_the_interrupted_table_equals_an_undisturbed_one(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    words = ["reproduce", *tiny, "--rows", "al-k2"]
    listen(monkeypatch, stop_after=5)
    assert parlay(*words) == 1
    listen(monkeypatch)
    assert parlay(*words) == 0
    stopped = summary(tmp_path / "out/runs/cifar10/al-k2-s0")
    shutil.rmtree(tmp_path / "out")
    assert parlay(*words) == 0
    capsys.readouterr()
    whole = summary(tmp_path / "out/runs/cifar10/al-k2-s0")
    assert [stopped[key] for key in ("test_loss", "train_loss", "violation")] == [
        whole[key] for key in ("test_loss", "train_loss", "violation")
    ]


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


def test_scale_is_a_share_of_the_training_samples_and_is_said(tmp_path: Path) -> None:
    request = Request("table5", tmp_path, epochs=30, scale=0.1)
    assert request.keys()["train_samples"] == 6000
    assert "scale 0.1: 6000 training samples; memory is what these take" in request.labels()
    assert Request("table5", tmp_path, instead={"judge_every": 4}).labels() == Request("table5", tmp_path).labels()
    assert Request("table1", tmp_path).labels() == []


def test_training_on_the_first_samples_alone(tmp_path: Path, capsys: Capsys) -> None:
    assert train(tmp_path / "run", "--epochs", 1, "--train-samples", 40) == 0
    assert summary(tmp_path / "run")["steps_per_epoch"] == math.ceil(40 / 32)
    assert train(tmp_path / "whole", "--epochs", 1) == 0
    capsys.readouterr()
    assert parlay("train", *SMALL, "--train-samples", 1000, "--out", tmp_path / "more") == 2
    assert "train-samples is 1000, and synthetic has 96: write a number up to that" in answer(capsys)
