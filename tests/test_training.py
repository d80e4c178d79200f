"""What a run leaves behind: a record per epoch, a summary, and a model that plain PyTorch loads."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import parlay
import problems
from parlay import data, training
from parlay.coupling import AugmentedLagrangian, Local, Method, Penalty, Replay
from parlay.data.augment import Augmentation, Changes
from parlay.progress import Silent
from parlay.records import Records, dumps, environment, read
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


def test_every_epoch_has_its_line_with_all_its_keys(hybrid: Path) -> None:
    lines = (hybrid / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert all(set(row) == RECORD for row in rows)
    assert [row["phase"] for row in rows] == ["serial", "parallel", "serial", "parallel"]


def test_a_parallel_epoch_has_a_loss_for_every_stage_and_a_violation_for_every_interface(hybrid: Path) -> None:
    serial, parallel, *_ = records(hybrid)
    assert (len(serial["losses"]), serial["violation"]) == (1, None)
    assert (len(parallel["losses"]), len(parallel["violation"])) == (3, 2)
    assert all(v > 0 for v in parallel["violation"])
    assert parallel["beta"] == 3.0


def test_the_learning_rate_falls_and_the_training_loss_with_it(hybrid: Path) -> None:
    rows = records(hybrid)
    rates = [row["learning_rate"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_the_records_of_a_phase_after_a_serial_one_say_how_far_the_states_had_drifted(hybrid: Path) -> None:
    assert [row["violation_at_entry"] is not None for row in records(hybrid)] == [False, False, False, True]


def test_the_summary_has_every_key_of_the_contract(hybrid: Path) -> None:
    told, rows = summary(hybrid), records(hybrid)
    assert set(told) >= SUMMARY
    assert (told["status"], told["method"], told["model"], told["dataset"]) == (
        "finished",
        "al",
        "resnet8",
        "synthetic",
    )
    assert (told["stages"], told["cuts"], told["schedule"], told["downsample"]) == (3, [2, 3], "alternate:2:1", 1)
    assert told["epochs"] == 4
    assert told["test_accuracy"] == rows[-1]["test_accuracy"]
    assert told["violation"] == rows[-1]["violation"]
    assert told["parameters"] == sum(w.numel() for w in parlay.build_model("resnet8", (1, 8, 8), 10).parameters())
    assert set(told["seconds"]) == {"total", "serial_epoch", "parallel_epoch"}
    assert told["seconds"]["total"] > told["seconds"]["parallel_epoch"] > 0
    assert told["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize("words", ["--method al", "--method replay", "--method serial"])
def test_judging_less_often_changes_nothing_but_what_is_written_down(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for every, folder in enumerate(("always", "seldom"), 1):
        out = tmp_path / folder
        assert train(out, *words.split(), "--epochs", 5, "--schedule", "parallel", "--judge-every", every) == 0
    always, seldom = records(tmp_path / "always"), records(tmp_path / "seldom")
    assert [row["train_loss"] is None for row in seldom] == [True, False, True, False, False]  # the last one always
    judged = ("train_loss", "test_loss", "test_accuracy")
    for one, other in zip(always, seldom, strict=True):
        between = dict.fromkeys(judged) if other["train_loss"] is None else {}
        assert {**one, **between} == other
    ends = [load_file(tmp_path / folder / "model.safetensors") for folder in ("always", "seldom")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    told = [line for line in capsys.readouterr().err.splitlines() if "epoch 3 of 5" in line]
    assert [("train loss" in line) for line in told] == [True, False]


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Penalty()])
def test_batch_statistics_are_of_all_kinds_of_samples_where_those_stand_in_turn(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the two sources of MNIST do: every fourth of these samples would be of one kind."""
    monkeypatch.setattr(training, "JUDGED", 64)
    kinds = 10 * (torch.arange(256) % 2).float() - 5
    inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)) + kinds[:, None]
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    cut = parlay.partition(model, 2, inputs[:2])
    trainer = parlay.Trainer(cut, nn.CrossEntropyLoss(), method, "parallel", batch_size=16, progress=Silent())
    result = trainer.fit((inputs, (kinds > 0).long()), epochs=2)
    norm = result.model[0]
    assert norm.running_mean.abs().max() < 2  # 5 with a single kind
    assert norm.running_var.min() > 15  # 26 with both, 1 with one


def test_an_adaptive_schedule_judges_every_epoch(tmp_path: Path) -> None:
    assert train(tmp_path, "--schedule", "adaptive", "--epochs", 3, "--judge-every", 3) == 0
    assert all(row["train_loss"] is not None for row in records(tmp_path))


