"""The documentation: its links lead somewhere, its flags exist, and its pictures are those that the code draws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest

from parlay import compare
from parlay.recipe import Recipe, flag
from parlay.report import reproduction
from parlay.report.simulate import length, play
from parlay.reproduce import runs
from parlay.reproduce.paper import EXPERIMENTS, WORKLOADS
from parlay.reproduce.request import Request, read_instead
from parlay.reproduce.speed import Timing

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


SHOWN = {
    "serial with augmentation": "serial-da",
    "replay: states of a few steps, augmentation in every epoch": "replay-k3",
    "the same, adaptive": "replay-k3-adaptive",
    "augmented Lagrangian (AL), a state per sample": "al-k3",
    "with a serial, augmented epoch in five (SPH-AL)": "sph-al-k3-1to4",
    "and states at half the side (DS-SPH-AL)": "ds-sph-al-k3-1to4",
    "penalty method in its place (DS-SPH-P)": "ds-sph-penalty-k3-1to4",
}


HYBRIDS = ["sph-penalty", "sph-al", "ds-sph-penalty", "ds-sph-al"]
RATIOS = ["1to4", "2to3", "3to2", "4to1"]


PAPER = ROOT / "results" / "paper"
SHORT = PAPER / "short"


def recorded(table: str = "table1", out: Path = PAPER) -> dict[str, dict[str, Any]]:
    """The rows of one of the paper's tables, by name."""
    content = json.loads((out / table / "reproduction.json").read_text())
    return {row["row"]: row for row in content["rows"]}


