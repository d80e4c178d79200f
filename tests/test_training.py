"""What a run leaves behind: a record per epoch, a summary, and a model that plain PyTorch loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Local, Method, Replay, data
from parlay.data.augment import Augmentation, Changes
from parlay.run import scores
from parlay.run.progress import Silent
from runs import SAMPLES, records, summary, train
from runs import parlay as parlay_command

SUMMARY = {
    *("status", "method", "model", "dataset", "stages", "cuts", "schedule", "downsample", "epochs", "parameters"),
    *("test_samples", "test_accuracy", "test_loss", "auxiliary_bytes", "seconds", "violation", "environment"),
}
RECORD = {
    *("epoch", "phase", "losses", "train_loss", "test_loss", "test_accuracy", "violation"),
    *("seconds", "refresh_seconds", "learning_rate", "beta", "violation_at_entry"),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid")
    assert train(out, "--epochs", 4, "--schedule", "alternate:2:1") == 0
    return out


def test_every_epoch_has_its_record_with_all_its_keys(hybrid: Path) -> None:
    rows = records(hybrid)
    assert all({*row, "seconds", "refresh_seconds"} == RECORD for row in rows)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert [row["phase"] for row in rows] == ["serial", "parallel", "serial", "parallel"]
    assert [len(row["losses"]) for row in rows] == [1, 3, 1, 3]
    assert [row["beta"] for row in rows] == [None, 3.0, None, 3.0]
    assert (rows[0]["violation"], len(rows[1]["violation"])) == (None, 2)
    assert all(v > 0 for v in rows[1]["violation"])
    # after a serial phase the records say how far the states had drifted
    assert [row["violation_at_entry"] is not None for row in rows] == [False, False, False, True]
    rates = [row["learning_rate"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_the_summary_has_every_key_of_the_contract(hybrid: Path) -> None:
    told, rows = summary(hybrid), records(hybrid)
    assert set(told) >= SUMMARY
    assert (told["status"], told["method"], told["model"], told["dataset"]) == (
        *("finished", "al", "resnet8", "synthetic"),
    )
    assert (told["stages"], told["cuts"], told["schedule"], told["downsample"]) == (3, [2, 3], "alternate:2:1", 1)
    assert (told["epochs"], told["test_samples"]) == (4, SAMPLES // 4)
    assert told["test_accuracy"] == rows[-1]["test_accuracy"]
    assert told["violation"] == rows[-1]["violation"]
    assert told["parameters"] == sum(w.numel() for w in parlay.build_model("resnet8", (1, 8, 8), 10).parameters())
    assert set(told["seconds"]) == {"total", "serial_epoch", "parallel_epoch"}
    assert told["seconds"]["total"] > told["seconds"]["parallel_epoch"] > 0
    assert told["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize("method", ["al", "replay", "serial"])
def test_judging_less_often_changes_nothing_but_what_is_written_down(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method", method, "--epochs", 4, "--schedule", "parallel", "--judge-every")
    for every, folder in enumerate(("always", "seldom"), 1):
        assert train(tmp_path / folder, *words, every) == 0
    always, seldom = records(tmp_path / "always"), records(tmp_path / "seldom")
    assert [row["train_loss"] is None for row in seldom] == [True, False, True, False]  # the last one always
    for one, other in zip(always, seldom, strict=True):
        assert {**one, **(scores.UNASKED if other["train_loss"] is None else {})} == other
    ends = [load_file(tmp_path / folder / "model.safetensors") for folder in ("always", "seldom")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    told = [line for line in capsys.readouterr().err.splitlines() if "epoch 3 of 4" in line]
    assert [("train loss" in line) for line in told] == [True, False]


def test_an_adaptive_schedule_judges_every_epoch_and_judging_never_is_refused(tmp_path: Path) -> None:
    assert train(tmp_path, "--schedule", "adaptive", "--epochs", 3, "--judge-every", 3) == 0
    assert all(row["train_loss"] is not None for row in records(tmp_path))
    assert parlay_command("train", "--judge-every", 0) == 2


def test_batch_statistics_are_of_all_kinds_of_samples_where_those_stand_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the two sources of MNIST do: every fourth of these samples would be of one kind."""
    monkeypatch.setattr(scores, "JUDGED", 64)
    kinds = 10 * (torch.arange(256) % 2).float() - 5
    inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)) + kinds[:, None]
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    trainer = problems.trainer(parlay.partition(model, 2, inputs[:2]), schedule="parallel", batch_size=16)
    norm: Any = trainer.fit((inputs, (kinds > 0).long()), epochs=2).model[0]
    assert norm.running_mean.abs().max() < 2  # 5 with a single kind
    assert norm.running_var.min() > 15  # 26 with both, 1 with one


