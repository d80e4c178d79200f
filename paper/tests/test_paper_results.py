"""What paper/results shows: the rows stand in the paper's order, and the recorded runs are those of the commands."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

import recorded
from parlay import compare
from parlay_paper import page, runs
from parlay_paper.request import Request, read_instead
from parlay_paper.speed import Timing
from parlay_paper.tables import EXPERIMENTS
from parlay_paper.timelines import length, play
from recorded import ROOT

PAPER = ROOT / "paper" / "results"
HYBRIDS = ("sph-penalty", "sph-al", "ds-sph-penalty", "ds-sph-al")
RATIOS = ("1to4", "2to3", "3to2", "4to1")


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
        pytest.param("table2", "recipe.toml", 20, 1.0, marks=pytest.mark.slow),
        ("figure4", "short/recipe.toml", 30, 0.1),
        pytest.param("figure5", "short/wide.toml", 20, 0.25, marks=pytest.mark.slow),
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
    shown = json.loads((out / table / "reproduction.json").read_text())
    timings = json.loads((out / "runs" / EXPERIMENTS[table].workload / "timings.json").read_text())
    for stages in shown["stage_ms"]:
        times = page.times_of(shown, stages)
        own = [Timing(**one) for key, one in timings["timings"].items() if key.startswith(f"al K={stages} r=1 ")]
        assert times.serial is not None
        assert length(play(times, "P")) == pytest.approx(own[0].serial_ms / own[0].projected)


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


@pytest.mark.parametrize("table", ["table1", "figure7", "short/figure5"])
def test_a_recorded_table_makes_its_section(table: str) -> None:
    found = page.read(recorded.unpacked("paper") / table)
    assert "per sample trained" in found.markdown or table == "figure7"
    assert all(folder.is_dir() for folder in found.folders)
