"""Parlay from Python: any nn.Sequential, any data of pairs, any loss; nothing of the caller's is disturbed."""

import importlib
import os
import pkgutil
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import parlay
from parlay.errors import InputError
from parlay.run.progress import Silent

NAMES = {
    *("AugmentedLagrangian", "InputError", "Partition", "Penalty", "Rate", "Recipe", "Result"),
    *("Schedule", "Trainer", "build_model", "partition"),
    *("Delayed", "Local", "Method", "Replay", "Stored", "Streamed"),
}
EXAMPLE = Path(__file__).parent.parent / "examples" / "own_model.py"


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A regression: the sum of the inputs."""

    def __init__(self, count: int, seed: int) -> None:
        self.x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.x[i].sum(0, keepdim=True)


def make_trainer(stages: int = 2, **options: object) -> parlay.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    cut = parlay.partition(model, stages, example=torch.zeros(2, 3))
    given = {"batch_size": 16, "device": "cpu", "progress": Silent(), "schedule": "alternate:2:1", **options}
    return parlay.Trainer(cut, nn.MSELoss(), parlay.AugmentedLagrangian(), **given)  # type: ignore[arg-type]


def test_the_example_of_an_own_model_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("test accuracy ")[1].split()[0])
    assert accuracy > 90
    assert "an ordinary model again: torch.Size([1, 4])" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_wait_briefly_unless_the_user_says_how(given: dict[str, str], found: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", "import os, parlay; print(os.environ.get('GOMP_SPINCOUNT'))"]
    assert subprocess.check_output(words, text=True, env={**kept, **given}).strip() == found


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(parlay.__all__) == NAMES
    for name in NAMES:
        assert getattr(parlay, name).__name__ in (name, "build")
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = parlay.train


def test_partition_is_the_function_even_after_everything_is_imported() -> None:
    for module in pkgutil.walk_packages(parlay.__path__, "parlay."):
        if "distributed" not in module.name:
            importlib.import_module(module.name)
    assert callable(parlay.partition)
    assert parlay.partition.__module__ == "parlay.partitioning"
    assert parlay.partition(nn.Sequential(nn.ReLU(), nn.ReLU()), 2, example=torch.zeros(1, 1)).cuts == (1,)


def test_any_data_of_pairs_and_any_loss_train_and_give_an_ordinary_model_back() -> None:
    trainer = make_trainer()
    result = trainer.fit(Pairs(128, 1), Pairs(32, 2), epochs=12)
    assert result.status == "finished"
    assert result.model is trainer.partition.model  # the caller's own
    assert not result.model.training
    assert {w.device.type for w in result.model.parameters()} == {"cpu"}
    assert result.summary["test_accuracy"] is None
    assert result.records[-1]["test_loss"] < 0.7 * result.records[0]["test_loss"]
    inputs = torch.stack([x for x, _ in Pairs(32, 2)])  # type: ignore[attr-defined]
    with torch.no_grad():
        loss = nn.functional.mse_loss(result.model(inputs), inputs.sum(1, keepdim=True))
    assert float(loss) == pytest.approx(result.summary["test_loss"], rel=1e-5)


def test_without_test_set_and_folder_it_trains_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for store in ("auto", "file"):
        result = make_trainer(store=store).fit(Pairs(32, 1), epochs=3)
        assert result.status == "finished"
        assert result.summary["test_loss"] is None
        assert result.records[-1]["train_loss"] > 0
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_callers_random_state_is_left_as_it_was_and_does_not_change_the_result() -> None:
    losses = []
    for noise in (3, 4):
        trainer = make_trainer()
        torch.manual_seed(noise)
        states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
        losses.append([row["losses"] for row in trainer.fit(Pairs(32, 1), Pairs(8, 2), epochs=3).records])
        assert torch.equal(torch.random.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert (np.random.get_state()[1] == states[2]).all()  # type: ignore[index]
    assert losses[0] == losses[1]


def test_a_run_folder_in_python_is_kept_resumed_and_never_overwritten(tmp_path: Path) -> None:
    first = make_trainer(out=tmp_path).fit(Pairs(32, 1), epochs=2)
    with pytest.raises(InputError, match="holds a run already"):
        make_trainer(out=tmp_path).fit(Pairs(32, 1), epochs=2)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2
    other = parlay.partition(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), 2, example=torch.zeros(1, 3))
    with pytest.raises(InputError, match=r"is of another network \(0.weight differs\)"):
        parlay.Trainer(other, nn.MSELoss(), batch_size=16, out=tmp_path).fit(Pairs(32, 1), epochs=4, resume=True)
    more = make_trainer(out=tmp_path).fit(Pairs(32, 1), epochs=4, resume=True)
    assert more.records[:2] == first.records
    assert len(more.records) == 4


def test_a_method_and_schedule_as_objects_mean_what_their_words_mean() -> None:
    told = make_trainer(schedule=parlay.Schedule("tail", 2, 1), rate=parlay.Rate("constant")).fit(
        Pairs(32, 1), epochs=3
    )
    assert told.summary["schedule"] == "tail:2:1"
    assert [row["phase"] for row in told.records] == ["serial", "parallel", "serial"]
    assert {row["learning_rate"] for row in told.records} == {0.1}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "batch-size is 0"),
        ({"judge_every": 0}, "judge-every is 0: write a number of at least 1"),
        ({"schedule": "sometimes"}, "unknown schedule"),
        ({"store_dtype": "float8"}, "unknown store-dtype"),
        ({"device": "gpu"}, "unknown device"),
    ],
)
def test_a_wrong_option_is_said_in_one_line(options: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_trainer(**options)


def test_what_a_caller_gets_wrong_is_said_in_one_line() -> None:
    cut = make_trainer().partition
    with pytest.raises(InputError, match=r"stages is a Sequential: write parlay\.partition"):
        parlay.Trainer(cut.model, nn.MSELoss())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"method is 'al': write an object"):
        parlay.Trainer(cut, nn.MSELoss(), "al")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="epochs is 0"):
        make_trainer().fit(Pairs(4, 1), epochs=0)
    with pytest.raises(InputError, match="resume needs a run folder"):
        make_trainer().fit(Pairs(4, 1), resume=True)
    with pytest.raises(InputError, match="pass a map-style Dataset"):
        make_trainer().fit(iter([]))