@pytest.mark.parametrize(
    ("words", "bytes_per_element"),
    [
        ("--method al", 2 * 4),
        ("--method al --store-dtype bfloat16 --downsample 2", 2 * 2 / 4),
        ("--method penalty --store file", 4),
        ("--method serial", 0),
    ],
)
def test_the_bytes_of_the_stores_are_those_of_the_formula(words: str, bytes_per_element: float, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 2, *words.split()) == 0
    elements = 16 * 8 * 8 + 32 * 4 * 4  # behind the first and the second group of resnet8 on 8 x 8 images
    told = summary(tmp_path)
    assert told["auxiliary_bytes"] == SAMPLES * elements * bytes_per_element
    assert (told["stages"] == 1) == (told["violation"] == told["cuts"] == []) == (bytes_per_element == 0)
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize("words", ["--method penalty --schedule parallel", "--method al --schedule tail:1:1"])
def test_the_model_file_loads_by_plain_pytorch_and_has_the_reported_accuracy(words: str, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 4, *words.split()) == 0
    model = parlay.build_model("resnet8", (1, 8, 8), 10).eval()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    synthetic = data.Synthetic((1, 8, 8), 10, SAMPLES, SAMPLES // 4)
    facts, test = data.facts("synthetic", synthetic), data.load("synthetic", synthetic=synthetic).test
    with torch.no_grad():
        output: Tensor = model(data.normalise(test.inputs, facts.mean, facts.std))
    correct = int((output.argmax(1) == test.targets).sum())
    assert correct / len(test) == pytest.approx(summary(tmp_path)["test_accuracy"] / 100, abs=1e-6)


def test_an_auto_encoder_is_judged_by_its_loss_and_has_no_accuracy(tmp_path: Path) -> None:
    assert train(tmp_path, "--model", "resnet8-vae", "--epochs", 2, "--lr", 0.01) == 0
    told = summary(tmp_path)
    assert told["test_accuracy"] is None
    assert told["test_loss"] > 0


@pytest.mark.parametrize("words", ["--downsample 2 --synthetic-shape 3,7,5", "--downsample 4 --augment 2"])
def test_odd_shapes_and_fixed_copies_train_to_the_end(words: str, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 2, *words.split()) == 0
    assert summary(tmp_path)["status"] == "finished"


class Brighter(Augmentation):
    """Every image, by 1."""

    def draw(self, count: int, generator: torch.Generator) -> Changes:  # noqa: ARG002
        return {"by": torch.ones(count, dtype=torch.int64)}

    def apply(self, images: Tensor, changes: Changes) -> Tensor:
        return images + changes["by"].view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("method", "schedule", "brighter"),
    [
        (AugmentedLagrangian(), "parallel", 0.0),  # states of augmented images would be of no use: it has seen none
        (AugmentedLagrangian(), "alternate:1:1", 0.0),  # a single serial epoch is too short
        (AugmentedLagrangian(), "tail:1:1", 1.0),  # its last two were serial
        (Replay(), "parallel", 1.0),
        (Local(), "parallel", 1.0),
    ],
)
def test_the_statistics_of_the_model_are_those_of_images_as_training_has_seen_them(
    method: Method, schedule: str, brighter: float
) -> None:
    torch.manual_seed(0)
    images, targets = torch.randn(40, *problems.IMAGE), torch.arange(40) % problems.CLASSES
    model = nn.Sequential(nn.BatchNorm2d(1, affine=False), *problems.without_norm())
    stages = parlay.partition(model, 2, images[:2])
    made = problems.trainer(stages, method, schedule=schedule, batch_size=8, augment=Brighter(), progress=Silent())
    made.fit((images, targets), epochs=4)
    first = next(norm for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))
    torch.testing.assert_close(first.running_mean, images.mean((0, 2, 3)) + brighter)
