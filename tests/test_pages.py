"""The pages that people read: short sentences, figures with a source, links and flags that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import parlay
from parlay import methods
from parlay.config.keys import flag
from parlay.config.recipe import KEYS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "results"))
import pages as made  # noqa: E402

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
RESULTS = [*sorted((ROOT / "results").rglob("README.md")), ROOT / "paper" / "results" / "README.md"]
PAGES = [README, *DOCS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *RESULTS]

MEASURED = re.compile(r"(?<![\w.:×/=])[−+-]?\d[\d,]*\.\d+(?![\w.])|(?<![\w.:])\d[\d,.]* ?(?:%|points|times|[GM]iB|ms)")
"""What looks like a measurement: a decimal, or a number with a unit."""
CONSTANTS = [
    r"Python 3\.\d+|PyTorch 2\.\d+",
    r"arXiv \d{4}\.\d{5}",
    r"momentum of 0\.9|rate of 0\.003|is at least 0\.1|at most 1\.5 times the last stage's",
    r"9\.12, 1\.44 and 0\.57 GB in table 1 mean 9\.16, 1\.14 and 0\.76",  # quoted: the paper's misprints
    r"is 0\.25 \(|It is 0\.3 where the kept maps|20 times and 8 times as long|up to N times",
]
"""Settings and quotations, which no record of ours holds."""


def prose(page: Path) -> str:
    """A page without its code, comments and link targets."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`\n]*`", "CODE", text)


def sentences(page: Path) -> list[str]:
    """Of paragraphs and lists; a line break ends a sentence only where a list item or an empty line follows."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |#|\||>))", prose(page)):
        if not block.lstrip().startswith(("|", "#")):
            found += re.split(r"(?<=[.!?:])[*_]*\s+", " ".join(block.split()))
    return [sentence for sentence in found if sentence]


def cells(page: Path) -> list[str]:
    lines = [line for line in prose(page).splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    return [cell.strip(" *") for line in lines for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_have_at_most_30_words_and_cells_no_clause(page: Path) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > 30]
    assert long == []
    clause = re.compile(r"; |\. |\b(?:which|that|because|where|when|but|if|while)\b")
    questions = [cell for cell in cells(page) if cell.endswith("?")]
    assert [
        cell for cell in cells(page) if cell not in questions and (clause.search(cell) or len(cell.split()) > 14)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_every_figure_names_its_record(page: Path) -> None:
    text = re.sub(r"```.*?```|^ {4}.*$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)  # made whole from records
    text = made.FIGURE.sub("", text)
    text = re.sub(r"<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    for constant in CONSTANTS:
        text = re.sub(constant, "", text)
    assert [line for line in text.splitlines() if MEASURED.search(line)] == []


def test_tables_and_figures_are_those_of_the_records() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "results" / "pages.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


def test_a_figure_changed_by_hand_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    assert made.made(text, None) == text
    number, source, name = made.FIGURE.findall(text)[0]
    wrong = number[:-1] + str((int(number[-1]) + 1) % 10)
    assert made.made(text.replace(number + source, wrong + source), None) == text  # on the page
    real = made.figures
    monkeypatch.setattr(made, "figures", lambda own: {**real(own), name: 1 + real(name.partition("/")[0])[name]})
    assert made.made(text, None) != text  # in the record


def test_a_figure_without_a_source_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for claim in ("Replay is 1.38 times as fast.", "It has 90 % here.", "It loses 3 points.", "| al | 87.1 |"):
        page.write_text(claim)
        with pytest.raises(AssertionError):
            test_every_figure_names_its_record(page)


QUESTIONS = {
    "What does Parlay do?": "idea.md",
    "When should I use Parlay?": "choosing.md",
    "What does it cost in accuracy?": "choosing.md",
    "How do I run it on my model?": "own_model.md",
    "How do I run it on two machines?": "running.md",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_strangers_question_is_answered_in_the_first_ten_lines_of_a_page(question: str) -> None:
    lines = (ROOT / "docs" / QUESTIONS[question]).read_text(encoding="utf-8").splitlines()[:10]
    asked = next(line for line in lines if question in line)
    assert len(asked.partition(question)[2].split()) >= 5  # the answer begins on the same line


def test_the_readme_takes_a_minute_to_read_aloud_down_to_its_python() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    spoken = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text.partition("```python")[0])
    words = [word for word in re.split(r"[\s|]+", spoken) if re.search(r"\w", word)]
    assert len(words) <= 180  # three words a second


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "own_model.md"], ids=lambda page: page.name)
def test_the_first_program_of_a_page_runs(page: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) <= 8
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)]
    data = torch.randn(24, 4), torch.randint(3, (24,))
    names = {"parlay": parlay, "nn": nn, "blocks": blocks, "model": nn.Sequential(*blocks), "images": data[0][:8]}
    exec(code.replace("epochs=30", "epochs=2"), names | {"train_set": data, "test_set": data})


def test_the_readme_links_every_page_and_names_no_package_of_others() -> None:
    readme = README.read_text(encoding="utf-8")
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in readme] == []
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [text for text in texts if re.search(r"pip install '?parlay(?![-_]train)", text)] == []


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_flags_that_are_written_exist(page: Path) -> None:
    text = re.sub(r"torchrun.*?-m parlay", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"#SBATCH.*|`--signal.*?`|srun.*|python results/.*", "", text)
    known = {flag(name) for name in (*(key.name for key in KEYS), *methods.every_option())}
    known |= {"seeds", "json", "out", "resume", "methods", "recipe", "data-dir", "max-restarts", "port", "epochs"}
    known |= {"report"}
    known |= {"at-once", "queue", "rows", "scale", "minutes", "nnodes", "node-rank", "nproc-per-node", "check"}
    known |= {"help", "help-all"}
    assert set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text)) <= known


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
