"""What a report takes beside run folders: comparisons, benchmarks, forecasts and reproductions, each checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from parlay import timeline
from parlay.errors import InputError
from parlay.report import report
from parlay.report.bench import Bench
from parlay.report.inputs import sort_out
from test_report import MARKUP, SERIAL, make
from test_timeline import two_ranks

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f6"
    "45400000000049454e44ae426082"
)


def timing(system: str, ms: float, speedup: float | None = None, **keys: Any) -> dict[str, Any]:
    low, high = (None, None) if speedup is None else (speedup - 0.1, speedup + 0.1)
    ratios = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
    about = {"system": system, "stages": 2, "model": "resnet56", "batch_size": 64, "note": "M = 4"}
    return {**about, "step_ms": ms, "step_ms_low": ms - 1, "step_ms_high": ms + 1, **ratios, **keys}


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def bench(path: Path, **keys: Any) -> Path:
    rows = [timing("serial", 200.0, 1.0), timing("layer-parallel", 110.0, 1.8, wait_share=[0.01, 0.02])]
    about = {"says": ["Take data-parallel training here."], "command": "parlay bench", "environment": {"cores": 2}}
    return write_json(path, {"rows": rows, **about, "rounds": 5, "steps": 3, **keys})


def plan(path: Path, **keys: Any) -> Path:
    content = {
        "model": "resnet20",
        "dataset": "digits",
        "stages": 3,
        "cuts": [4, 7],
        "auxiliary_gib": 0.5,
        "device": "cpu",
        "batch_size": 128,
        "serial_ms": 12.0,
        "stage_ms": [3.0, 4.0, 5.0],
        "exchange_bytes": [1 << 20, 1 << 20],
        "speedup_parallel_epoch": 2.4,
        "phases": "SPPPSPPPPS",
        "speedup": 1.7,
    }
    return write_json(path, content | keys)


def reproduction(folder: Path, folders: list[str], **keys: Any) -> Path:
    columns = [
        {"key": "label", "title": "method", "kind": "row"},
        {"key": "accuracy", "title": "test accuracy, %", "kind": "measured", "digits": 1},
        {"key": "theirs", "title": "test accuracy, %", "kind": "quoted"},
        {"key": "speed", "title": "speed-up", "kind": "projected"},
    ]
    rows = [
        {"label": "Serial", "accuracy": 90.0, "theirs": 93.78, "speed": 1.0, "folders": folders},
        {"label": "AL (K=3)", "accuracy": 88.5, "ours": True, "theirs": None, "speed": 2.25, "folders": []},
    ]
    content = {
        "name": "table1",
        "title": "Table 1",
        "status": "finished",
        "labels": ["30 epochs, the paper has 200"],
        "notes": ["Penalty rows compute half batches."],
        "columns": columns,
        "rows": rows,
        "figures": [{"file": "figure7.png", "caption": "learning curves"}, {"file": "gone.svg", "caption": "none"}],
        "stage_ms": {"3": [3.0, 4.0, 5.0]},
        "serial_ms": 12.0,
        "command": "parlay reproduce table1",
    }
    folder.mkdir(parents=True)
    (folder / "figure7.png").write_bytes(PNG)
    return write_json(folder / "reproduction.json", content | keys).parent


def images(folder: Path) -> None:
    """As a run of the VAE leaves them."""
    grey = np.arange(10 * 64, dtype=np.uint8).reshape(10, 1, 8, 8)
    save_file({"images": grey, "reconstructions": grey[::-1].copy()}, folder / "reconstructions.safetensors")


def everything(folder: Path) -> list[Path]:
    """Something of all that a page can show."""
    compared = folder / "compared"
    runs = [make(compared / f"k{k}", 80.0 + k, stages=k, processes=k) for k in (2, 3)] + [
        make(compared / "s", 81.0, **SERIAL)
    ]
    timeline.write(runs[0] / timeline.FILE, two_ranks())
    images(runs[0])
    write_json(compared / "comparison.json", {"rows": [{"folders": [run.name]} for run in runs]})
    return [compared, bench(folder / "bench.json"), plan(folder / "plan.json")]


def page_of(paths: list[Path], folder: Path) -> str:
    report(paths, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_comparison_stands_for_its_runs_whose_times_can_be_compared(tmp_path: Path) -> None:
    paths = everything(tmp_path)
    given = sort_out(paths)
    assert ([folder.name for folder in given.folders], given.timed) == (["k2", "k3", "s"], True)
    assert (len(given.benches), len(given.forecasts)) == (1, 1)
    page = page_of(paths, tmp_path)
    assert "against training time" in page
    assert "speed per sample, measured" in page
    assert not sort_out([*paths, make(tmp_path / "other")]).timed  # made nobody knows where and when


def test_the_speed_stands_behind_the_headline_of_a_page_of_one_task(tmp_path: Path) -> None:
    page = page_of([make(tmp_path / "a"), bench(tmp_path / "bench.json")], tmp_path)
    places = [page.index(text) for text in ('class="headline"', 'id="bench-1"', "Learning curves")]
    assert places == sorted(places)
    two = page_of([make(tmp_path / "b"), make(tmp_path / "c", dataset="mnist"), tmp_path / "bench.json"], tmp_path)
    assert two.index('id="bench-1"') > two.rindex("Learning curves")


def test_the_page_of_a_folder_lies_in_it(tmp_path: Path) -> None:
    report([everything(tmp_path)[0]], None)
    assert (tmp_path / "compared" / "report.html").is_file()


def test_a_bench_is_shown_with_its_quartiles_and_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of([bench(tmp_path / "b.json")], tmp_path)
    for text in ("1.80 [1.70, 1.90]", "110 [109, 111]", "1.0%, 2.0%", "Take data-parallel training here.", "5 rounds"):
        assert text in page
    assert "layer-parallel" in capsys.readouterr().out


def test_a_bench_says_which_speed_ups_are_of_less_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = timing("layer-parallel", 50.0, 2.0, samples_per_step=32.0, sample_us=1562.5, speedup_per_step=4.0)
    serial = timing("serial", 200.0, 1.0, note="one core")
    page = page_of([bench(tmp_path / "b.json", rows=[serial, half], baseline="serial")], tmp_path)
    assert "over serial (one core)" in page
    for text in ("speed-up per step", "samples a step", "µs a sample"):
        assert text in page
    assert "4.00" in capsys.readouterr().out
    assert "speed-up per step" not in page_of([bench(tmp_path / "b.json")], tmp_path)
    rows = Bench.read(json.loads(bench(tmp_path / "b.json").read_text())).rows
    assert [row.samples for row in rows] == [64, 64]  # a file from before they were told


@pytest.mark.parametrize("samples", [0, -1, float("nan"), "many"])
def test_a_bench_with_impossible_samples_is_refused(samples: object, tmp_path: Path) -> None:
    rows = [timing("serial", 200.0, 1.0, samples_per_step=samples)]
    with pytest.raises(InputError, match=r"b\.json"):
        sort_out([bench(tmp_path / "b.json", rows=rows)])


def test_the_timeline_of_a_plan_is_of_whole_batches(tmp_path: Path) -> None:
    path = plan(tmp_path / "p.json", samples_per_step=64.0, stage_ms=[1.5, 2.0, 2.5])
    assert sort_out([path]).forecasts[0].times.parallel_step == pytest.approx(5)
    page = page_of([path], tmp_path)
    assert "layer-parallel: 2.40 times as fast as serial" in page
    assert "bars are of the 2 steps in which a stage trains on a whole batch" in page


def test_what_is_measured_and_what_is_simulated_says_so(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path), tmp_path)
    kinds = [part.split("<")[0] for part in page.split('<strong class="kind ')[1:]]
    assert [kind.split('"')[0] for kind in kinds] == ["measured", "simulated", "simulated"]
    assert "layer-parallel: 2.40 times as fast as serial" in page  # as the plan says
    assert "hybrid, alternate:4:1: 1.88 times as fast as serial" in page  # eq. (11) for four of five epochs
    assert "nothing in these bars was run" in page


def test_a_plan_of_something_else_has_a_section_of_its_own(tmp_path: Path) -> None:
    page = page_of([make(tmp_path / "a"), plan(tmp_path / "p.json", model="resnet110")], tmp_path)
    assert page.count("<section") == 2
    assert "Forecast" in page


def test_the_time_of_messages_is_part_of_a_simulated_step(tmp_path: Path) -> None:
    path = plan(tmp_path / "p.json", link_gib_per_second=1.0)
    times = sort_out([path]).forecasts[0].times
    each = 1000 / 1024  # 1 MiB at 1 GiB a second
    assert times.messages == pytest.approx((each, 2 * each, each))
    assert times.parallel_step == pytest.approx(5 + each)


def test_a_reproduction_brings_its_table_figures_and_runs(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "serial-s0", 90.0, **SERIAL)
    folder = reproduction(tmp_path / "table1", ["../runs/serial-s0", "../runs/not-yet"])
    page = page_of([folder], tmp_path)
    assert ">88.5<" in page
    assert "Penalty rows compute half batches." in page
    for text in ("30 epochs, the paper has 200", "measured here", "quoted from the paper", "93.78", "learning curves"):
        assert text in page
    assert page.count('<img src="data:image/png') == 1
    assert "Serial w/o DA reaches 90.00 %" in page  # the section of its runs
    assert page_of([folder / "reproduction.json"], tmp_path) == page


def test_at_its_head_stand_serial_training_the_papers_best_and_ours(tmp_path: Path) -> None:
    """Each with its speed-ups, which say of what kind they are."""
    serial = {"label": "Serial with DA", "method": "serial", "value": 89.3}
    worse = {"label": "AL", "method": "al", "value": 82.0, "speedup_measured": 1.6}
    better = {"label": "SPH-AL", "method": "al", "value": 87.0, "speedup_measured": 1.4, "speedup_projected": 1.8}
    ours = {"label": "Replay", "method": "replay", "value": 88.9, "ours": True, "speedup_projected": float("inf")}
    lost = {"label": "DS-AL", "method": "al", "value": None}
    folder = reproduction(tmp_path / "t", [], rows=[serial, worse, better, lost, ours])
    head = [
        ("89.30 %", "serial training", "Serial with DA"),
        (
            "87.00 %",
            "best of the paper's methods",
            "SPH-AL; speed-up over serial per sample trained: 1.40 measured here, 1.80 projected for K devices",
        ),
        ("88.90 %", "best that is not in the paper", "Replay"),
    ]
    assert list(sort_out([folder]).reproductions[0].facts) == head
    page = page_of([folder], tmp_path)
    assert all(f"<dd>{value}</dd>" in page for value, _, _ in head)
    losses = reproduction(tmp_path / "loss", [], rows=[serial, worse, better], metric="test_loss")
    assert sort_out([losses]).reproductions[0].facts[1][:2] == ("82.0000", "best of the paper's methods")


def test_records_of_before_get_their_speed_ups_per_sample_trained(tmp_path: Path) -> None:
    """From the schedule: half of the samples of a parallel epoch for penalty, all for the others."""
    kinds = {"label": "row", "speedup_measured": "measured", "speedup_projected": "projected"}
    columns = [{"key": key, "title": key, "kind": kind} for key, kind in kinds.items()]
    penalty = {"label": "P", "method": "penalty", "stages": 2, "schedule": "parallel", "speedup_measured": 2.4}
    hybrid = {**penalty, "schedule": "alternate:1:1", "speedup_projected": 1.6}
    al = {**penalty, "method": "al", "speedup_measured": 1.5}
    keys = {"columns": columns, "rows": [penalty, hybrid, al], "epochs": 5}
    (found,) = sort_out([reproduction(tmp_path / "t", [], **keys)]).reproductions
    assert [c.title.replace("\N{NON-BREAKING HYPHEN}", "-") for c in found.columns] == [
        *("label", "speed-up over serial", "per sample trained", "speed-up over serial", "per sample trained"),
    ]
    assert [row["speedup_measured_per_sample"] for row in found.rows] == pytest.approx([2.4 * 0.6, 2.4 * 0.8, 1.5])
    assert [row["speedup_projected_per_sample"] for row in found.rows] == [None, pytest.approx(1.6 * 0.8), None]
    (found,) = sort_out([reproduction(tmp_path / "al", [], **{**keys, "rows": [al]})]).reproductions
    assert len(found.columns) == 2  # nothing new to say
    joint = {**keys, "labels": ["order joint in the place of red-black"]}
    (found,) = sort_out([reproduction(tmp_path / "joint", [], **joint)]).reproductions
    assert [row["speedup_measured_per_sample"] for row in found.rows] == [2.4, 2.4, 1.5]


def test_a_page_of_many_things_has_contents_that_lead_to_them(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "serial-s0", 90.0, **SERIAL)
    tables = [reproduction(tmp_path / name, ["../runs/serial-s0"], title=f"{name}: {MARKUP}") for name in ("a", "b")]
    page = page_of([*tables, bench(tmp_path / "b.json"), plan(tmp_path / "p.json", model="other")], tmp_path)
    contents = page.partition("<nav")[2].partition("</nav>")[0]
    targets = re.findall(r'href="#([^"]+)"', contents)
    assert targets == ["paper-1", "paper-2", "task-1", "bench-1", "forecast"]
    assert [page.count(f'<section id="{target}"') for target in targets] == [1] * 5
    assert "<title>a, b</title>" in page
    assert MARKUP not in page
    assert "<nav" not in page_of(tables[:1], tmp_path)


def test_its_columns_stand_under_their_kinds_and_only_those_that_tell_something(tmp_path: Path) -> None:
    kinds = {"label": "row", "a": "measured", "b": "measured", "c": "quoted", "none": "measured", "status": "row"}
    columns = [{"key": key, "title": f"title {key}", "short": f"short {key}", "kind": kinds[key]} for key in kinds]
    rows = [{"label": "x", "a": 1.5, "b": 2.5, "status": "1 finished"}, {"label": "y", "c": 3.5, "status": "not run"}]
    page = page_of([reproduction(tmp_path / "first", [], columns=columns, rows=rows[:1])], tmp_path)
    assert '<td colspan="2">measured here</td>' in page
    assert [f"short {key}" in page for key in kinds] == [True, True, True, False, False, False]
    page = page_of([reproduction(tmp_path / "both", [], columns=columns, rows=rows)], tmp_path)
    assert [f"short {key}" in page for key in kinds] == [True, True, True, True, False, True]
    assert '<td colspan="1">quoted from the paper</td>' in page


def test_runs_of_a_reproduction_tell_no_seconds(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "serial-s0", 90.0, **SERIAL)
    assert "serial epoch, s" in page_of([run], tmp_path)
    assert "serial epoch, s" not in page_of([reproduction(tmp_path / "table1", ["../runs/serial-s0"])], tmp_path)


def test_markup_is_escaped_here_too(tmp_path: Path) -> None:
    rows = [timing(MARKUP, 200.0, 1.0, model=MARKUP, note=MARKUP), timing("b", 1.0)]
    folder = reproduction(tmp_path / "t", [], title=MARKUP, labels=[MARKUP], command=MARKUP, status=MARKUP)
    paths = [
        bench(tmp_path / "b.json", rows=rows, says=[MARKUP], command=MARKUP, environment={MARKUP: MARKUP}),
        plan(tmp_path / "p.json", model=MARKUP, device=MARKUP, dataset=MARKUP),
        folder,
    ]
    page = page_of(paths, tmp_path)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") > 8


@pytest.mark.parametrize(
    "content",
    ["{", '{"rows": []}', '{"rows": [{"system": "a"}]}', '{"rows": 3}', '{"stage_ms": [1, 2]}', '{"stage_ms": "x"}'],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=r"x\.json is damaged \(.*\): leave it out, or record it again$"):
        report([tmp_path / "x.json"], tmp_path / "page.html")


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', "3"])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=r"x\.json is of no use here: write a run folder"):
        report([tmp_path / "x.json"], tmp_path / "page.html")


@pytest.mark.parametrize("keys", [{"stage_ms": [1.0, -1.0]}, {"stage_ms": []}, {"serial_ms": None}, {"speedup": "x"}])
def test_a_plan_with_impossible_numbers_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"p\.json is damaged \(no proper"):
        sort_out([plan(tmp_path / "p.json", **keys)])


@pytest.mark.parametrize(
    "keys",
    [
        {"columns": None},
        {"rows": [1]},
        {"rows": [{"label": "x", "value": 10**400}]},
        {"figures": [{"caption": "x"}]},
        {"stage_ms": {"x": [1.0]}},
        {"message_ms": {"3": [1.0]}},
    ],
)
def test_a_damaged_reproduction_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"reproduction\.json is damaged"):
        sort_out([reproduction(tmp_path / "t", [], **keys)])


def test_a_damaged_comparison_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "c" / "comparison.json", {"rows": [{}]})
    with pytest.raises(InputError, match=r"comparison\.json is damaged"):
        sort_out([tmp_path / "c"])


@pytest.mark.parametrize(
    "content",
    [
        {"images": np.zeros((2, 1, 4, 4), np.uint8)},
        {"images": np.zeros((2, 1, 4, 4), np.uint8), "reconstructions": np.zeros((3, 1, 4, 4), np.uint8)},
        {"images": np.zeros((2, 2, 4, 4), np.uint8), "reconstructions": np.zeros((2, 2, 4, 4), np.uint8)},
        {"images": np.zeros((2, 1, 4, 4)), "reconstructions": np.zeros((2, 1, 4, 4))},
    ],
)
def test_damaged_images_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    run = make(tmp_path / "run")
    save_file(content, run / "reconstructions.safetensors")
    with pytest.raises(InputError, match=r"reconstructions\.safetensors is damaged"):
        report([run], tmp_path / "page.html")
    (run / "reconstructions.safetensors").write_bytes(b"{}")
    with pytest.raises(InputError, match=r"reconstructions\.safetensors is damaged"):
        report([run], tmp_path / "page.html")
