"""results/: its pages say what its records do, its records show what its pages claim, and it stays small."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import recorded
from recorded import RESULTS, ROOT

PAPER = ROOT / "paper" / "results"
PAGES = [*sorted(RESULTS.rglob("README.md")), PAPER / "README.md"]
MEGABYTES, FILES = 6, 150
HEADINGS = ("Question", "Answer", "Command", "Commit and hardware")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return recorded.module("pages")


def test_results_are_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "results", "paper/results"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    if not files:
        pytest.skip("no git checkout")
    largest = sorted(((path.stat().st_size, str(path.relative_to(ROOT))) for path in files), reverse=True)
    assert sum(size for size, _ in largest) < MEGABYTES * 1_000_000, largest[:10]
    assert len(files) < FILES, f"{len(files)} files"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_a_page_says_what_the_records_do(page: Path, pages: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.made(text, pages.owner(page)) == text


def test_a_figure_or_a_table_changed_by_hand_is_found(pages: ModuleType) -> None:
    text = (RESULTS / "tail" / "README.md").read_text(encoding="utf-8")
    for old, new in (("64.67<!--", "64.68<!--"), ("| 62.83 |", "| 62.84 |")):
        assert old in text
        assert pages.made(text.replace(old, new), "tail") == text


@pytest.mark.parametrize(
    "name", ["paper", "streaming", "resnet20", "reach", "detail", "adaptive", "tail", "digits-hybrid"]
)
def test_a_page_has_question_answer_command_commit_and_hardware(name: str) -> None:
    folder = recorded.module("records").folder_of(name)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert [word for word in HEADINGS if f"**{word}.**" not in text and f"## {word}" not in text] == []
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures
    assert sorted(pictures) == sorted(path.name for path in folder.glob("*.png"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


def test_every_folder_is_in_the_list_of_questions() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [
        page.parent.name for page in RESULTS.glob("*/README.md") if f"({page.parent.name}/README.md)" not in text
    ] == []


def test_the_same_runs_are_packed_into_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = recorded.module("records")
    source = recorded.unpacked("tail")
    (tmp_path / "tail").mkdir()
    monkeypatch.setattr(records, "HERE", tmp_path)
    records.pack("tail", source)
    assert (tmp_path / "tail" / "runs.tar.xz").read_bytes() == (RESULTS / "tail" / "runs.tar.xz").read_bytes()


@pytest.mark.parametrize("experiment", ["resnet20", "streaming", "digits-hybrid"])
def test_recorded_runs_have_the_flags_of_their_rows(experiment: str, pages: ModuleType) -> None:
    page = pages.experiment(experiment)

    def kept(folder: Path) -> dict[str, str]:
        return {key: str(value) for key, value in tomllib.loads((folder / "recipe.toml").read_text()).items()}

    for name, (flags, seeds) in page.RUNS.items():
        words = [word.removeprefix("--") for word in shlex.split(f"{page.COMMON} {flags}")]
        asked = dict(zip(words[::2], words[1::2], strict=True))
        if asked["method"] == "serial":  # serial training is not cut, whatever is asked for
            asked |= {"stages": "1", "schedule": "serial"}
        for seed in seeds:
            have = kept(recorded.unpacked(experiment) / f"{name}-s{seed}")
            if "detail" in asked:  # versions before the key had none of that term, and then all of it
                have.setdefault("detail", asked["detail"])
            wanted = asked | {"seed": str(seed)}
            other = {key: have.get(key) for key, value in wanted.items() if not same(value, have.get(key))}
            assert not other, f"{name}-s{seed}: {other}"


def same(asked: str, kept: str | None) -> bool:
    try:
        return float(asked) == float(kept or "nan")
    except ValueError:
        return asked == kept


def test_replay_is_as_good_as_serial_training() -> None:
    found = recorded.figures("streaming")
    wanted = {
        "resnet20-replay-k2": -0.3,
        "resnet20-replay-k3": -0.3,
        "resnet20-replay-k6": -1,
        "resnet110-replay-k3": -0.5,
    }
    assert [
        name for name, least in wanted.items() if found[f"{name}-to-serial"] < least or found[f"{name}-seeds"] < 3
    ] == []


def test_the_reach_of_multipliers_holds_the_wide_network() -> None:
    found = recorded.figures("reach")
    for row in ("al", "ds-al", "sph-al"):
        assert f"wide-{row}-without" not in found  # it diverged
        assert found[f"wide-{row}-with"] > 60
        assert max(found[f"wide-{row}-with-violation-{k}"] for k in (1, 2)) < 0.4


def test_a_rate_that_is_held_until_the_tail_is_better_than_a_cosine() -> None:
    found = recorded.figures("tail")
    assert min(found[f"{method}-hold-to-cosine"] for method in ("penalty", "al")) > 4


def test_the_adaptive_schedule_repairs_the_joint_penalty() -> None:
    found = recorded.figures("adaptive")
    assert found["penalty-order-joint-adaptive"] > found["penalty-order-joint-parallel"] + 4
    assert found["penalty-order-joint-adaptive"] > found["serial"] - 0.5
