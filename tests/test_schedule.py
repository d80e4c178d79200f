"""Schedules print, parse, and give one letter per epoch; a wrong one is answered with the nearest right form."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay.config.schedule import LOSS_RATIO, Schedule, adapted, healthy
from parlay.engine.probe import cosines
from parlay.errors import InputError
from runs import SMALL, kept, listen, parlay, records, resume, train

# epochs:  1   2    3     4      5       6        7         8          9           10           11            12
TABLE = {
    "parallel": "S SP SPP SPPP SPPPP SPPPPP SPPPPPP SPPPPPPP SPPPPPPPP SPPPPPPPPP SPPPPPPPPPP SPPPPPPPPPPP",
    "serial": "S SS SSS SSSS SSSSS SSSSSS SSSSSSS SSSSSSSS SSSSSSSSS SSSSSSSSSS SSSSSSSSSSS SSSSSSSSSSSS",
    "alternate:4:1": "S SP SPP SPPP SPPPS SPPPSP SPPPSPP SPPPSPPP SPPPSPPPP SPPPSPPPPS SPPPSPPPPSP SPPPSPPPPSPP",
    "alternate:2:3": "S SP SPS SPSS SPSSS SPSSSP SPSSSPP SPSSSPPS SPSSSPPSS SPSSSPPSSS SPSSSPPSSSP SPSSSPPSSSPP",
    "alternate:1:1": "S SS SSP SSPS SSPSP SSPSPS SSPSPSP SSPSPSPS SSPSPSPSP SSPSPSPSPS SSPSPSPSPSP SSPSPSPSPSPS",
    "tail:4:1": "S SP SPS SPPS SPPPS SPPPPS SPPPPPS SPPPPPSS SPPPPPPSS SPPPPPPPSS SPPPPPPPPSS SPPPPPPPPPSS",
    "adaptive": "S SP SPP SPPP SPPPP SPPPPP SPPPPPP SPPPPPPP SPPPPPPPP SPPPPPPPPP SPPPPPPPPPP SPPPPPPPPPPP",
    "tail:2:3": "S SS SSS SPSS SPSSS SPSSSS SPPSSSS SPPSSSSS SPPPSSSSS SPPPSSSSSS SPPPSSSSSSS SPPPPSSSSSSS",
}


@pytest.mark.parametrize("text", TABLE)
def test_a_schedule_gives_these_phases(text: str) -> None:
    assert [Schedule.parse(text).phases(epochs) for epochs in range(1, 13)] == TABLE[text].split()


@pytest.mark.parametrize("text", [*TABLE, "alternate:10:25", "adaptive:0.25", "adaptive:-1"])
def test_a_schedule_prints_as_it_was_written(text: str) -> None:
    assert str(Schedule.parse(text)) == text
    assert Schedule.parse(str(Schedule.parse(text))) == Schedule.parse(text)


def test_a_schedule_is_its_kind_and_its_numbers() -> None:
    assert Schedule.parse("alternate:4:1") == Schedule("alternate", 4, 1)
    assert Schedule.parse("adaptive") == Schedule("adaptive") == Schedule.parse("adaptive:0.1")
    assert Schedule.parse("adaptive:0.2") == Schedule("adaptive", threshold=0.2)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("paralell", "parallel"),
        ("alternating:4:1", "alternate:4:1"),
        ("alternate", "alternate:4:1"),
        ("tail:4:1:2", "tail:4:1"),
        ("serial:1", "serial"),
        ("alternate:0:1", "alternate:4:1"),
        ("alternate:4:-1", "alternate:4:1"),
        ("tail:4:0.5", "tail:4:1"),
        ("tail:4:", "tail:4:1"),
        ("adaptive:", "adaptive, or .* as in adaptive:0.2"),
        ("adaptive:2", "adaptive, or .* as in adaptive:0.2"),
        ("adaptive:nan", "adaptive, or .* as in adaptive:0.2"),
        ("adaptive:0.1:1", "adaptive, or .* as in adaptive:0.2"),
        ("", ".*"),
        ("4:1", ".*"),
    ],
)
def test_a_wrong_schedule_is_answered_with_the_nearest_form(text: str, right: str) -> None:
    with pytest.raises(InputError, match=f"schedule '{text}'.*: write {right}$"):
        Schedule.parse(text)


# What an adaptive run does where these epochs, from 0, do not go well.
ADAPTED: dict[str, tuple[int, ...]] = {
    "SPPPPPPP": (),
    "SPPSPPPP": (2,),
    "SPSPPPPP": (1, 2),  # serial epochs are not judged
    "SPSPSPSP": (1, 3, 5, 7),
    "SPPPPPPS": (6,),
    "SPPSPPSP": (2, 5, 7),
}


@pytest.mark.parametrize(("phases", "bad"), ADAPTED.items())
def test_a_serial_epoch_follows_each_parallel_one_that_did_not_go_well(phases: str, bad: tuple[int, ...]) -> None:
    found = Schedule.parse("adaptive").phases(len(phases))
    for epoch in range(len(phases)):
        found = adapted(found, epoch, epoch not in bad)
        assert len(found) == len(phases)
    assert found == phases


def test_health_is_a_loss_that_fits_and_a_gradient_that_points_the_right_way() -> None:
    at_most = LOSS_RATIO
    for train_loss, own_loss, cosine in [(1.0, 1.0, None), (at_most, 1.0, None), (0.4, 0.5, 0.2)]:
        assert healthy(train_loss, own_loss, cosine, threshold=0.2)
    for train_loss, cosine in [(at_most + 0.01, None), (at_most + 0.01, 1.0), (1.0, 0.19), (1.0, math.nan)]:
        assert not healthy(train_loss, 1.0, cosine, threshold=0.2)
    assert not any(healthy(loss, 1.0, 1.0, threshold=0.2) for loss in (math.nan, math.inf))


def test_cosines_are_those_of_all_weights_and_of_each_stage() -> None:
    def stage(*values: float) -> dict[str, Tensor]:
        return {"weight": torch.tensor(values)}

    same, turned, none = stage(3.0, 4.0), stage(-4.0, 3.0), stage(0.0, 0.0)
    assert cosines([same, same], [same, turned]) == pytest.approx([0.5, 1, 0])
    assert cosines([same, none], [same, same]) == pytest.approx([0.5**0.5, 1, 0])
    assert cosines([none], [none]) == [0, 0]
    more = {**same, "bias": torch.tensor([12.0])}
    assert cosines([more], [same]) == pytest.approx([5 / 13, 5 / 13])


def phases(out: Path) -> str:
    return "".join(row["phase"][0] for row in records(out))


ADAPTIVE = ("--epochs", 6, "--stages", 2, "--schedule")


def test_probing_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path / "probed", *ADAPTIVE, "adaptive:-1")
    train(tmp_path / "plain", *ADAPTIVE, "parallel")
    added = ("cosine", "stage_cosines", "healthy")
    assert phases(tmp_path / "plain") == "sppppp"
    assert records(tmp_path / "probed", *added) == records(tmp_path / "plain")
    for row in records(tmp_path / "probed"):
        assert (row["cosine"] is None) is (row["phase"] == "serial")
        assert row["cosine"] is None or (-1 <= row["cosine"] <= 1 and len(row["stage_cosines"]) == 2)


def test_an_adaptive_run_does_what_its_records_say(tmp_path: Path) -> None:
    train(tmp_path / "run", *ADAPTIVE, "adaptive:0.65", "--method", "al")
    rows, expected = records(tmp_path / "run"), "SPPPPP"
    for row in rows:
        assert expected[row["epoch"]] == row["phase"][0].upper()
        if row["phase"] == "parallel":
            assert row["healthy"] is healthy(row["train_loss"], row["losses"][-1], row["cosine"], 0.65)
            expected = adapted(expected, row["epoch"], row["healthy"])
    assert "S" in expected[2:]


@pytest.mark.parametrize("method", ["al", pytest.param("replay", marks=pytest.mark.slow)])
def test_a_resumed_adaptive_run_decides_as_it_would_have(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = (*ADAPTIVE, "adaptive:0.65", "--method", method)
    if method == "replay":  # it is judged by its losses alone
        monkeypatch.setattr("parlay.config.schedule.LOSS_RATIO", 0.86)
    train(whole, *words)
    assert "s" in phases(whole)[2:]
    for stop in (5, 4, 6):  # in the midst of an epoch, at its end, in another phase
        with monkeypatch.context() as patch:
            listen(patch, stop)
            assert (train(cut, *words) if not cut.exists() else resume(cut)) == 1
    assert resume(cut) == 0
    without = "violation_at_entry"  # of states that a checkpoint between two phases does not keep
    assert records(cut, without) == records(whole, without)
    assert all(torch.equal(value, kept(cut)[name]) for name, value in kept(whole).items())


def test_weights_that_stand_still_get_the_true_gradient(tmp_path: Path) -> None:
    """The signal crosses one interface per epoch; then every stage's gradient is backpropagation's."""
    still = ("--epochs", 4, "--lr", 1e-12, "--batch-size", 96, "--schedule", "adaptive")
    train(tmp_path / "run", "--stages", 3, *still)
    rows = [row["stage_cosines"] for row in records(tmp_path / "run")]
    assert all(cosine == pytest.approx(1, abs=1e-4) for row in rows[2:] for cosine in row)
    assert min(rows[1]) < 0.9


def test_one_stage_is_serial_training_whatever_the_schedule(tmp_path: Path) -> None:
    train(tmp_path / "one", "--epochs", 3, "--stages", 1, "--schedule", "adaptive")
    assert phases(tmp_path / "one") == "spp"
    assert [row["cosine"] for row in records(tmp_path / "one")] == [None] * 3


def test_a_plan_of_an_adaptive_run_expects_all_to_go_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert parlay("plan", *SMALL, "--schedule", "adaptive", "--epochs", 4, "--json") == 0
    assert '"phases": "SPPP"' in capsys.readouterr().out
