"""What a report takes beside run folders: comparisons and benchmarks, each checked, and sections of others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from parlay import timeline
from parlay.errors import InputError
from parlay.report import Section, report, write
from parlay.report.bench import Bench
from parlay.report.inputs import sort_out
from test_report import MARKUP, SERIAL, make
from test_timeline import two_ranks


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


def everything(folder: Path) -> list[Path]:
    """Something of all that a page can show."""
    compared = folder / "compared"
    runs = [make(compared / f"k{k}", 80.0 + k, stages=k, processes=k) for k in (2, 3)] + [
        make(compared / "s", 81.0, **SERIAL)
    ]
    timeline.write(runs[0] / timeline.FILE, two_ranks())
    write_json(compared / "comparison.json", {"rows": [{"folders": [run.name]} for run in runs]})
    return [compared, bench(folder / "bench.json")]


def page_of(paths: list[Path], folder: Path) -> str:
    report(paths, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_comparison_stands_for_its_runs_whose_times_can_be_compared(tmp_path: Path) -> None:
    paths = everything(tmp_path)
    given = sort_out(paths)
    assert ([folder.name for folder in given.folders], given.timed) == (["k2", "k3", "s"], True)
    assert len(given.benches) == 1
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


def test_sections_of_others_stand_before_the_runs_and_in_the_contents(tmp_path: Path) -> None:
    sections = [Section(f"{name} {MARKUP}", Markup("<p>body of <b>{}</b></p>").format(name)) for name in ("a", "b")]
    write([make(tmp_path / "run")], tmp_path / "page.html", "title", sections=sections)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    contents = page.partition("<nav")[2].partition("</nav>")[0]
    assert re.findall(r'href="#([^"]+)"', contents) == ["section-1", "section-2", "task-1"]
    assert page.index("<p>body of <b>a</b></p>") < page.index('id="section-2"') < page.index('id="task-1"')
    assert MARKUP not in page
    write([], tmp_path / "alone.html", "title", sections=sections[:1])
    assert "body of" in (tmp_path / "alone.html").read_text(encoding="utf-8")


def test_markup_is_escaped_here_too(tmp_path: Path) -> None:
    rows = [timing(MARKUP, 200.0, 1.0, model=MARKUP, note=MARKUP), timing("b", 1.0)]
    keys = {"says": [MARKUP], "command": MARKUP, "environment": {MARKUP: MARKUP}}
    page = page_of([bench(tmp_path / "b.json", rows=rows, **keys)], tmp_path)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") > 4


@pytest.mark.parametrize(
    "content",
    ["{", '{"rows": []}', '{"rows": [{"system": "a"}]}', '{"rows": 3}'],
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


def test_a_damaged_comparison_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "c" / "comparison.json", {"rows": [{}]})
    with pytest.raises(InputError, match=r"comparison\.json is damaged"):
        sort_out([tmp_path / "c"])
