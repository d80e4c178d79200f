"""The report: what it says of runs, and that it says it whatever is in their folders. No torch, no training."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from parlay import timeline
from parlay.errors import InputError
from parlay.report import Section, charts, report, show, table, write
from parlay.report.groups import compare, counts_from
from parlay.report.load import TEST_SAMPLES, load
from parlay.report.tables import comparison, differences, headline, notes
from test_timeline import two_ranks

RECIPE: dict[str, Any] = json.loads(
    """{"dataset": "digits", "model": "resnet20", "method": "al", "stages": 3, "downsample": 1, "seed": 0, "lr": 0.1,
    "beta": 3.0, "schedule": "alternate:4:1", "epochs": 6, "augment": "auto"}"""
)
SERIAL: dict[str, Any] = {"method": "serial", "stages": 1, "schedule": "serial"}
TOLD = ("message", "processes", "staleness", "test_samples")  # by the summary, not by the recipe
MARKUP = "<script>alert(1)<\\script>&\"'$x_1$[red]"  # a name of a folder, so without a slash


def make(
    folder: Path,
    accuracy: float | None = 90.0,
    status: str = "finished",
    done: int = 6,
    phases: str = "SPPPSP",
    seconds: tuple[float, ...] = (3.0, 2.0, 2.0, 2.0, 3.0, 2.0),
    **keys: Any,
) -> Path:
    """A run folder as `parlay train` leaves it; `status=""` leaves it without a summary."""
    recipe = RECIPE | {key.replace("_", "-"): value for key, value in keys.items() if key not in TOLD}
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items()))
    rows = []
    for epoch in range(done):
        parallel = recipe["method"] != "serial" and phases[epoch] == "P"
        faces = recipe["stages"] - 1 if parallel else 0
        refreshed = parallel and phases[epoch - 1] == "S"
        row = {"epoch": epoch, "phase": "parallel" if parallel else "serial", "seconds": seconds[epoch]}
        row |= {"train_loss": 1.0 / (epoch + 1), "test_loss": 1.5 / (epoch + 1), "violation": [0.1] * faces or None}
        row |= {"violation_at_entry": [0.3] * faces if refreshed else None, "refresh_seconds": float(refreshed)}
        rows.append(row | {"test_accuracy": None if accuracy is None else accuracy - done + epoch + 1})
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status:
        summary = {name: recipe[name] for name in ("method", "model", "dataset", "stages", "schedule", "seed")}
        summary |= {"status": status, "cuts": [4, 7][: recipe["stages"] - 1], "epochs": done, "test_accuracy": accuracy}
        summary |= {"test_loss": rows[-1]["test_loss"] if rows else None, "parameters": 269434, "steps_per_epoch": 10}
        summary |= {"auxiliary_bytes": 0 if recipe["method"] == "serial" else 2**24 // recipe["downsample"] ** 2}
        summary |= {"seconds": {"total": 75.0, "serial_epoch": 3.0, "parallel_epoch": 2.0}}
        summary |= {"environment": {"devices": ["cpu"] * recipe["stages"], "threads": 2, "cuda": None}}
        summary |= {key: value for key, value in keys.items() if key in TOLD}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def bench(path: Path, **keys: Any) -> Path:
    rows = [timing("serial", 200.0, 1.0, note="one core"), timing("layer-parallel", 110.0, 1.8)]
    content = {"rows": rows, "says": ["Take data-parallel training here."], "command": "parlay bench"}
    path.write_text(json.dumps({**content, "environment": {"cores": 2}, **keys}))
    return path


def timing(system: str, ms: float, speedup: float, **keys: Any) -> dict[str, Any]:
    ratios = {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1}
    about = {"system": system, "stages": 2, "model": "resnet56", "batch_size": 64, "wait_share": [0.01, 0.02]}
    return {**about, **ratios, "step_ms": ms, "step_ms_low": ms - 1, "step_ms_high": ms + 1, **keys}


def everything(folder: Path) -> list[Path]:
    """Something of all that a page can show."""
    runs = [make(folder / "compared" / f"k{k}", 80.0 + k, stages=k, processes=k) for k in (2, 3)]
    runs.append(make(folder / "compared" / "s", 81.0, **SERIAL))
    runs.append(make(folder / "compared" / "d", None, "diverged", 2, stages=4, message="the loss of stage 1 is nan"))
    timeline.write(runs[0] / timeline.FILE, two_ranks())
    names = [{"folders": [run.name]} for run in runs]
    (folder / "compared" / "comparison.json").write_text(json.dumps({"rows": names}))
    return [folder / "compared", bench(folder / "bench.json")]


def page_of(runs: list[Path], folder: Path, title: str = "a title", **more: Any) -> str:
    write(runs, folder / "page.html", title, **more)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_runs_that_differ_by_their_seed_are_one_row(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"s{seed}", 90.0 + seed, seed=seed, data_dir=f"here{seed}") for seed in range(3)]
    (row,) = table([*runs, tmp_path / "s0" / ".." / "s1"])  # given twice, it counts once
    assert (row["label"], row["runs"], row["status"]) == ("SPH-AL K=3", 3, "finished")
    assert row["test_accuracy"] == pytest.approx(91.0)
    assert row["test_accuracy_spread"] == pytest.approx(1.0)  # of the sample: divided by n - 1
    assert (row["serial_epoch"], row["parallel_epoch"], row["auxiliary_bytes"]) == (3.0, 2.0, 2**24)
    assert table(runs[:1])[0]["test_accuracy_spread"] is None


def test_labels_are_the_papers(tmp_path: Path) -> None:
    plain = {"schedule": "parallel", "stages": 2}
    labels: dict[str, dict[str, Any]] = {
        "Serial w/o DA": SERIAL | {"dataset": "cifar10", "augment": "none"},
        "Serial with DA": SERIAL | {"dataset": "cifar10"},
        "DS-Penalty K=2": plain | {"downsample": 2, "method": "penalty"},
        "DS-SPH-AL K=3": {"schedule": "tail:4:1", "downsample": 2},
        "AL K=3, adaptive": {"schedule": "adaptive:0.2"},
        "Replay K=2": plain | {"method": "replay"},
    }
    for n, (label, keys) in enumerate(labels.items()):
        assert table([make(tmp_path / str(n), **keys)])[0]["label"] == label


def test_configurations_of_one_name_are_told_apart_by_what_differs_in_any_order(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a", beta=1.0), make(tmp_path / "b", beta=3.0), make(tmp_path / "c", **SERIAL)]
    assert [row["label"] for row in table(runs)] == ["Serial w/o DA", "SPH-AL K=3, beta 1", "SPH-AL K=3, beta 3"]
    assert table(runs) == table(runs[::-1])
    (found,) = compare(load(runs))
    assert [column.title for column in differences(found)] == ["configuration", "beta", "method", "schedule", "stages"]


def test_the_gap_is_to_the_serial_run_most_like_it(tmp_path: Path) -> None:
    cifar: dict[str, Any] = {"dataset": "cifar10"}
    part = {**cifar, "train-samples": 5000, "schedule": "parallel"}
    runs = [
        make(tmp_path / "with", 92.0, **SERIAL, **cifar),
        make(tmp_path / "without", 87.0, **SERIAL, **cifar, augment="none"),
        make(tmp_path / "hybrid", 90.0, **cifar),
        make(tmp_path / "parallel", 86.0, **cifar, schedule="parallel"),
        make(tmp_path / "two", 70.0, **{**part, **SERIAL, "augment": "2"}),
        make(tmp_path / "four", 80.0, **{**part, **SERIAL, "augment": "4"}),
        make(tmp_path / "random", 50.0, **{**part, **SERIAL, "augment": "random"}),
        make(tmp_path / "al", 60.0, **{**part, "augment": "2"}),
        make(tmp_path / "replay", 51.0, **{**part, "method": "replay"}),
    ]
    gaps = {(row["dataset"], row["label"]): (row["gap"], row["reference"]) for row in table(runs)}
    assert gaps["cifar10", "SPH-AL K=3"] == (-2.0, "Serial with DA")
    assert gaps["cifar10", "AL K=3"] == (-1.0, "Serial w/o DA")
    assert gaps["cifar10", "Serial with DA"] == (None, None)
    assert gaps["cifar10 (first 5000)", "AL K=3"] == (-10.0, "Serial with DA, augment 2")
    assert gaps["cifar10 (first 5000)", "Replay K=3"] == (1.0, "Serial with DA, augment random")
    assert "baseline" in [column.title for column in comparison(compare(load(runs))[0])]


def test_unfinished_runs_are_left_out_of_means_and_warned_of(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "a", 90.0, message="slow stage: the steps of stage 1 took 2 times as long"),
        make(tmp_path / "b", 10.0, "diverged", done=2, seed=1, message="the loss of stage 1 is nan"),
        make(tmp_path / "c", 50.0, "", done=3, stages=2),
        make(tmp_path / "d", None, "", done=0, stages=4),
        make(tmp_path / "e", 99.0, "interrupted", done=4, stages=5),
    ]
    with (runs[2] / "records.jsonl").open("a") as file:
        file.write('{"epoch": 3, "pha')  # cut off in writing
    rows = {row["stages"]: row for row in table(runs)}
    assert (rows[3]["test_accuracy"], rows[3]["runs"], rows[3]["status"]) == (90.0, 1, "1 finished, 1 diverged")
    assert (rows[2]["status"], rows[2]["test_accuracy"], rows[2]["gap"]) == ("unfinished", 50.0, None)
    assert (rows[2]["serial_epoch"], rows[2]["epochs_done"]) == (None, 3)
    assert (rows[4]["status"], rows[4]["test_accuracy"], rows[4]["epochs_done"]) == ("unfinished", None, 0)
    page = page_of(runs, tmp_path)
    warnings = page.partition('<ul class="warnings">')[2].partition("</ul>")[0]
    for text in ("<b>b</b> diverged: the loss of stage 1 is nan", "<b>a</b> finished: slow stage", "interrupted"):
        assert text in warnings
    assert "3 of 6" in page
    assert "SPH-AL K=3 reaches 90.00 %" in page  # not the 99 % of the interrupted one


def test_a_run_of_an_own_model_needs_no_recipe_and_test_sets_are_recorded_or_known(tmp_path: Path) -> None:
    from parlay.data.sources import facts

    assert {name: facts(name).test_size for name in TEST_SAMPLES} == TEST_SAMPLES
    run = make(tmp_path / "own", method="AugmentedLagrangian", test_samples=77)
    (run / "recipe.toml").unlink()
    assert table([run])[0]["label"] == "SPH-AL K=3"
    assert [one.summary["test_samples"] for one in load([run, make(tmp_path / "b")])] == [77, 360]


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
        (90.5, 90.0, "is level with serial training WHERE: 90.00 % and 90.50 %, 1 run each."),
        (99.0, 90.0, "reaches 90.00 % WHERE, 9.00 points below serial training, 1 run each."),
        (None, None, "reaches a test loss of 0.2500 WHERE, serial training 0.2500: 1 run each cannot tell them apart."),
    ],
)
def test_the_headline_calls_only_a_difference_a_difference(
    tmp_path: Path, serial: float | None, ours: float | None, says: str
) -> None:
    (found,) = compare(load([make(tmp_path / "a", ours), make(tmp_path / "s", serial, **SERIAL)]))
    assert headline(found).replace("on digits with resnet20", "WHERE") == f"SPH-AL K=3 {says}"
    gaps = next(column for column in comparison(found) if column.title == "gap to serial")
    assert (gaps.cells[1].look == "level") is (serial == 90.5)
    assert ("above two standard errors (of 360 test samples): here" in " ".join(notes(found))) is (ours is not None)


def test_times_are_medians_of_each_phase_and_the_passes_between(tmp_path: Path) -> None:
    serial = make(tmp_path / "s", 90.0, seconds=(9.0, 2.0, 2.0, 2.0, 2.0, 2.0), **SERIAL)
    hybrid = make(tmp_path / "h", 90.0, done=5, phases="SPPSP", seconds=(8.0, 7.0, 1.0, 2.0, 2.0), processes=3)
    rows = {row["label"]: row for row in table([serial, hybrid], timed=True)}
    # serial: the median of 8 and 2, twice; parallel: the median of 6, 1 and 1, three times; two passes of a second
    assert rows["SPH-AL K=3"]["step_ms"] == pytest.approx(100 * (2 * 5.0 + 3 * 1.0 + 2 * 1.0) / 5)
    assert rows["SPH-AL K=3"]["speedup"] == pytest.approx(2.0 / 3.0)
    assert (rows["SPH-AL K=3"]["serial_step_ms"], rows["SPH-AL K=3"]["parallel_step_ms"]) == (500.0, 100.0)
    assert all("speedup" not in row for row in table([serial, hybrid]))  # of runs made who knows where
    (found,) = compare(load([serial, hybrid]), timed=True)
    assert found.target == 85.5  # 90 less two standard errors, and rounded down
    assert [found.seconds_to_target(one) for one in found.configurations] == [11.0, 8.0]
    assert [column.title for column in comparison(found)][-4:-2] == ["time to 85.50 %, s", "delay, steps"]
    assert "Baseline of the speed-ups, which are per sample trained: Serial w/o DA." in " ".join(notes(found))


def test_stages_that_take_turns_and_busy_machines_tell_no_speed_up(tmp_path: Path) -> None:
    serial = make(tmp_path / "s", **SERIAL)
    (found,) = compare(load([serial, make(tmp_path / "together")]), timed=True)
    assert "their seconds are no speed-up" in " ".join(notes(found))
    assert not {"speed-up over serial", "time to 83.60 %, s"} & {column.title for column in comparison(found)}
    busy = make(tmp_path / "busy", seed=1, seconds=(30.0, 20.0, 30.0, 20.0, 30.0, 60.0), **SERIAL)
    runs = [serial, busy, make(tmp_path / "quiet", seed=2, **SERIAL), make(tmp_path / "apart", processes=3)]
    (found,) = compare(load(runs), timed=True)
    gains = next(column for column in comparison(found) if column.title == "speed-up over serial")
    assert [cell.text[-2:] for cell in gains.cells] == [" ?", " ?"]
    assert found.rows[1]["speedup"] < 2  # not 5, as by the mean
    assert "Question marks: " in " ".join(notes(found))


def test_a_stage_of_penalty_trains_on_half_of_the_samples_and_its_speed_up_says_so(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, method=name, processes=3) for name in ("al", "penalty")]
    rows = {row["label"]: row for row in table([make(tmp_path / "s", **SERIAL), *runs], timed=True)}
    assert [row["trained_share"] for row in rows.values()] == [1.0, pytest.approx(1 - 4 / 12), 1.0]
    ratio = rows["SPH-AL K=3"]["speedup_per_sample"]
    assert rows["SPH-Penalty K=3"]["speedup_per_sample"] == pytest.approx(ratio * (1 - 4 / 12))
    assert [row["staleness"] for row in rows.values()] == [0, 10, 10]  # in steps: an epoch
    assert table([make(tmp_path / "r", method="replay", staleness=4)], timed=True)[0]["staleness"] == 4
    assert "a stage of Penalty trains on half" in " ".join(notes(compare(load(runs))[0]))
    assert table([make(tmp_path / "j", method="penalty", order="joint")], timed=True)[0]["trained_share"] == 1.0


def test_markup_in_names_and_messages_is_escaped_everywhere(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / MARKUP, 90.0, "diverged", message=f"stage {MARKUP} </pre> lost", dataset=MARKUP, model=MARKUP),
        make(tmp_path / "b", 90.0, dataset=MARKUP, model=MARKUP, method=MARKUP, schedule=MARKUP),
    ]
    timeline.write(runs[1] / timeline.FILE, [span._replace(name=MARKUP) for span in two_ranks()])
    rows = [timing(MARKUP, 200.0, 1.0, model=MARKUP, note=MARKUP)]
    measured = bench(tmp_path / "b.json", rows=rows, says=[MARKUP], command=MARKUP, environment={MARKUP: MARKUP})
    pages = [page_of(runs, tmp_path, MARKUP, sections=[Section(MARKUP, Markup("<p>{}</p>").format(MARKUP))] * 2)]
    assert pages[0].index("<p>&lt;script") < pages[0].index("Learning curves")  # sections of others stand on top
    assert re.findall(r'href="#([^"]*)"', pages[0])[:3] == ["section-1", "section-2", "runs-1"]
    report([*runs, measured], tmp_path / "all.html")
    pages.append((tmp_path / "all.html").read_text())
    for page in pages:
        assert "<script>alert" not in page
        assert "</pre> lost" not in page
        assert html.escape(MARKUP, quote=False).split("&amp;")[0] in page
        assert len(re.findall(r"<script\b", page)) == 1
    charts = "".join(re.findall(r'<svg class="chart".*?</svg>', pages[0], re.DOTALL))
    assert "&lt;script&gt;alert" in charts  # what matplotlib and we ourselves write there


def test_the_page_loads_nothing_follows_the_theme_and_has_no_ids_that_clash(tmp_path: Path) -> None:
    report(everything(tmp_path), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import", re.sub(r"^// .*$", "", page, flags=re.MULTILINE))
    targets = re.findall(r"url\(([^)]*)\)", page) + re.findall(r'\s(?:src|(?:xlink:)?href|data|action)="([^"]*)"', page)
    assert all(target.startswith(("#", "data:")) for target in targets)
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'<use[^>]*\shref="#([^"]*)"', page)) <= set(ids)
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    assert len(charts) == 3 + 3 + 1  # curves of accuracy by epoch and time, and of loss; violations; a timeline
    colours = {match for chart in charts for match in re.findall(r"(?:fill|stroke): ([^;\"]+)", chart)}
    assert {"var(--muted)", "var(--c0)", "var(--c1)"} <= colours
    assert {colour for colour in colours if not colour.startswith("var(")} <= {"none"}
    for text in ("wait 20%, 0%", "1.80 [1.70, 1.90]", "110 [109, 111]", "1.0%, 2.0%", "Take data-parallel", "one core"):
        assert text in page
    assert page.index("resnet56, batch 64 over serial") < page.index("Learning curves")


def test_many_configurations_share_a_few_lines_that_go_on_over_epochs_without_a_score(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"b{n}", 80.0 + n, done=2, beta=float(n)) for n in range(1, 12)]
    serial = make(tmp_path / "serial", 70.0, done=3, **SERIAL)
    lines = [json.loads(line) for line in (serial / "records.jsonl").read_text().splitlines()]
    lines[1]["test_accuracy"] = None
    (serial / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (found,) = compare(load([*runs, serial]))
    assert [one.serial for one in charts.drawn(found)] == [True] + [False] * (charts.LINES - 1)  # serial is the worst
    (found,) = compare(load([serial]))
    paths = re.findall(r' d="([^"]*)"', charts.curves(found, "test_accuracy", "test"))
    assert ("M", "L") in [tuple(re.findall("[ML]", path)) for path in paths if "z" not in path]


def test_tables_are_printed_and_the_page_lies_where_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make(tmp_path / "a", message="m"), make(tmp_path / "b", 91.5, **SERIAL)]
    monkeypatch.chdir(tmp_path)
    assert report([runs[0]], None) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {runs[0] / 'report.html'}"
    report([*runs, bench(tmp_path / "b.json")], None)
    out = capsys.readouterr().out
    for text in ("SPH-AL K=3", "−1.50", "16 MiB", "layer-parallel", "report: report.html"):
        assert text in out
    assert (runs[0] / "report.html").is_file()
    assert (tmp_path / "report.html").is_file()
    half = timing("layer-parallel", 50.0, 2.0, samples_per_step=32.0, speedup_per_step=4.0)
    report([bench(tmp_path / "b.json", rows=[timing("serial", 200.0, 1.0), half])], None)
    assert "speed-up per step" in capsys.readouterr().out  # steps of less work say so
    show({runs[0]: "my row", runs[1]: "serial"})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:4]] == ["method", "serial", "my"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", b'{"status": 3}'),
        ("records.jsonl", b'{"epoch": 0, "phase": "serial", "violation": ["a"]}\n'),
        ("recipe.toml", b"stages = \n"),
        ("recipe.toml", b"stages = 1" + b"0" * 9000),
        ("recipe.toml", b"\xff\xfe"),
        ("timeline.json", b"[]"),
        ("x.json", b'{"rows": []}'),
        ("x.json", b'{"rows": [{"system": "a"}]}'),
        ("x.json", b'{"stage_ms": [1]}'),
        ("x.json", b"{"),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path: Path, file: str, content: bytes) -> None:
    run = make(tmp_path / "a")
    (run / file).write_bytes(content)
    with pytest.raises(InputError, match=rf"^[^\n]*{file} is (damaged|no timeline|of no use here)[^\n]*$"):
        report([run / file if file == "x.json" else run], run / "report.html")
    assert not (run / "report.html").exists()


def test_what_is_no_run_and_no_place_for_a_page_is_named_in_one_line(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    (tmp_path / "file").touch()
    (tmp_path / "empty\nfolder").mkdir()
    (tmp_path / "comparison.json").write_text('{"rows": [{"folders": [""]}]}')
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "records.jsonl")  # nobody writes into it
    says = dict.fromkeys(("nowhere", "x" * 5000, "a\0b"), "does not exist: write a run folder")
    says |= {"file": "is a file", "empty\nfolder": "is no run folder", "pipe": "is no run folder", "": "damaged"}
    for folder, line in says.items():
        with pytest.raises(InputError, match=rf"^[^\n]*{line}[^\n]*$"):
            report([tmp_path / folder], tmp_path / "page.html")
    with pytest.raises(InputError, match="is a folder: write -o with a file"):
        report([run], tmp_path)
    with pytest.raises(InputError, match=r"cannot write .*: write -o"):
        report([run], run / "recipe.toml" / "page.html")


def test_no_torch_is_loaded_and_matplotlib_only_for_a_page(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from parlay.report import report;"
        "assert 'matplotlib' not in sys.modules; report([Path(sys.argv[1])], None);"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(make(tmp_path / "a", model="é"))]
    done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert b"?" in done.stdout  # in the place of letters that a terminal lacks
