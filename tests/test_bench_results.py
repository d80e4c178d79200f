"""The pages of results/cpu-bench and results/gpu-bench are what their records say, and a changed figure is found."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

RESULTS = Path(__file__).parent.parent / "results"
EXPERIMENTS = ("cpu-bench", "gpu-bench")


def page_of(experiment: str, results: Path = RESULTS) -> ModuleType:
    """Its `page.py`, from this folder of results, read anew."""
    path = results / experiment / "page.py"
    spec = importlib.util.spec_from_file_location(f"page_{experiment}_{abs(hash(results))}".replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The two experiments alone, with the command that writes pages."""
    results = tmp_path / "results"
    for experiment in EXPERIMENTS:
        shutil.copytree(RESULTS / experiment, results / experiment, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pages.py", "records.py"):
        shutil.copy(RESULTS / name, results)
    (tmp_path / "README.md").write_text("")
    return results


def check(results: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, results / "pages.py", "--check"], capture_output=True, text=True)


def test_the_pages_are_what_the_records_say(copy: Path) -> None:
    found = check(copy)
    assert (found.stdout, found.returncode) == ("", 0)


def in_text(page: str, where: str) -> Callable[[Path], None]:
    """Another last digit in the first number of that kind."""

    def change(results: Path) -> None:
        path = results / page
        text = path.read_text(encoding="utf-8")
        found = re.search(where, text)
        assert found is not None
        number = found[1][:-1] + str((int(found[1][-1]) + 5) % 10)
        path.write_text(text[: found.start(1)] + number + text[found.end(1) :], encoding="utf-8")

    return change


def in_record(file: str, system: str, stages: int, key: str) -> Callable[[Path], None]:
    def change(results: Path) -> None:
        path = results / file
        content = json.loads(path.read_text())
        row = next(row for row in content["rows"] if (row["system"], row["stages"]) == (system, stages))
        row[key] *= 1.1
        path.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    "change",
    [
        in_text("cpu-bench/README.md", r"(\d\.\d\d)<!--"),
        in_text("cpu-bench/README.md", r"`replay` \| (\d\.\d\d) \["),
        in_text("gpu-bench/README.md", r"(\d\.\d\d)<!--"),
        in_text("gpu-bench/README.md", r"\| (0\.\d\d) \|"),
        in_record("cpu-bench/resnet56-b64.json", "data-parallel", 2, "speedup"),
        in_record("gpu-bench/wrn-40-10-b128.json", "layer-parallel", 9, "speedup"),
        in_record("gpu-bench/resnet110-b64-d9fc585.json", "layer-parallel", 9, "step_ms"),
    ],
    ids=["figure-cpu", "table-cpu", "figure-gpu", "table-gpu", "record-cpu", "record-gpu", "time-gpu"],
)
def test_a_figure_that_is_changed_by_hand_is_found(change: Callable[[Path], None], copy: Path) -> None:
    change(copy)
    found = check(copy)
    assert "README.md is not what the records say" in found.stdout
    assert found.returncode == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_picture_is_of_these_records(experiment: str) -> None:
    with Image.open(RESULTS / experiment / "speed.png") as picture:
        assert picture.info["Description"] == page_of(experiment).digest(), f"run python results/{experiment}/page.py"


def test_figures_are_named_by_network_batch_system_and_stages() -> None:
    cores, gpu = page_of("cpu-bench").figures(), page_of("gpu-bench").figures()
    rows = {row["system"]: row for row in json.loads((RESULTS / "cpu-bench/resnet20-b128.json").read_text())["rows"]}
    for system in ("layer-parallel", "data-parallel", "replay"):
        assert cores[f"resnet20-b128-{system}"] == rows[system]["speedup"]
    pipelines = [row["step_ms"] for system, row in rows.items() if system.startswith("pipeline")]
    assert cores["resnet20-b128-pipeline-ms"] == min(pipelines)
    wide = json.loads((RESULTS / "gpu-bench/wrn-40-10-b128.json").read_text())["rows"]
    slow = next(row for row in wide if (row["system"], row["stages"]) == ("layer-parallel", 9))
    assert gpu["wrn-40-10-b128-al-k9"] == slow["speedup"]
    wanted = {"resnet110-b128-al-k3", "resnet110-b128-serial-ms", "resnet110-b128-replay-k3", "shares-al-k3-cost"}
    assert wanted <= gpu.keys()


