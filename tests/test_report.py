"""The report: what it says of runs, and that it says it whatever is in their folders. No torch, no training."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from parlay.errors import InputError
from parlay.report import console, figures, report, table, write
from parlay.report.groups import tasks
from parlay.report.load import TEST_SAMPLES, load
from parlay.report.noise import counts_from
from parlay.report.words import duration, loss, memory, signed

RECIPE: dict[str, Any] = {
    "dataset": "digits",
    "model": "resnet20",
    "method": "al",
    "stages": 3,
    "downsample": 1,
    "seed": 0,
}
RECIPE |= {"schedule": "alternate:4:1", "epochs": 6, "batch-size": 128, "lr": 0.1, "beta": 3.0, "augment": "auto"}
SERIAL: dict[str, Any] = {"method": "serial", "stages": 1, "schedule": "serial"}


def records(recipe: dict[str, Any], accuracy: float | None, epochs: int) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(epochs):
        parallel = recipe["method"] != "serial" and epoch not in (0, 4)
        faces = recipe["stages"] - 1 if parallel else 0
        rows.append(
            {
                "epoch": epoch,
                "phase": "parallel" if parallel else "serial",
                "losses": [0.5] * (faces + 1),
                "train_loss": 1.0 / (epoch + 1),
                "test_loss": 1.5 / (epoch + 1),
                "test_accuracy": None if accuracy is None else accuracy - epochs + epoch + 1,
                "violation": [0.1] * faces or None,
                "violation_at_entry": [0.3] * faces if parallel and epoch == 5 else None,
                "seconds": 2.0 if parallel else 3.0,
                "refresh_seconds": 0.0,
                "learning_rate": 0.1,
                "beta": 3.0 if parallel else None,
            }
        )
    return rows


def make(folder: Path, accuracy: float | None = 90.0, status: str = "finished", done: int = 6, **keys: Any) -> Path:
    """A run folder as `parlay train` leaves it; `status=""` leaves it without a summary."""
    told = ("message", "processes")  # by the summary
    recipe = RECIPE | {key.replace("_", "-"): value for key, value in keys.items() if key not in told}
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items()))
    rows = records(recipe, accuracy, done)
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status:
        names = ("method", "model", "dataset", "stages", "schedule", "downsample", "seed")
        summary = {name: recipe[name] for name in names} | {
            "status": status,
            "message": keys.get("message", ""),
            "processes": keys.get("processes", 1),
            "cuts": [4, 7][: recipe["stages"] - 1],
            "epochs": done,
            "parameters": 269434,
            "test_accuracy": accuracy,
            "test_loss": rows[-1]["test_loss"] if rows else None,
            "auxiliary_bytes": 0 if recipe["method"] == "serial" else 2**20 * 16 // recipe["downsample"] ** 2,
            "seconds": {"total": 75.0, "serial_epoch": 3.0, "parallel_epoch": 2.0},
            "violation": [],
            "environment": {"parlay": "0.1.0", "devices": ["cpu", "cpu", "cpu"], "cuda": None},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def page_of(runs: list[Path], folder: Path, title: str = "a title") -> str:
    write(runs, folder / "page.html", title)
    return (folder / "page.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags with their attributes, and whether they close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# What is compared


def test_runs_that_differ_by_their_seed_are_one_row(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"s{seed}", 90.0 + seed, seed=seed) for seed in range(3)]
    (row,) = table(runs)
    assert (row["label"], row["runs"], row["status"]) == ("SPH-AL K=3", 3, "finished")
    assert row["test_accuracy"] == pytest.approx(91.0)
    assert row["test_accuracy_spread"] == pytest.approx(1.0)  # of the sample: divided by n - 1
    assert (row["serial_epoch"], row["parallel_epoch"], row["auxiliary_bytes"]) == (3.0, 2.0, 2**24)


def test_one_run_has_no_spread(tmp_path: Path) -> None:
    (row,) = table([make(tmp_path / "a")])
    assert row["test_accuracy_spread"] is None


def test_a_run_given_twice_counts_once(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    (row,) = table([run, tmp_path / "b" / ".." / "a", run])
    assert row["runs"] == 1


def test_places_of_files_make_no_other_configuration(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a", data_dir="here"), make(tmp_path / "b", data_dir="there", seed=1)]
    assert [row["runs"] for row in table(runs)] == [2]


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        ({}, "SPH-AL K=3"),
        ({"schedule": "parallel"}, "AL K=3"),
        ({"schedule": "tail:4:1", "downsample": 2}, "DS-SPH-AL K=3"),
        ({"schedule": "adaptive:0.2"}, "AL K=3, adaptive"),
        ({"schedule": "parallel", "downsample": 2, "method": "penalty", "stages": 2}, "DS-Penalty K=2"),
        ({"schedule": "parallel", "method": "replay"}, "Replay K=3"),
        ({**SERIAL}, "Serial w/o DA"),
        ({**SERIAL, "dataset": "cifar10"}, "Serial with DA"),
        ({**SERIAL, "dataset": "cifar10", "augment": "none"}, "Serial w/o DA"),
        ({**SERIAL, "augment": "random"}, "Serial with DA"),
        ({**SERIAL, "augment": "4"}, "Serial with DA (4 copies)"),
    ],
)
def test_labels_are_the_papers(tmp_path: Path, keys: dict[str, Any], label: str) -> None:
    assert table([make(tmp_path / "run", **keys)])[0]["label"] == label


def test_configurations_of_one_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a", beta=1.0), make(tmp_path / "b", beta=3.0), make(tmp_path / "c", **SERIAL)]
    assert [row["label"] for row in table(runs)] == ["Serial w/o DA", "SPH-AL K=3, beta 1", "SPH-AL K=3, beta 3"]


def test_order_of_runs_changes_neither_rows_nor_colours(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"{k}-{r}", stages=k, downsample=r) for k in (2, 3) for r in (1, 2)]
    assert table(runs) == table(runs[::-1])
    assert page_of(runs, tmp_path) == page_of(runs[::-1], tmp_path)  # and the page is the same, byte for byte


def test_the_gap_is_to_the_serial_run_most_like_it(tmp_path: Path) -> None:
    cifar: dict[str, Any] = {"dataset": "cifar10"}
    runs = [
        make(tmp_path / "with", 92.0, **SERIAL, **cifar),
        make(tmp_path / "without", 87.0, **SERIAL, **cifar, augment="none"),
        make(tmp_path / "hybrid", 90.0, **cifar),
        make(tmp_path / "parallel", 86.0, **cifar, schedule="parallel"),
        make(tmp_path / "other", 86.0, dataset="mnist"),
    ]
    gaps = {(row["dataset"], row["label"]): (row["gap"], row["reference"]) for row in table(runs)}
    assert gaps["cifar10", "SPH-AL K=3"] == (-2.0, "Serial with DA")
    assert gaps["cifar10", "AL K=3"] == (-1.0, "Serial w/o DA")
    assert gaps["cifar10", "Serial with DA"] == (None, None)
    assert gaps["mnist", "SPH-AL K=3"] == (None, None)


def test_runs_on_a_part_of_the_data_are_a_task_of_their_own_and_copies_compare_with_as_many(tmp_path: Path) -> None:
    part = {"dataset": "cifar10", "train-samples": 5000, "schedule": "parallel"}
    runs = [
        make(tmp_path / "all", 95.0, **{**SERIAL, "dataset": "cifar10", "augment": "none"}),
        make(tmp_path / "two", 70.0, **{**part, **SERIAL, "augment": "2", "compile": "on"}),
        make(tmp_path / "four", 80.0, **{**part, **SERIAL, "augment": "4", "compile": "off"}),
        make(tmp_path / "random", 50.0, **{**part, **SERIAL, "augment": "random", "compile": "on"}),
        make(tmp_path / "al", 60.0, **{**part, "augment": "2", "compile": "off"}),
        make(tmp_path / "replay", 51.0, **{**part, "method": "replay", "augment": "auto", "compile": "off"}),
    ]
    gaps = {(row["dataset"], row["label"]): row["gap"] for row in table(runs)}
    assert gaps["cifar10 (first 5000)", "AL K=3"] == -10.0
    assert gaps["cifar10 (first 5000)", "Replay K=3"] == 1.0
    assert {dataset for dataset, _ in gaps} == {"cifar10", "cifar10 (first 5000)"}


def test_unfinished_runs_are_left_out_of_means_and_shown_by_status(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "a", 90.0),
        make(tmp_path / "b", 10.0, "diverged", done=2, seed=1, message="the loss of stage 1 is nan"),
        make(tmp_path / "c", 50.0, "", done=3, stages=2),
        make(tmp_path / "d", None, "", done=0, stages=4),
        make(tmp_path / "e", 99.0, "interrupted", done=4, stages=5),
    ]
    three, two, four, five = sorted(table(runs), key=lambda row: [3, 2, 4, 5].index(row["stages"]))
    assert (three["test_accuracy"], three["runs"], three["status"]) == (90.0, 1, "1 finished, 1 diverged")
    assert (two["status"], two["test_accuracy"], two["epochs_done"], two["gap"]) == ("unfinished", 50.0, 3, None)
    assert (two["serial_epoch"], two["parallel_epoch"]) == (3.0, 2.0)  # from the records, without a summary
    assert (four["status"], four["test_accuracy"], four["epochs_done"]) == ("unfinished", None, 0)
    assert five["status"] == "interrupted"
    page = page_of(runs, tmp_path)
    for text in ("1 finished, 1 diverged", "unfinished", "3 of 6", "the loss of stage 1 is nan", "interrupted"):
        assert text in page
    assert "SPH-AL K=3 reaches 90.00 %" in page  # not the 99 % of the interrupted one


def test_runs_without_an_accuracy_are_compared_by_loss(tmp_path: Path) -> None:
    vae: dict[str, Any] = {"model": "resnet-vae"}
    runs = [make(tmp_path / "a", None, **vae), make(tmp_path / "b", None, **vae, **SERIAL)]
    page = page_of(runs, tmp_path)
    found = "SPH-AL K=3 reaches a test loss of 0.2500 on digits with resnet-vae, serial training 0.2500"
    assert f"{found}: one run each cannot tell them apart." in page
    assert "test accuracy" not in page.lower()


# Which gaps count


def test_two_of_360_digits_are_nothing_and_ten_of_them_something() -> None:
    per_digit = 100 / 360
    least = counts_from([98.33], [98.33 - 2 * per_digit], 360)
    assert least is not None
    assert 2 * per_digit < least < 10 * per_digit


def test_a_gap_counts_from_two_standard_errors_on() -> None:
    assert counts_from([90.0], [90.0], 10_000) == pytest.approx(2 * (2 * 90 * 10 / 10_000) ** 0.5)
    assert counts_from([90.0] * 4, [90.0] * 4, 10_000) == pytest.approx((2 * 90 * 10 / 10_000) ** 0.5)
    with_spread = 2 * ((2.0 + 90 * 10 / 100) / 2 + 90 * 10 / 100) ** 0.5  # the variance of 89 and 91 is 2
    assert counts_from([89.0, 91.0], [90.0], 100) == pytest.approx(with_spread)
    assert counts_from([0.1, 0.3], [0.2, 0.4], None) == pytest.approx(2 * 0.02**0.5)  # losses: their spread alone
    assert counts_from([0.1], [0.2, 0.4], None) is counts_from([], [90.0], 360) is None


@pytest.mark.parametrize(
    ("serial", "ours", "says"),
    [
        (90.5, 90.0, "SPH-AL K=3 is level with serial training on digits with resnet20: 90.00 % and 90.50 %, one run"),
        (99.0, 90.0, "SPH-AL K=3 reaches 90.00 % on digits with resnet20, 9.00 points below serial training, one run"),
        (80.0, 90.0, "SPH-AL K=3 reaches 90.00 % on digits with resnet20, 10.00 points above serial training, one"),
    ],
)
def test_the_headline_calls_only_a_difference_a_difference(
    tmp_path: Path, serial: float, ours: float, says: str
) -> None:
    runs = [make(tmp_path / "a", ours), make(tmp_path / "s", serial, **SERIAL)]
    page = page_of(runs, tmp_path)
    assert says in page
    level = abs(serial - ours) < 1
    assert ('class="number  level" title="against Serial w/o DA; a difference from' in page) is level
    assert "A gap counts as a difference above two standard errors (of 360 test samples): here " in page
    row = table(runs)[1]
    assert row["gap_differs"] is not level
    assert 3 < row["gap_counts_from"] < 6


def test_sizes_of_test_sets_are_recorded_or_known(tmp_path: Path) -> None:
    """By their names as torch knows them: this room does without it."""
    from parlay.data.sources import facts

    assert {name: facts(name).test_size for name in TEST_SAMPLES} == TEST_SAMPLES
    runs = [make(tmp_path / name, dataset=name) for name in ("mnist", "synthetic", "own")]
    summary = json.loads((runs[2] / "summary.json").read_text()) | {"test_samples": 77}
    (runs[2] / "summary.json").write_text(json.dumps(summary))
    assert [run.test_samples for run in load(runs)] == [10_000, None, 77]


def test_a_run_of_an_own_model_needs_no_recipe(tmp_path: Path) -> None:
    run = make(tmp_path / "own")
    (run / "recipe.toml").unlink()
    summary = json.loads((run / "summary.json").read_text()) | {"method": "AugmentedLagrangian", "dataset": None}
    (run / "summary.json").write_text(json.dumps(summary))
    (row,) = table([run])
    assert (row["label"], row["dataset"]) == ("SPH-AL K=3", "own data")


# The page


def test_one_run_has_no_tiles_and_names_are_explained(tmp_path: Path) -> None:
    page = page_of([make(tmp_path / "a")], tmp_path)
    assert '<dl class="facts">' not in page
    assert "SPH: serial-parallel hybrid, a schedule with parallel and serial epochs." in page
    assert "DS: " not in page
    assert '<dl class="facts">' in page_of([make(tmp_path / "b"), make(tmp_path / "c", seed=1)], tmp_path)


def test_log_axes_and_bars_of_phases_say_what_they_are(tmp_path: Path) -> None:
    page = page_of([make(tmp_path / "a"), make(tmp_path / "b", **SERIAL)], tmp_path)
    assert "training loss, whole network, log scale" in page
    assert "violation per interface<" in page  # all of them 0.1 here, on a linear axis
    assert "epoch; a bar marks parallel epochs" in page


def test_seconds_of_stages_that_take_turns_on_a_cpu_are_called_no_speed_up(tmp_path: Path) -> None:
    told = "Stages take turns in one process on the CPU: these seconds are no speed-up."
    runs = [make(tmp_path / "a"), make(tmp_path / "b", **SERIAL)]
    assert told in page_of(runs, tmp_path)
    assert told not in page_of(runs[1:], tmp_path)
    assert told not in page_of([make(tmp_path / "c", processes=3), runs[1]], tmp_path)


MARKUP = "<script>alert(1)<\\script>&\"'$x_1$[red]"  # a name of a folder, so without a slash


def test_markup_in_names_and_messages_is_escaped_everywhere(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / MARKUP, 90.0, "diverged", message=f"stage {MARKUP} </pre> lost", dataset=MARKUP, model=MARKUP),
        make(tmp_path / "b", 90.0, dataset=MARKUP, model=MARKUP, method=MARKUP, schedule=MARKUP),
    ]
    page = page_of(runs, tmp_path, MARKUP)
    assert "<script>alert" not in page
    assert "</pre> lost" not in page
    assert html.escape(MARKUP, quote=False).split("&amp;")[0] in page
    assert len(re.findall(r"<script\b", page)) == 1
    charts = "".join(re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL))
    assert "&lt;script&gt;alert" in charts  # the labels of the charts, which matplotlib writes
    assert Page(page).open == []


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b", **SERIAL)]
    page = page_of(runs, tmp_path)
    assert not re.search(r"https?:|//[a-z]|@import", re.sub(r"^// .*$", "", page, flags=re.MULTILINE))
    assert not [target for target in re.findall(r"url\(([^)]*)\)", page) if not target.startswith("#")]
    for tag, attributes in Page(page).tags:
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)


def test_pictures_have_their_size_a_description_and_no_ids_that_clash(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"k{k}", stages=k) for k in (2, 3)] + [make(tmp_path / "serial", **SERIAL)]
    tags = Page(page_of(runs, tmp_path)).tags
    charts = [a for tag, a in tags if tag == "svg" and a.get("class") == "chart"]
    assert len(charts) == 2 + 2 + 2  # ranking and memory, curves of test and training, a panel of violations each
    assert all(a["width"] and a["height"] and a["viewbox"] and a["aria-label"] for a in charts)
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for tag, a in tags if tag == "use" and a["href"]} <= set(ids)


def test_charts_take_their_colours_from_the_theme(tmp_path: Path) -> None:
    page = page_of([make(tmp_path / "a"), make(tmp_path / "b", **SERIAL)], tmp_path)
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    colours = {match for chart in charts for match in re.findall(r"(?:fill|stroke): ([^;\"]+)", chart)}
    assert {"var(--ink)", "var(--muted)", "var(--c0)", "var(--c1)"} <= colours
    assert {c for c in colours if not c.startswith("var(")} <= {"none"}
    assert "prefers-color-scheme: dark" in page


def test_many_configurations_get_a_panel_each_and_few_lines_together(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"b{n}", 80.0 + n, done=2, beta=float(n)) for n in range(1, 12)]
    runs.append(make(tmp_path / "serial", 70.0, done=2, **SERIAL))
    page = page_of(runs, tmp_path)
    assert "Shown are the best 8 configurations" in page
    assert "4 more are below" in page
    legend = page[page.index("Learning curves") :].split("</ul>")[0]
    assert "Serial w/o DA" in legend  # the worst of all, but what the others are held against
    assert page.count("<figcaption>") == 12


def test_a_line_goes_on_over_epochs_that_were_not_judged(tmp_path: Path) -> None:
    out = make(tmp_path / "run", 90.0)
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    for row in lines[::2]:
        row |= dict.fromkeys(("train_loss", "test_loss", "test_accuracy"))
    (out / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (task,) = tasks(load([out]))
    drawn = str(figures.curves(task, task.groups, figures.test_of(task), "test", log=False))
    paths = [path for path in re.findall(r' d="([^"]*)"', drawn) if "z" not in path]
    assert ("M", "L", "L") in [tuple(re.findall("[ML]", path)) for path in paths]  # epochs 2, 4 and 6: one line


def test_tasks_have_a_section_each(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b", dataset="mnist")]
    assert page_of(runs, tmp_path).count("<section") == 2


def test_downloads_hold_the_tables(tmp_path: Path) -> None:
    runs = [make(tmp_path / "=a", 90.0), make(tmp_path / "b", 92.0, **SERIAL)]
    links = {a["download"]: a["href"] or "" for tag, a in Page(page_of(runs, tmp_path)).tags if tag == "a"}
    files = {
        name: list(csv.DictReader(io.StringIO(base64.b64decode(uri.split("base64,")[1]).decode("utf-8-sig"))))
        for name, uri in links.items()
    }
    comparison = files["digits-resnet20-comparison.csv"]
    assert [row["label"] for row in comparison] == ["Serial w/o DA", "SPH-AL K=3"]
    assert (comparison[1]["gap"], comparison[1]["auxiliary_bytes"], comparison[0]["gap"]) == ("-2.0", "16777216.0", "")
    assert [row["run"] for row in files["digits-resnet20-runs.csv"]] == ["b", "'=a"]  # no formula in a spreadsheet
    epochs = files["=a-epochs.csv"]
    assert [row["epoch"] for row in epochs] == ["1", "2", "3", "4", "5", "6"]
    assert [row["violation_2"] for row in epochs] == ["", "0.1", "0.1", "0.1", "", "0.1"]


# The command


def test_one_run_is_reported_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a")
    assert report([run], None) == 0
    assert (run / "report.html").is_file()
    out = capsys.readouterr().out
    assert "SPH-AL K=3" in out
    assert out.splitlines()[-1] == f"report: {run / 'report.html'}"
    assert "\x1b" not in out


def test_several_runs_are_reported_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b", seed=1)]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    report(runs, None)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["report.html"]
    report(runs, Path("new/page.html"))
    assert (tmp_path / "here/new/page.html").is_file()


def test_a_terminal_gets_a_drawn_table_with_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    report([make(tmp_path / "a", method="[red]x")], None)
    out = capsys.readouterr().out
    assert "─" in out
    assert "[red]x K=3" in out


def test_a_narrow_terminal_gets_fewer_columns_and_none_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    report([make(tmp_path / "a", 91.0), make(tmp_path / "b", 92.5, **SERIAL)], tmp_path / "page.html")
    out = capsys.readouterr().out
    for text in ("SPH-AL K=3", "91.00", "−1.50", "finished"):
        assert text in out
    assert "…" not in out


def test_a_terminal_without_these_letters_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    console.say("90 ± 1")
    out.flush()
    assert out.buffer.getvalue() == b"90 ? 1\n"


def test_a_last_line_cut_off_in_writing_is_left_out(tmp_path: Path) -> None:
    run = make(tmp_path / "a", status="")
    with (run / "records.jsonl").open("a") as file:
        file.write('{"epoch": 6, "pha')
    assert table([run])[0]["epochs_done"] == 6


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("summary.json", b"{", "not JSON"),
        ("summary.json", b"[]", "no JSON object"),
        ("summary.json", b"\xff\xfe", "not UTF-8"),
        ("summary.json", b'{"status": 3}', "status"),
        ("summary.json", b'{"status": "finished", "test_accuracy": "high"}', "test_accuracy"),
        ("summary.json", b'{"status": "finished", "seconds": 3}', "seconds"),
        ("records.jsonl", b'{"epoch"\n{"epoch": 1}\n', "line 1"),
        ("records.jsonl", b"3\n", "line 1"),
        ("records.jsonl", b'{"phase": "serial"}\n', "epoch"),
        ("records.jsonl", b'{"epoch": 0, "violation": 3}\n', "violation"),
        ("records.jsonl", b'{"epoch": 0, "losses": ["a"]}\n', "losses"),
        ("recipe.toml", b"stages = \n", "not TOML"),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    run = make(tmp_path / "a")
    (run / file).write_bytes(content)
    with pytest.raises(InputError, match=says) as error:
        report([run], None)
    assert str(run / file) in str(error.value)
    assert "leave this run out" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (run / "report.html").exists()


def test_what_is_no_run_is_named_in_one_line(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "a")
    (tmp_path / "file").touch()
    (tmp_path / "empty\nfolder").mkdir()
    for folder, says in [
        ("nowhere", "does not exist: write a run folder"),
        ("file", "is a file: write a run folder"),
        ("empty\nfolder", "is no run folder"),
        ("runs", "write one of the runs in it"),
    ]:
        with pytest.raises(InputError, match=says) as error:
            report([tmp_path / folder], None)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="at least one run folder"):
        report([], None)


def test_a_page_that_cannot_be_written_is_answered_in_one_line(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    with pytest.raises(InputError, match="is a folder: write -o with a file"):
        report([run], tmp_path)
    with pytest.raises(InputError, match=r"cannot write .*: write -o"):
        report([run], run / "recipe.toml" / "page.html")


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    code = (
        "import sys; from pathlib import Path; from parlay.report import report;"
        "assert 'matplotlib' not in sys.modules; report([Path(sys.argv[1])], None);"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)


def test_numbers_read_well() -> None:
    assert [memory(n) for n in (None, 0, 2**24, 1.53 * 2**30, 91.55 * 2**30)] == [
        "–",
        "0",
        "16 MiB",
        "1.53 GiB",
        "91.5 GiB",
    ]
    assert [signed(v, loss) for v in (None, -0.5, 0.25, 0.0)] == ["–", "−0.5000", "+0.2500", "0.0000"]
    assert [loss(v) for v in (0.5, 5.3e14, 1e-7)] == ["0.5000", "5.3e+14", "1e-07"]
    assert [duration(s) for s in (1.5, 75.0, 7265.0)] == ["1.5 s", "1 min 15 s", "2 h 01 min"]