def first_table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without emphasis."""
    parts = page.read_text(encoding="utf-8").partition(heading)[2].split("\n\n")
    lines = next(part for part in parts if part.startswith("| ")).splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def on_a_third() -> dict[str, float]:
    """Speed-ups with a third of a GPU for each of three stages, by method: al is cut evenly, as in table 1."""
    return {
        row["method"]: row["speedup"]
        for row in json.loads((ROOT / "results/gpu-bench/shares.json").read_text())["rows"]
        if row["stages"] == 3 and (row["method"], row["partition"]) in (("al", "even"), ("replay", "cost"))
    }


@pytest.mark.parametrize("stages", [2, 3])
def test_the_recorded_rows_stand_in_the_papers_order(stages: int) -> None:
    rows = recorded()

    def value(kind: str, method: str) -> float:
        ratio = "-1to4" if "sph" in kind else ""
        return float(rows[f"{kind}{method}-k{stages}{ratio}"]["value"])

    assert value("", "al") > value("", "penalty") - 0.5
    for method in ("al", "penalty"):
        assert value("ds-", method) > value("", method) - 1
        assert value("sph-", method) > value("", method) + 2
        assert value("ds-sph-", method) > value("ds-", method) + 2


def test_the_answer_to_the_paper_is_as_good_as_serial_training_and_faster_than_its_best_hybrid() -> None:
    rows = recorded()
    best = max(row["paper_speedup"] for row in rows.values() if row["ratio"])
    ours = rows["replay-k3"]
    assert ours["value"] > rows["serial-da"]["value"] - 0.5
    assert min(on_a_third()["replay"], ours["speedup_projected"]) > best


def test_memory_is_what_the_formula_says() -> None:
    kept = [row for row in recorded().values() if row["memory_gib"] is not None and not row["ours"]]
    assert len(kept) == 16
    assert [row["memory_gib"] for row in kept] == pytest.approx([row["formula_gib"] for row in kept])


def test_the_readmes_first_table_is_that_of_the_records() -> None:
    rows, cut = recorded(), on_a_third()
    for label, *cells in first_table(ROOT / "README.md", "\n"):
        row = rows[SHOWN[label]]
        keys = ("value", "speedup_measured", "speedup_projected", "memory_gib", "paper_value", "paper_speedup")
        value, measured, projected, memory, quoted, speedup = (row[key] for key in keys)
        if row["method"] == "serial":
            measured = share = projected = 1
        else:
            share = cut.get(row["method"]) if row["schedule"] in ("parallel", "adaptive") else None
        assert cells == [_cell(n) for n in (value, measured, share, projected, memory, quoted, speedup)]


@pytest.mark.parametrize(("table", "out"), [("table3", PAPER), ("table4", SHORT)])
def test_more_serial_epochs_bring_more_and_the_results_say_how_much(table: str, out: Path) -> None:
    rows, heading = recorded(table, out), f"## {table.capitalize()[:-1]} {table[-1]}"
    for kind, (_, *cells) in zip(HYBRIDS, first_table(PAPER / "README.md", heading), strict=True):
        shown = [rows[f"{kind}-k3-{ratio}"] for ratio in RATIOS]
        values = [row["value"] for row in shown if row["value"] is not None]
        assert values == sorted(values)
        assert cells == [f"{_cell(row['value'])} (*{row['paper_value']:.2f}*)" for row in shown]


@pytest.mark.parametrize(
    ("name", "recipe", "epochs", "scale"),
    [
        *((name, "recipe.toml", 30, 1.0) for name in ("table1", "table3", "table5", "figure6", "figure7")),
        *((name, "recipe.toml", 20, 1.0) for name in ("table2", "figure8")),
        ("figure4", "short/recipe.toml", 30, 0.1),
        *((name, "short/wide.toml", 20, 0.25) for name in ("table4", "figure5")),
    ],
)
def test_the_recorded_runs_are_those_that_reproduce_would_make(
    name: str, recipe: str, epochs: int, scale: float
) -> None:
    instead, of_kind = read_instead(PAPER / recipe)
    request = Request(name, (PAPER / recipe).parent, epochs=epochs, scale=scale, instead=instead, of_kind=of_kind)
    assert [line.name for line in request.lines if not runs.there(request, line)] == []  # a cut would be measured
    planned = runs.planned_runs(request, request.lines)  # refuses a folder that holds a run with other keys
    assert [one.folder.name for one in planned if not compare.is_over(one)] == []


def test_the_results_for_fixed_copies_are_those_of_the_records() -> None:
    rows = recorded("figure4", SHORT)
    copies = ["-no-da", "-da1", "-da2", "-da4", "-da"]
    serial, al, replay, memory = (cells for _, *cells in first_table(PAPER / "README.md", "## Figure 4"))
    assert serial == [_cell(rows[f"serial{end}"]["value"]) for end in copies]
    parallel = [rows[f"al-k3{end}"] for end in ("", *copies[1:4])]
    assert al == [*(_cell(row["value"]) for row in parallel), ""]
    assert memory == [*(_cell(row["formula_gib"]) for row in parallel), ""]
    assert replay[-1] == _cell(rows["replay-k3"]["value"])


def test_the_results_for_the_wide_network_are_those_of_the_records() -> None:
    rows, shown_as = recorded("table2"), first_table(ROOT / "results/paper/README.md", "## Table 2")
    for row, (_, *cells) in zip(rows.values(), shown_as, strict=True):
        shown = [row[key] for key in ("value", "memory_gib", "speedup_measured", "speedup_projected")]
        if row["method"] == "serial":
            shown[2:] = [1, 1]
        numbers = (*shown, row["paper_value"], row["paper_speedup"])
        assert [cell or _cell(None) for cell in cells] == [_cell(n) for n in numbers]
    assert rows["replay-k3"]["value"] > rows["serial-da"]["value"] - 0.5


@pytest.mark.parametrize(("table", "out"), [("table2", PAPER), ("figure5", SHORT)])
def test_the_wide_networks_hybrids_stand_above_their_plain_rows(table: str, out: Path) -> None:
    values = {name: row["value"] for name, row in recorded(table, out).items()}
    for kind in ("al", "ds-al", "penalty", "ds-penalty"):
        hybrid = f"ds-sph-{kind[3:]}" if kind.startswith("ds-") else f"sph-{kind}"
        assert values[f"{hybrid}-k3-1to4"] > values[f"{kind}-k3"] + 2
    assert values["al-k3"] > values["penalty-k3"] - 0.5


@pytest.mark.parametrize("table", ["table1", "table2", "table3", "table5"])
def test_the_simulated_timeline_is_as_fast_as_the_projection_beside_it(table: str) -> None:
    """Of rows whose stages compute whole batches, of the timing that the timeline is drawn from."""
    shown = reproduction.read(ROOT / "results" / "paper" / table)
    timings = json.loads((ROOT / "results/paper/runs" / EXPERIMENTS[table].workload / "timings.json").read_text())
    for stages, times in shown.times.items():
        own = [Timing(**one) for key, one in timings["timings"].items() if key.startswith(f"al K={stages} r=1 ")]
        assert times.serial is not None
        assert length(play(times, "P")) == pytest.approx(own[0].serial_ms / own[0].projected)
    assert shown.hybrid.split(":")[0] == WORKLOADS[EXPERIMENTS[table].workload].hybrid


def test_the_results_on_tails_are_those_of_the_records() -> None:
    rows = first_table(ROOT / "results/tail/README.md", "\n")
    names = [f"{method}-{rate}" for method in ("penalty", "al") for rate in ("cosine", "hold", "low", "jump")]
    for name, (*_, before, first, last) in zip(names, rows, strict=True):
        lines = (ROOT / "results/tail/runs" / name / "records.jsonl").read_text().splitlines()
        values = [json.loads(line)["test_accuracy"] for line in lines]
        assert [before, first, last] == [f"{values[epoch]:.2f}" for epoch in (15, 16, 19)]


def test_the_results_on_the_detail_are_those_of_the_records() -> None:
    page = ROOT / "results/detail/README.md"
    kinds = [f"{rate}-{kind}" for rate in ("0.01", "0.003") for kind in ("default", "detail")]
    for method, (_, *cells) in zip(("penalty", "al"), first_table(page, "\n"), strict=True):
        kept = [page.parent / f"runs/{method}-{kind}/summary.json" for kind in kinds]
        assert cells == [f"{json.loads(path.read_text())['test_loss']:.4f}" for path in kept]


def test_the_results_on_the_adaptive_schedule_are_those_of_the_records() -> None:
    page = ROOT / "results/adaptive/README.md"
    schedules = ("parallel", "adaptive-0", "adaptive", "adaptive-0.2", "alternate-4-1")

    def measured(row: str) -> str:
        folders = sorted(page.parent.glob(f"runs/{row}-s?"))
        phases = [
            json.loads(line)["phase"] for at in folders for line in (at / "records.jsonl").read_text().splitlines()
        ]
        values = [json.loads((at / "summary.json").read_text())["test_accuracy"] for at in folders]
        if not values:
            return ""
        assert len(values) == 3
        return f"{mean(values):.1f} ± {stdev(values):.1f} ({phases.count('serial')})"

    kinds = ("penalty-order-joint", "penalty", "al")
    for kind, (_, *cells) in zip(kinds, first_table(page, "\n"), strict=True):
        assert cells == [measured(f"{kind}-schedule-{schedule}") for schedule in schedules]
    assert f"Serial training has {measured('serial').partition(' (')[0]}." in page.read_text(encoding="utf-8")


def test_the_results_for_the_vae_are_those_of_the_records() -> None:
    rows = list(recorded("table5").values())
    for row, (_, *cells) in zip(rows, first_table(ROOT / "results/paper/README.md", "## Table 5"), strict=True):
        serial, ours = row["method"] == "serial", row["ours"]
        more = "" if serial else f"{round(row['value'], 4) - round(rows[0]['value'], 4):+.4f}"
        times = [f"{row[key] or 1:.3g}" for key in ("speedup_measured", "speedup_projected")]
        quoted = ["" if ours else f"{row['paper_value']:.3f}", "" if serial or ours else f"{row['paper_speedup']:.2f}"]
        assert cells == [f"{row['value']:.4f}", more, *times, *quoted]


def test_hybrids_of_the_vae_are_near_serial_training_and_penalty_no_longer_swings() -> None:
    rows = recorded("table5")
    for method in ("penalty", "al"):
        assert rows[f"ds-sph-{method}-k3-1to4"]["value"] < rows["serial"]["value"] + 0.005

    def swing(run: str) -> float:
        lines = (PAPER / run / "records.jsonl").read_text().splitlines()
        losses = [json.loads(line)["test_loss"] for line in lines[-6:]]
        return max(abs(b - a) for a, b in pairwise(losses))

    assert swing("runs/mnist/penalty-k3-s0") < 0.001
    assert swing("before/vae-one-source-penalty-k3-s0") > 0.005


def test_the_results_on_the_reach_of_multipliers_are_those_of_the_records() -> None:
    names = ["wrn-{}", "resnet8-small-beta-{}", "resnet8-{}", "resnet14-{}-s0", "resnet14-{}-s1"]
    for name, (*_, without, held, before, after) in zip(
        names, first_table(ROOT / "results/reach/README.md", "## Stand-ins"), strict=True
    ):
        for kind, value, violation in (("without", without, before), ("with", held, after)):
            assert _reached(ROOT / "results/reach/runs" / name.format(kind)) == (value, violation)


def test_the_reach_holds_the_wide_network_and_the_results_are_those_of_the_records() -> None:
    names = {
        "al-k3-s0": "wrn-cosine-al-k3-s0",
        "ds-al-k3-s0": "wrn-cosine-ds-al-k3-s0",
        "sph-al-k3-1to4-s0": "wrn-hold-0.3-sph-al-k3-1to4-s0",
    }
    table = first_table(ROOT / "results/reach/README.md", "## WRN-40-10 itself")
    for (name, before), (*_, lost, value, wide, held) in zip(names.items(), table, strict=True):
        assert _reached(PAPER / "before" / before) == (lost.strip("*"), wide)
        assert _reached(PAPER / "runs/cifar100" / name) == (value.strip("*"), held)
        assert lost == "diverged"
        assert float(value.strip("*")) > 60


def _reached(folder: Path) -> tuple[str, str]:
    """How a run ended, and the largest violation of each interface in any epoch."""
    summary = json.loads((folder / "summary.json").read_text())
    seen = [json.loads(line)["violation"] for line in (folder / "records.jsonl").read_text().splitlines()]
    most = [max(epochs) for epochs in zip(*filter(None, seen), strict=True)]
    value = "diverged" if summary["status"] == "diverged" else f"{summary['test_accuracy']:.2f}"
    return value, ", ".join(f"{one:.2f}" for one in most)


def _cell(value: float | None) -> str:
    return "–" if value is None else "1" if value == 1 else f"{value:.2f}"


def test_every_page_is_in_the_readmes_list() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


@pytest.mark.parametrize("page", ["choosing.md", "negative.md", "idea.md"])
def test_flags_that_are_recommended_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    known = {flag(key.name) for key in fields(Recipe)} | {"seeds", "json"}
    assert set(re.findall(r"--([a-z][a-z-]*)", text)) <= known


def test_pictures_are_drawn_by_the_code(tmp_path: Path) -> None:
    script = tmp_path / "docs" / "pictures.py"
    script.parent.mkdir()
    script.write_text((ROOT / "docs" / "pictures.py").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
    drawn = sorted(path.name for path in (tmp_path / "docs" / "pictures").iterdir())
    assert drawn == sorted(path.name for path in (ROOT / "docs" / "pictures").iterdir())
    for name in drawn:
        texts = [_texts(folder / "docs" / "pictures" / name) for folder in (tmp_path, ROOT)]
        assert texts[0] == texts[1]
        assert texts[0]


def _texts(path: Path) -> list[str]:
    """What a picture says; its paths differ between versions of matplotlib."""
    content = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in content
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)', content))
    return [text.strip() for text in ElementTree.fromstring(content).itertext() if text.strip()][1:]