def test_rows_where_layer_parallel_training_loses_are_kept() -> None:
    cores, gpu = page_of("cpu-bench"), page_of("gpu-bench")
    figures = gpu.figures()
    assert figures["wrn-40-10-b128-al-k9"] < 1
    assert figures["resnet110-b512-al-graph-k9"] < 1
    assert all(f"`al`, {kind} | 9 |" in gpu.tables()["earlier"] for kind in ("CUDA graph", "compiled CUDA graph"))
    assert cores.figures()["resnet20-b128-over-data-parallel"] < 1
    assert "data-parallel (DDP)" in cores.tables()["speed"]


def test_records_of_a_commit_take_the_place_of_older_ones(copy: Path) -> None:
    path = copy / "gpu-bench" / "resnet110-b128.json"
    for new in copy.glob("gpu-bench/resnet110-b*-*.json"):
        new.unlink()
    content = json.loads(path.read_text())
    before = page_of("gpu-bench", copy).figures()["resnet110-b128-earlier-al-k3"]
    for row in content["rows"]:
        for key in ("speedup", "speedup_low", "speedup_high"):
            row[key] *= 1.1
    path.with_name("resnet110-b128-abc1234.json").write_text(json.dumps(content))
    page = page_of("gpu-bench", copy)
    assert page.figures()["resnet110-b128-al-k3"] == pytest.approx(1.1 * before)
    assert "abc1234: ResNet-110, batch 128." in page.tables()["made"]
    assert page.figures()["moved-most"] == pytest.approx(10)
    assert "| speed-up, `al` | +10.0 to +10.0 | – | – |" in page.tables()["moved"]


def penalty(**keys: Any) -> dict[str, Any]:
    ratios = {"speedup": 4.0, "speedup_low": 4.0, "speedup_high": 4.0}
    return {"system": "layer-parallel", "method": "penalty", "batch_size": 128, "step_ms": 2.0, **ratios, **keys}


def test_a_speed_up_above_k_stands_beside_that_of_the_same_work() -> None:
    page = page_of("gpu-bench")
    old = page.Timed.read(penalty())
    new = page.Timed.read(penalty(samples_per_step=64.0, speedup=2.0, speedup_low=2.0, speedup_high=2.0))
    assert old == new
    assert (old.speedup, old.per_step) == (2, 4)
    assert old.sample_us == pytest.approx(2000 / 64)
    assert old.text == "2.00 (per step 4.00)"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_cells_are_numbers_or_few_words(experiment: str) -> None:
    for name, text in page_of(experiment).tables().items():
        for line in (line for line in text.splitlines() if line.startswith("|")):
            assert all(len(cell.split()) <= 5 for cell in line.strip("|").split("|")), (name, line)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_table_of_speeds_names_its_baseline(experiment: str) -> None:
    text = (RESULTS / experiment / "README.md").read_text(encoding="utf-8")
    titles = re.findall(r"([^\n]+(?:\n[^\n]+)*\n\n<!-- table: (?:speed|earlier|shares) -->\n.*)\n", text)
    assert len(titles) == len(re.findall(r"<!-- table: (?:speed|earlier|shares) -->", text)) > 0
    assert all("serial" in title for title in titles)


def test_the_two_folders_are_small() -> None:
    files = [path for experiment in EXPERIMENTS for path in (RESULTS / experiment).rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    assert len(files) <= 40
    assert sum(path.stat().st_size for path in files) < 1_000_000
