"""Records and summaries are read by one schema: what is not what it was gets one line, and nothing hangs or grows."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import recorded
from parlay.errors import InputError
from parlay.run.checkpoint import _digest_of
from parlay.run.records import Records, dumps, environment, read_records, read_summary
from runs import answer, parlay, records, resume, train

ROW: dict[str, Any] = {"epoch": 0, "phase": "serial", "losses": [1.0, None], "violation": None, "seconds": 1.5}
SUMMARY: dict[str, Any] = {"status": "finished", "cuts": [2], "seconds": {"total": 1.0}, "environment": {}}
HUGE = "9" * 400
LONGER = "9" * 5000


def test_records_are_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    kept = Records(tmp_path)
    for epoch in range(3):
        kept.append({**ROW, "epoch": epoch})
    with path.open("a") as file:
        file.write('{"epoch": 3, "los')
    assert [row["epoch"] for row in read_records(path)] == [0, 1, 2]
    again = Records(tmp_path)
    again.begin(2, None)
    again.append({**ROW, "epoch": 2})
    assert [row["epoch"] for row in read_records(path)] == [0, 1, 2]
    assert read_records(tmp_path / "none") == []
    assert read_summary(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: no proper JSON object"),
        ("[" * 100_000, "line 2: not JSON"),
        (f'{{"epoch": {LONGER}}}', "line 2: not JSON"),
        ('{"phase": "serial"}', "line 2: no proper epoch"),
        (dumps({**ROW, "epoch": "1"}), "line 2: no proper epoch"),
        (dumps({**ROW, "epoch": True}), "line 2: no proper epoch"),
        (f'{{"epoch": {HUGE}}}', "line 2: no proper epoch"),
        (dumps(ROW), "line 2: epoch 0"),
        ('{"epoch": 1}', "line 2: no proper phase"),
        (f'{{"epoch": 1, "phase": "serial", "seconds": {HUGE}}}', "line 2: no proper seconds"),
        (dumps({**ROW, "epoch": 1, "losses": ["a"]}), "line 2: no proper losses"),
        (dumps({**ROW, "epoch": 1, "violation": 3.0}), "line 2: no proper violation"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(InputError, match=rf"records.jsonl is damaged \({told}"):
        read_records(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "not JSON"),
        ("[]", "no proper JSON object"),
        ("{}", "no proper status"),
        (dumps({**SUMMARY, "cuts": ["2"]}), "no proper cuts"),
        (dumps({**SUMMARY, "seconds": [1]}), "no proper seconds"),
        (dumps({**SUMMARY, "seconds": {"total": "a day"}}), "no proper seconds"),
        (f'{{"status": "finished", "epochs": {HUGE}}}', "no proper epochs"),
    ],
)
def test_a_summary_that_is_none_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=rf"summary.json is damaged \({told}"):
        read_summary(tmp_path / "summary.json")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    for name, read in (("records.jsonl", read_records), ("summary.json", read_summary)):
        make(tmp_path / name)
        with pytest.raises(InputError, match=f"cannot read .*{name} .it is not a regular file"):
            read(tmp_path / name)


def test_numbers_that_are_not_finite_are_null_in_json_and_when_they_are_read(tmp_path: Path) -> None:
    assert json.loads(dumps({"a": [math.nan, (1.5, math.inf)], "β": 1})) == {"a": [None, [1.5, None]], "β": 1}
    (tmp_path / "records.jsonl").write_text('{"epoch": 0, "phase": "serial", "losses": [NaN, 1e999, 2]}\n')
    assert read_records(tmp_path / "records.jsonl")[0]["losses"] == [None, None, 2]


def test_the_environment_names_versions_and_hardware() -> None:
    told = environment(["cpu"])
    assert told["devices"] == ["cpu"]
    assert {"parlay", "python", "torch", "cuda", "platform", "cores", "threads"} < set(told)


@pytest.mark.parametrize("experiment", ["adaptive", "laptop", "streaming"])
def test_recorded_runs_of_older_versions_are_read(experiment: str) -> None:
    folders = [path.parent for path in recorded.unpacked(experiment).rglob("records.jsonl")]
    assert folders
    for folder in folders:
        summary = read_summary(folder / "summary.json")
        assert summary is None or summary["epochs"] == len(read_records(folder / "records.jsonl"))


# --- what a command makes of a folder that is not what it was ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    assert train(out, "--epochs", 2) == 0
    return out


def put_into_the_meta(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for path in (out / "checkpoints").glob("*/manifest.json"):
        body = json.loads(path.read_text())
        body.pop("sha256")
        change(body["meta"])
        path.write_text(json.dumps({"sha256": _digest_of(body), **body}))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda meta: meta.pop("position"), "position"),
        (lambda meta: meta.pop("made_with"), "made_with"),
        (lambda meta: meta["position"].update(step="1"), "position"),
        (lambda meta: meta["position"].update(epoch=10**300), "position"),
        (lambda meta: meta["position"]["totals"].update(loss=[1.0] * 9), "loss"),
        (lambda meta: meta.update(cuts="2,3"), "cuts"),
        (lambda meta: meta.update(phases="SPX"), "phases"),
        (lambda meta: meta.update(total_seconds=None), "total_seconds"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_and_the_run_starts_at_the_beginning(
    change: Callable[[dict[str, Any]], object], key: str, finished: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(finished, out := tmp_path / "run")
    put_into_the_meta(out, change)
    capsys.readouterr()
    assert resume(out) == 0
    told = capsys.readouterr().err.splitlines()
    assert f"is damaged: manifest.json has no proper {key}; there is no whole one to take instead" in told[0]
    assert records(out) == records(finished)


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        ("records.jsonl", lambda path: path.write_text('{"epoch": "no"}\n'), "line 1: no proper epoch"),
        ("records.jsonl", os.mkfifo, "it is not a regular file"),
        ("recipe.toml", os.mkfifo, "it is not a regular file"),
        ("recipe.toml", lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        ("recipe.toml", lambda path: path.write_text("stages = " + LONGER), "is not a TOML recipe"),
    ],
)
def test_a_run_folder_that_is_not_what_it_was_is_answered_in_one_line(
    name: str, make: Callable[[Path], Any], told: str, finished: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(finished, out := tmp_path / "run")
    (out / name).unlink()
    make(out / name)
    capsys.readouterr()
    assert resume(out) == 2
    assert told in answer(capsys)


@pytest.mark.parametrize("words", ["train", "train --resume", "train --engine distributed"])
@pytest.mark.parametrize("out", ["a\0b", "x" * 5000])
def test_a_run_folder_that_cannot_be_is_answered_in_one_line(words: str, out: str, capsys: Any) -> None:
    assert parlay(*words.split(), "--out", out) == 2
    assert re.search("is no usable path|write it without|write a shorter one", answer(capsys))
