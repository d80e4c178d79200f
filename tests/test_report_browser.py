"""The page in a browser: it opens without a word on the console, asks nobody for anything, and its tables sort."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from parlay.report import report
from test_report_inputs import everything

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CI = os.environ.get("CI") == "true"  # there a missing browser is a failure
pytestmark = pytest.mark.skipif(CHROMIUM is None and not CI, reason="no chromium is installed")

FLAGS = """--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update
--disable-sync --no-first-run --hide-scrollbars --enable-logging=stderr --v=0 --virtual-time-budget=5000 --dump-dom"""

# before anything else on the page: whatever is refused by its own policy, and whatever goes wrong
BEFORE = """<script>
const wrong = [];
addEventListener("securitypolicyviolation", event => wrong.push(event.blockedURI));
addEventListener("error", event => wrong.push(String(event.message || event.target.src)), true);
</script>"""

AFTER = """<script>
addEventListener("load", () => {
  const size = element => { const box = element.getBoundingClientRect(); return [box.width, box.height]; };
  const texts = (table, column) => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
  const tables = [...document.querySelectorAll("table.sortable")].map(table =>
    [...table.tHead.querySelectorAll("th")].map((head, column) => {
      const title = head.textContent;
      head.querySelector("button").click(); const up = texts(table, column);
      head.querySelector("button").click(); const down = texts(table, column);
      return {title, up, down, marks: table.querySelectorAll("[aria-sort]").length};
    }));
  const found = {
    wrong, tables,
    asked: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
    charts: [...document.querySelectorAll("svg.chart")].filter(c => !c.closest("details")).map(size),
    paper: getComputedStyle(document.documentElement).backgroundColor,
    width: [document.documentElement.scrollWidth, innerWidth],
    opened: [...document.querySelectorAll("details")].map(d => { d.querySelector("summary").click(); return d.open; }),
  };
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


def opened(page: Path, *flags: str) -> dict[str, Any]:
    """What the page is like once it has been opened, and its tables and details clicked through."""
    assert CHROMIUM is not None, "no chromium is installed"
    text = page.read_text(encoding="utf-8").replace("<title>", BEFORE + "<title>", 1)
    page.write_text(text.replace("</body>", AFTER + "</body>"), encoding="utf-8")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, *FLAGS.split(), *flags, profile, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'<script type="application/json" id="found">(.*?)</script>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    content: dict[str, Any] = json.loads(unescape(found[1]))
    return content


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a page can show, and the page of a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    report(everything(folder), folder / "all.html")
    report([everything(folder / "again")[0]], folder / "compared.html")
    return folder


@pytest.fixture(scope="module")
def desktop(pages: Path) -> dict[str, Any]:
    return opened(pages / "all.html", "--window-size=1200,900", "--blink-settings=preferredColorScheme=1")


def test_it_opens_without_errors_and_asks_nobody_for_anything(desktop: dict[str, Any]) -> None:
    assert desktop["wrong"] == []
    assert desktop["asked"] == []


def test_pictures_have_sizes(desktop: dict[str, Any]) -> None:
    assert len(desktop["charts"]) >= 8
    assert all(width > 100 and height > 40 for width, height in desktop["charts"])


def test_every_column_of_every_table_sorts_up_and_down(desktop: dict[str, Any]) -> None:
    assert len(desktop["tables"]) == 2
    for table in desktop["tables"]:
        for column in table:
            assert column["marks"] == 1
            known = [text for text in column["up"] if text != "–"]
            assert known == column["up"][: len(known)]  # what is not known stays at the end, either way
            assert [text for text in column["down"] if text != "–"] == column["down"][: len(known)]
            assert sorted(column["up"]) == sorted(column["down"])
    accuracy = next(column for column in desktop["tables"][1] if column["title"] == "test accuracy, %")
    assert accuracy["up"] == ["81.00", "82.00", "83.00"]
    assert accuracy["down"] == accuracy["up"][::-1]


def test_details_open(desktop: dict[str, Any]) -> None:
    assert desktop["opened"]
    assert all(desktop["opened"])


def test_on_a_dark_phone_it_is_dark_and_not_wider_than_the_screen(pages: Path, desktop: dict[str, Any]) -> None:
    phone = opened(pages / "compared.html", "--window-size=390,844", "--blink-settings=preferredColorScheme=0")
    assert phone["wrong"] == phone["asked"] == []
    wide, screen = phone["width"]
    assert wide <= screen
    assert sum(map(int, re.findall(r"\d+", phone["paper"])[:3])) < 150
    assert sum(map(int, re.findall(r"\d+", desktop["paper"])[:3])) > 700
