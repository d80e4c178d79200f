"""The documentation: its links lead somewhere, its flags exist, and its pictures are those that the code draws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

import recorded
from parlay.recipe import Recipe, flag

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


def test_the_readmes_first_table_is_that_of_the_records() -> None:
    rows, cut = recorded.rows("table1"), on_a_third()
    for label, *cells in first_table(ROOT / "README.md", "\n"):
        row = rows[SHOWN[label]]
        keys = ("value", "speedup_measured", "speedup_projected", "memory_gib", "paper_value", "paper_speedup")
        value, measured, projected, memory, quoted, speedup = (row[key] for key in keys)
        if row["method"] == "serial":
            measured = share = projected = 1
        else:
            share = cut.get(row["method"]) if row["schedule"] in ("parallel", "adaptive") else None
        assert cells == [_cell(n) for n in (value, measured, share, projected, memory, quoted, speedup)]


def _cell(value: float | None) -> str:
    return "–" if value is None else "1" if value == 1 else f"{value:.2f}"


def test_every_page_is_in_the_readmes_list() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


@pytest.mark.parametrize("page", ["choosing.md", "idea.md"])
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
