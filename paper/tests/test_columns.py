"""No column mixes two kinds of numbers, speed-ups follow the paper's formulas, and every figure can be drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parlay.config.recipe import Recipe
from parlay_paper import columns, figures, isolated, speed
from parlay_paper.columns import MEASURED, PROJECTED, QUOTED
from parlay_paper.request import Request
from parlay_paper.runs import Run
from parlay_paper.tables import EXPERIMENTS

TABLE1 = {line.name: line for line in EXPERIMENTS["table1"].lines}


def made(number: float, status: str = "finished") -> Run:
    """A run as it would be loaded, of a serial and a parallel epoch."""
    scores = {"test_accuracy": number, "test_loss": 0.5, "auxiliary_bytes": 2**30}
    epochs = [
        {"epoch": n, "phase": phase, "train_loss": 1 / (n + 1), **scores, "violation": [0.1] * n}
        for n, phase in enumerate(("serial", "parallel"))
    ]
    return Run(Path("none"), {}, epochs, {"status": status, **scores})


@pytest.mark.parametrize("loss", [False, True])
def test_no_column_mixes_what_is_measured_projected_and_quoted(loss: bool) -> None:
    kinds = {column.key: column.kind for column in columns.columns(loss)}
    assert {key for key, kind in kinds.items() if kind == QUOTED} == {"paper_value", "paper_memory", "paper_speedup"}
    for line in TABLE1.values():
        empty = columns.row(line, [], loss)
        assert all(not empty[key] for key, kind in kinds.items() if kind in (MEASURED, PROJECTED))
        full = columns.row(line, [made(50.0), made(60.0)], loss, "", 2**30, (1.25, 2.5))
        assert (full["value"], full["seeds"]) == (0.5 if loss else 55.0, 2)
        assert (full["speedup_measured"], full["speedup_projected"]) == (1.25, 2.5)
        for row in (empty, full):
            quoted = (row["paper_value"], row["paper_memory"], row["paper_speedup"])
            assert quoted == (line.quoted.value, line.quoted.memory, line.quoted.speedup)


def test_penalty_is_also_counted_per_sample_trained() -> None:
    """A run of a serial and a parallel epoch: a stage trains on three of four samples."""
    found = columns.columns(False)
    speeds = (2.0, 2.4)
    rows = [columns.row(TABLE1[name], [made(50.0)], False, speedups=speeds) for name in ("penalty-k2", "al-k2")]
    assert [row["trained_share"] for row in rows] == [0.75, 1.0]
    assert [row["speedup_measured_per_sample"] for row in rows] == [1.5, 2.0]
    assert [row["speedup_projected_per_sample"] for row in rows] == pytest.approx([1.8, 2.4])
    keys = [column.key for column in columns.telling(found, rows)]
    assert {"speedup_measured_per_sample", "speedup_projected_per_sample"} < set(keys)
    assert not {"spread", "status"} & set(keys)
    assert not any("per_sample" in column.key for column in columns.telling(found, rows[1:]))
    joint = columns.row(TABLE1["penalty-k2"], [replace(made(50.0), recipe={"order": "joint"})], False)
    assert joint["trained_share"] == 1


def test_runs_that_have_not_finished_do_not_count() -> None:
    row = columns.row(TABLE1["penalty-k2"], [made(80.0), made(1.0, "diverged")], False)
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


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_timed_in_isolation_on_noise_does_not_diverge(stage: int) -> None:
    """At the full rate this one is not finite after a few steps."""
    keys = {"dataset": "synthetic", "synthetic_samples": 64, "synthetic_shape": "1,8,8", "device": "cpu"}
    recipe = Recipe(**keys, model="resnet8", method="penalty", stages=2, batch_size=16, lr=1000.0)
    timed = isolated.Isolated(recipe, stage)
    assert timed.rows == 8  # neighbours take turns
    try:
        assert timed.time(20) > 0
    finally:
        timed.close()


@pytest.mark.parametrize("name", ["table1", "figure4", "figure6", "figure7"])
def test_every_kind_of_figure_can_be_drawn(name: str, tmp_path: Path) -> None:
    request = Request(name, tmp_path)
    images = torch.zeros(10, 1, 8, 8, dtype=torch.uint8)
    save_file({"images": images, "reconstructions": images.clone()}, tmp_path / "reconstructions.safetensors")

    def drawn(found: Sequence[Run], *facts: Any) -> list[figures.Drawn]:
        lines = [(line, columns.row(line, found, request.loss, *facts)) for line in request.lines]
        shown = [figures.Shown(line, row, found) for line, row in lines]
        scene = figures.Scene(name, shown, 2, request.loss, "data")
        return [one for kind in request.experiment.figures for one in figures.draw(kind, scene)]

    pictures = drawn([replace(made(70.0), folder=tmp_path)], "", 2**30, (1.2, 1.9))
    assert len({one.name for one in pictures}) == len(pictures) == (3 if name == "table1" else 1)
    for one in pictures:
        assert all(path.stat().st_size > 1000 for path in figures.save(one, tmp_path))
    assert len(drawn([])) == (name == "table1")  # the paper's own speeds


def test_old_records_get_their_speed_ups_per_sample_trained() -> None:
    """From the schedule: half of the samples of a parallel epoch for penalty, all for the others."""
    kinds = {"label": "row", "speedup_measured": "measured", "speedup_projected": "projected"}
    heads = [{"key": key, "title": key, "kind": kind} for key, kind in kinds.items()]
    penalty = {"label": "P", "method": "penalty", "stages": 2, "schedule": "parallel", "speedup_measured": 2.4}
    hybrid = {**penalty, "schedule": "alternate:1:1", "speedup_projected": 1.6}
    al = {**penalty, "method": "al", "speedup_measured": 1.5}
    content: dict[str, Any] = {"columns": heads, "rows": [penalty, hybrid, al], "epochs": 5}
    found, rows = columns.recorded(content)
    per_sample = [f"{key}{columns.PER_SAMPLE}" for key in columns.SPEEDS]
    assert [head.key for head in columns.telling(found, rows)] == [
        *("label", "speedup_measured", per_sample[0], "speedup_projected", per_sample[1]),
    ]
    assert [row[per_sample[0]] for row in rows] == pytest.approx([2.4 * 0.6, 2.4 * 0.8, 1.5])
    assert [row[per_sample[1]] for row in rows] == [None, pytest.approx(1.6 * 0.8), None]
    joint = {**content, "labels": ["order joint in the place of red-black"]}
    assert [row[per_sample[0]] for row in columns.recorded(joint)[1]] == [2.4, 2.4, 1.5]
