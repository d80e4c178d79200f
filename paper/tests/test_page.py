"""A table is a section of Parlay's page: from its record alone, escaped, with its kinds of numbers told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parlay.errors import InputError
from parlay_paper import page
from runs import answer, parlay, train

MARKUP = "<script>alert(1)</script>"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f6"
    "45400000000049454e44ae426082"
)


def table(folder: Path, folders: tuple[str, ...] = (), **keys: Any) -> Path:
    columns = [
        {"key": "label", "title": "method", "kind": "row"},
        {"key": "value", "title": "test accuracy, %", "kind": "measured", "digits": 1},
        {"key": "theirs", "title": "theirs", "kind": "quoted"},
        {"key": "none", "title": "nothing", "kind": "measured"},
        {"key": "status", "title": "runs", "kind": "row"},
    ]
    rows = [
        {"label": "Serial", "method": "serial", "value": 90.0, "theirs": 93.78, "folders": folders},
        {"label": "AL (K=3)", "method": "al", "value": 88.5, "speedup_projected": 2.25, "stages": 3},
        {"label": "Replay", "method": "replay", "value": 89.5, "ours": True, "schedule": "adaptive", "folders": []},
    ]
    content = {
        "name": "table1",
        "title": "Table 1: rows",
        "status": "finished",
        "epochs": 5,
        "seeds": [0],
        "labels": ["30 epochs in the place of 200"],
        "notes": ["Penalty rows compute half batches."],
        "columns": columns,
        "rows": [{"status": "1 finished", **row} for row in rows],
        "figures": [{"file": "figure7.png", "caption": "learning curves"}, {"file": "gone.svg", "caption": "none"}],
        "stage_ms": {"3": [3.0, 4.0, 5.0]},
        "serial_ms": 12.0,
        "command": "parlay reproduce table1",
        "environment": {"devices": ["cpu"]},
    }
    folder.mkdir(parents=True)
    (folder / "figure7.png").write_bytes(PNG)
    (folder / "reproduction.json").write_text(json.dumps(content | keys))
    return folder


def test_the_page_has_table_figures_timeline_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "runs" / "serial-s0", "--method", "serial", "--epochs", 1) == 0
    folder = table(tmp_path / "table1", ("../runs/serial-s0", "../runs/not-yet"))
    capsys.readouterr()
    assert parlay("report", folder) == 0
    assert "| AL (K=3) | 88.5 |  |" in capsys.readouterr().out
    text = (folder / "report.html").read_text()
    for part in ("Penalty rows compute half batches.", "30 epochs in the place of 200", "93.78", "learning curves"):
        assert part in text
    assert '<td colspan="1">quoted from the paper</td>' in text
    assert text.count('<img src="data:image/png') == 1
    assert "layer-parallel: 2.40 times as fast as serial" in text
    assert "serial-s0" in text  # its run
    assert parlay("report", folder / "reproduction.json", "-o", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_text() == text


def test_only_columns_with_something_to_show_stand_there(tmp_path: Path) -> None:
    body = page.read(table(tmp_path / "t")).section.body
    assert "test accuracy, %" in body
    assert ">nothing<" not in body
    assert ">runs<" not in body
    rows = [{"label": "x", "none": 1.0, "status": "not run"}]
    body = page.read(table(tmp_path / "u", rows=rows)).section.body
    assert ">nothing<" in body
    assert ">runs<" in body


def test_at_its_head_stand_serial_training_the_papers_best_and_ours(tmp_path: Path) -> None:
    """Each with its speed-ups per sample trained, which say of what kind they are."""
    rows = [
        {"label": "Serial with DA", "method": "serial", "value": 89.3},
        {"label": "AL", "method": "al", "value": 82.0, "speedup_measured": 1.6},
        {"label": "SPH-AL", "method": "al", "value": 87.0, "speedup_measured": 1.4, "speedup_projected": 1.8},
        {"label": "DS-AL", "method": "al", "value": None},
        {"label": "Replay", "method": "replay", "value": 88.9, "ours": True, "speedup_projected": float("inf")},
    ]
    body = page.read(table(tmp_path / "t", rows=rows)).section.body
    speeds = "SPH-AL; speed-up over serial per sample trained: 1.40 measured here, 1.80 projected for K devices"
    found = [part.split("<")[0] for part in body.split("<dd>")[1:]]
    assert found == ["89.30 %", "87.00 %", "88.90 %"]
    assert speeds in body
    losses = page.read(table(tmp_path / "loss", rows=rows[:3], metric="test_loss")).section.body
    assert "<dd>82.0000</dd>" in losses


def test_markup_is_escaped_and_several_tables_have_short_names_in_the_title(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"labels": [MARKUP], "command": MARKUP, "status": MARKUP, "notes": [MARKUP]}
    paths = [table(tmp_path / name, title=f"{name}: {MARKUP}", **keys) for name in ("a", "b")]
    assert parlay("report", *paths, "-o", tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "<title>a, b</title>" in text
    assert text.count('class="paper"') == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"columns": None},
        {"columns": [{"key": "label", "title": "a", "kind": "row", "digits": 10**9}]},
        {"rows": [1]},
        {"rows": [{"label": "x", "value": 10**400}]},
        {"figures": [{"caption": "x"}]},
        {"stage_ms": {"x": [1.0, 2.0]}},
        {"message_ms": {"3": [1.0]}},
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"reproduction\.json is damaged"):
        page.read(table(tmp_path / "t", **keys))


def test_without_the_package_one_line_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("parlay.cli.reproduce.find_spec", lambda name: None)  # noqa: ARG005
    for words in (["reproduce", "table1", "--epochs", "3"], ["reproduce", "--help"], ["report", table(tmp_path / "t")]):
        assert parlay(*words) == 2
        assert "in a checkout of Parlay `make` installs it, or write pip install -e paper" in answer(capsys)