def test_judging_never_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parlay_command("train", "--judge-every", 0) == 2
    assert "judge-every is 0: write a number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "bytes_per_element"),
    [
        ("--method al", 2 * 4),
        ("--method penalty", 4),
        ("--method al --store-dtype bfloat16", 2 * 2),
        ("--method al --downsample 2", 2 * 4 / 4),
        ("--method penalty --store file --downsample 2", 4 / 4),
    ],
)
def test_the_bytes_of_the_stores_are_those_of_the_formula(words: str, bytes_per_element: float, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 2, *words.split()) == 0
    elements = 16 * 8 * 8 + 32 * 4 * 4  # behind the first and the second group of resnet8 on 8 x 8 images
    assert summary(tmp_path)["auxiliary_bytes"] == SAMPLES * elements * bytes_per_element
    assert not (tmp_path / "stores").exists()


def test_serial_training_stores_nothing(tmp_path: Path) -> None:
    assert train(tmp_path, "--method", "serial", "--epochs", 2) == 0
    told = summary(tmp_path)
    assert (told["auxiliary_bytes"], told["violation"], told["cuts"], told["stages"]) == (0, [], [], 1)
    assert told["seconds"]["parallel_epoch"] is None


@pytest.mark.parametrize(
    "words",
    ["--method al", "--method penalty --schedule parallel", "--method serial", "--method al --schedule tail:1:1"],
)
def test_the_model_file_loads_by_plain_pytorch_and_has_the_reported_accuracy(words: str, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 4, *words.split()) == 0
    model = parlay.build_model("resnet8", (1, 8, 8), 10)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    synthetic = data.Synthetic((1, 8, 8), 10, SAMPLES, SAMPLES // 4)
    correct = _correct(model.eval(), synthetic)
    assert correct == round(summary(tmp_path)["test_accuracy"] * synthetic.test_size / 100)
    assert correct / synthetic.test_size == pytest.approx(records(tmp_path)[-1]["test_accuracy"] / 100, abs=1e-6)


def test_the_rate_can_be_held_until_a_serial_tail(tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 6, "--schedule", "tail:1:1", "--lr-schedule", "hold", "--lr", 0.01) == 0
    found = [(row["phase"], row["learning_rate"]) for row in records(tmp_path)]
    assert found[:3] == [("serial", 0.01), ("parallel", 0.01), ("parallel", 0.01)]
    assert [phase for phase, _ in found[3:]] == ["serial"] * 3
    rates = [rate for _, rate in found]
    assert 0.01 > rates[3] > rates[4] > rates[5]


def _correct(model: torch.nn.Module, synthetic: data.Synthetic) -> int:
    facts = data.facts("synthetic", synthetic)
    test = data.load("synthetic", synthetic=synthetic).test
    with torch.no_grad():
        scores: Tensor = model(data.normalise(test.inputs, facts.mean, facts.std))
    return int((scores.argmax(1) == test.targets).sum())


def test_an_auto_encoder_is_judged_by_its_loss_and_has_no_accuracy(tmp_path: Path) -> None:
    assert train(tmp_path, "--model", "resnet8-vae", "--epochs", 2, "--lr", 0.01) == 0
    told = summary(tmp_path)
    assert told["test_accuracy"] is None
    assert told["test_loss"] > 0


@pytest.mark.parametrize("words", ["--downsample 2 --synthetic-shape 3,7,5", "--downsample 4", "--augment 2"])
def test_odd_shapes_and_fixed_copies_train_to_the_end(words: str, tmp_path: Path) -> None:
    assert train(tmp_path, "--epochs", 2, *words.split()) == 0
    assert summary(tmp_path)["status"] == "finished"


def test_records_are_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    kept = Records(path)
    for epoch in range(3):
        kept.append({"epoch": epoch})
    with path.open("a") as file:
        file.write('{"epoch": 3, "los')
    assert [row["epoch"] for row in read(path)] == [0, 1, 2]
    again = Records(path)
    again.restart(2)
    again.append({"epoch": 2})
    assert [row["epoch"] for row in read(path)] == [0, 1, 2]


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    assert json.loads(dumps({"a": [math.nan, (1.5, math.inf)], "β": 1})) == {"a": [None, [1.5, None]], "β": 1}


def test_the_environment_names_versions_and_hardware() -> None:
    told = environment(["cpu"])
    assert told["devices"] == ["cpu"]
    assert {"parlay", "python", "torch", "cuda", "platform", "cores", "threads"} < set(told)


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
    trainer = parlay.Trainer(
        parlay.partition(model, 2, images[:2]),
        nn.CrossEntropyLoss(),
        method=method,
        schedule=schedule,
        batch_size=8,
        augment=Brighter(),
        device="cpu",
        progress=Silent(),
    )
    trainer.fit((images, targets), epochs=4)
    first = next(norm for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))
    torch.testing.assert_close(first.running_mean, images.mean((0, 2, 3)) + brighter)
