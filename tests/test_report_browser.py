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
from test_report import everything

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
  const tables = [...document.querySelectorAll("table")].map(table =>
    [...table.tHead.querySelectorAll("th")].map((head, column) => {
      const title = head.textContent;
      head.querySelector("button").click(); const up = texts(table, column);
      head.querySelector("button").click(); const down = texts(table, column);
      return {title, up, down, marks: table.querySelectorAll("[aria-sort]").length};
    }));
  const found = {
    wrong, tables,
    asked: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
    charts: [...document.querySelectorAll("svg.chart")].map(size),
    paper: getComputedStyle(document.documentElement).backgroundColor,
    width: [document.documentElement.scrollWidth, innerWidth],
    opened: [...document.querySelectorAll("details")].map(d => { d.querySelector("summary").click(); return d.open; }),
  };
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


def opened(folder: Path, *flags: str) -> dict[str, Any]:
    """What a page of everything is like once it has been opened, and its tables and details clicked through."""
    assert CHROMIUM is not None, "no chromium is installed"
    page = folder / "page.html"
    report(everything(folder), page)
    text = page.read_text(encoding="utf-8").replace("<title>", BEFORE + "<title>", 1)
    page.write_text(text.replace("</body>", AFTER + "</body>"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS.split(), *flags, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'<script type="application/json" id="found">(.*?)</script>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    content: dict[str, Any] = json.loads(unescape(found[1]))
    assert content["wrong"] == content["asked"] == []
    return content


def brightness(page: dict[str, Any]) -> int:
    return sum(map(int, re.findall(r"\d+", page["paper"])[:3]))


def test_on_a_desktop_everything_is_drawn_sorts_and_opens(tmp_path: Path) -> None:
    page = opened(tmp_path, "--window-size=1200,900", "--blink-settings=preferredColorScheme=1")
    assert brightness(page) > 700
    assert len(page["charts"]) == 7
    assert all(width > 100 and height > 40 for width, height in page["charts"])
    assert set(page["opened"]) == {True}
    assert len(page["tables"]) == 3  # the comparison, the bench, what differs
    for column in (column for table in page["tables"] for column in table):
        assert column["marks"] == 1
        known = [text for text in column["up"] if text != "–"]
        assert known == column["up"][: len(known)]  # what is not known stays at the end, either way
        assert [text for text in column["down"] if text != "–"] == column["down"][: len(known)]
        assert sorted(column["up"]) == sorted(column["down"])
    accuracy = next(column for column in page["tables"][0] if column["title"] == "test accuracy, %")
    assert (accuracy["up"], accuracy["down"]) == (["81.00", "82.00", "83.00", "–"], ["83.00", "82.00", "81.00", "–"])


@pytest.mark.slow
def test_on_a_dark_phone_it_is_dark_and_not_wider_than_the_screen(tmp_path: Path) -> None:
    page = opened(tmp_path, "--window-size=390,844", "--blink-settings=preferredColorScheme=0")
    wide, screen = page["width"]
    assert wide <= screen
    assert brightness(page) < 150
