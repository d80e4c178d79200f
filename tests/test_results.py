"""results/: its pages say what its records do, its records show what its pages claim, and it stays small."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import recorded
from parlay import compare
from parlay.report import reproduction
from parlay.report.simulate import length, play
from parlay.reproduce import runs
from parlay.reproduce.paper import EXPERIMENTS, WORKLOADS
from parlay.reproduce.request import Request, read_instead
from parlay.reproduce.speed import Timing
from recorded import RESULTS, ROOT

PAGES = sorted(RESULTS.rglob("README.md"))
MEGABYTES, FILES = 6, 150
PAPER = RESULTS / "paper"
HYBRIDS = ("sph-penalty", "sph-al", "ds-sph-penalty", "ds-sph-al")
RATIOS = ("1to4", "2to3", "3to2", "4to1")
HEADINGS = ("Question", "Answer", "Command", "Commit and hardware")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return recorded.module("pages")


def test_results_are_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "results"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    if not files:
        pytest.skip("no git checkout")
    largest = sorted(((path.stat().st_size, str(path.relative_to(ROOT))) for path in files), reverse=True)
    assert sum(size for size, _ in largest) < MEGABYTES * 1_000_000, largest[:10]
    assert len(files) < FILES, f"{len(files)} files"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(RESULTS)))
def test_a_page_says_what_the_records_do(page: Path, pages: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.made(text, page.parent.name if page.parent.parent == RESULTS else None) == text


def test_a_figure_or_a_table_changed_by_hand_is_found(pages: ModuleType) -> None:
    text = (RESULTS / "tail" / "README.md").read_text(encoding="utf-8")
    for old, new in (("64.67<!--", "64.68<!--"), ("| 62.83 |", "| 62.84 |")):
        assert old in text
        assert pages.made(text.replace(old, new), "tail") == text


@pytest.mark.parametrize(
    "name", ["paper", "streaming", "resnet20", "reach", "detail", "adaptive", "tail", "digits-hybrid"]
)
def test_a_page_has_question_answer_command_commit_and_hardware(name: str) -> None:
    text = (RESULTS / name / "README.md").read_text(encoding="utf-8")
    assert [word for word in HEADINGS if f"**{word}.**" not in text and f"## {word}" not in text] == []
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures
    assert sorted(pictures) == sorted(path.name for path in (RESULTS / name).glob("*.png"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(RESULTS)))
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


# The paper's tables


@pytest.mark.parametrize("stages", [2, 3])
def test_the_recorded_rows_stand_in_the_papers_order(stages: int) -> None:
    rows = recorded.rows("table1")

    def value(kind: str, method: str) -> float:
        ratio = "-1to4" if "sph" in kind else ""
        return float(rows[f"{kind}{method}-k{stages}{ratio}"]["value"])

    assert value("", "al") > value("", "penalty") - 0.5
    for method in ("al", "penalty"):
        assert value("ds-", method) > value("", method) - 1
        assert value("sph-", method) > value("", method) + 2
        assert value("ds-sph-", method) > value("ds-", method) + 2


def test_the_answer_to_the_paper_is_as_good_as_serial_training_and_faster_than_its_best_hybrid() -> None:
    found = recorded.figures("paper")
    assert found["table1-replay-k3-to-serial"] > -0.5
    assert found["table2-replay-k3-to-serial"] > -0.5
    assert found["table1-replay-k3-speedup-projected"] > found["table1-hybrids-speedup-paper-best"]


def test_memory_is_what_the_formula_says() -> None:
    rows = recorded.rows("table1").values()
    kept = [row for row in rows if row["memory_gib"] is not None and not row["ours"]]
    assert len(kept) == 16
    assert [row["memory_gib"] for row in kept] == pytest.approx([row["formula_gib"] for row in kept])


@pytest.mark.parametrize("table", ["table3", "table4"])
def test_more_serial_epochs_bring_more(table: str) -> None:
    rows = recorded.rows(table)
    for kind in HYBRIDS:
        values = [rows[f"{kind}-k3-{ratio}"]["value"] for ratio in RATIOS]
        assert values == sorted(values)


@pytest.mark.parametrize("table", ["table1", "table2", "table3", "table4", "table5"])
def test_only_rows_of_penalty_do_less_work_in_an_epoch_and_none_is_faster_than_its_stages_for_the_same_work(
    table: str,
) -> None:
    found = recorded.figures("paper")
    for name, row in recorded.rows(table).items():
        if row["method"] == "serial":
            continue
        for kind in ("measured", "projected"):
            epoch, sample = (found[f"{table}-{name}-{of}-{kind}"] for of in ("speedup", "per-sample"))
            assert sample < row["stages"]
            assert (sample < epoch) == (row["method"] == "penalty")
            assert epoch < row["stages"] or row["method"] == "penalty"


def test_a_stage_of_penalty_sees_half_of_the_samples_in_parallel_epochs() -> None:
    found = recorded.figures("paper")
    shares = {
        name: found[f"table1-{name}-per-sample-measured"] / found[f"table1-{name}-speedup-measured"]
        for name in ("penalty-k3", "sph-penalty-k3-1to4", "sph-al-k3-1to4")
    }
    # 30 epochs: a serial one first; with 1:4 one serial epoch after every four
    assert shares == pytest.approx({"penalty-k3": 15.5 / 30, "sph-penalty-k3-1to4": 18.5 / 30, "sph-al-k3-1to4": 1.0})


@pytest.mark.parametrize(
    ("name", "recipe", "epochs", "scale"),
    [
        # figure 6 has runs of table 5 alone, figure 7 of table 1, figure 8 of table 2, and table 4 of figure 5
        *((name, "recipe.toml", 30, 1.0) for name in ("table1", "table3", "table5")),
        ("table2", "recipe.toml", 20, 1.0),
        ("figure4", "short/recipe.toml", 30, 0.1),
        ("figure5", "short/wide.toml", 20, 0.25),
    ],
)
def test_the_recorded_runs_are_those_that_reproduce_would_make(
    name: str, recipe: str, epochs: int, scale: float
) -> None:
    instead, of_kind = read_instead(PAPER / recipe)
    out = (recorded.unpacked("paper") / recipe).parent
    request = Request(name, out, epochs=epochs, scale=scale, instead=instead, of_kind=of_kind)
    assert [line.name for line in request.lines if not runs.there(request, line)] == []  # a cut would be measured
    planned = runs.planned_runs(request, request.lines)  # refuses a folder that holds a run with other keys
    assert [one.folder.name for one in planned if not compare.is_over(one)] == []


@pytest.mark.parametrize("table", ["table2", "figure5"])
def test_the_wide_networks_hybrids_stand_above_their_plain_rows(table: str) -> None:
    values = {name: row["value"] for name, row in recorded.rows(table).items()}
    for kind in ("al", "ds-al", "penalty", "ds-penalty"):
        hybrid = f"ds-sph-{kind[3:]}" if kind.startswith("ds-") else f"sph-{kind}"
        assert values[f"{hybrid}-k3-1to4"] > values[f"{kind}-k3"] + 2
    assert values["al-k3"] > values["penalty-k3"] - 0.5


@pytest.mark.parametrize("table", ["table1", "table2", "table3", "table5"])
def test_the_simulated_timeline_is_as_fast_as_the_projection_beside_it(table: str) -> None:
    """Of rows whose stages compute whole batches, of the timing that the timeline is drawn from."""
    out = recorded.unpacked("paper")
    shown = reproduction.read(out / table)
    timings = json.loads((out / "runs" / EXPERIMENTS[table].workload / "timings.json").read_text())
    for stages, times in shown.times.items():
        own = [Timing(**one) for key, one in timings["timings"].items() if key.startswith(f"al K={stages} r=1 ")]
        assert times.serial is not None
        assert length(play(times, "P")) == pytest.approx(own[0].serial_ms / own[0].projected)
    assert shown.hybrid.split(":")[0] == WORKLOADS[EXPERIMENTS[table].workload].hybrid


def test_hybrids_of_the_vae_are_near_serial_training_and_penalty_no_longer_swings() -> None:
    rows, out = recorded.rows("table5"), recorded.unpacked("paper")
    for method in ("penalty", "al"):
        assert rows[f"ds-sph-{method}-k3-1to4"]["value"] < rows["serial"]["value"] + 0.005

    def swing(run: str) -> float:
        lines = (out / run / "records.jsonl").read_text().splitlines()
        losses = [json.loads(line)["test_loss"] for line in lines[-6:]]
        return max(abs(b - a) for a, b in pairwise(losses))

    assert swing("runs/mnist/penalty-k3-s0") < 0.001
    assert swing("before/vae-one-source-penalty-k3-s0") > 0.005


# The other pages


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
