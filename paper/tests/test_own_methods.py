"""The methods of this package as whole runs: resumed, over two processes, captured, and with the recorded weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parlay
import problems
from parlay import methods
from parlay.config.recipe import make_recipe, read_recipe
from parlay.data import CropAndFlip
from parlay.engine.engine import Engine
from parlay.run import checkpoints
from parlay.run.setup import make_method
from parlay_paper.methods.auxnet import AuxNet
from parlay_paper.methods.dni import DNI
from parlay_paper.methods.joint_penalty import JointPenalty
from parlay_paper.methods.printed_lagrangian import PrintedLagrangian
from ranks import together
from rehearsed import difference, fused, making, outcome, small, steps
from runs import Heard, answer, records, train

METHODS: dict[str, parlay.Method] = {
    "dni": DNI(),
    "auxnet": AuxNet(),
    "joint-penalty": JointPenalty(state_step=0.4, trust=0.3),
    "printed-al": PrintedLagrangian(multiplier_step=0.1),
}
GUESSING = ("dni", "auxnet")
SAMPLES, EPOCHS = 44, 3  # S P P, of six steps each, the last one incomplete


def run(
    out: Path, name: str, engine: str = "in-process", stop_after: int = -1, resume: bool = False, **options: Any
) -> tuple[str, Tensor]:
    """Status and weights of a run with the stages in this process, or one of two here."""
    torch.set_num_threads(1)
    data, heard = problems.images(SAMPLES), Heard(stop_after)
    cut = parlay.partition(small(), 2, data[0][:2])
    given = {
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "augment": CropAndFlip(2) if METHODS[name].fresh_inputs else None,
        "schedule": "parallel",
        "batch_size": 8,
        "engine": engine,
        "serial_phase": "sequential",
        **options,
    }
    result = problems.trainer(cut, METHODS[name], out=out, progress=heard, **given).fit(data, None, EPOCHS, resume)
    return result.status, problems.weights(result.model)


def in_two(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """What each of two processes does, beside the folders that were begun in one."""
    found = {name: run(folder / name, name, "distributed", downsample=2) for name in METHODS}
    for name in GUESSING:
        out = folder / f"stopped-{name}"
        found[f"stopped {name}"] = run(out, name, "distributed", stop_after=9)
        if os.environ["RANK"] == "0":
            shutil.copytree(out, folder / f"stopped-{name}-in-one")
        found[f"resumed {name}"] = run(out, name, "distributed", resume=True)
        found[f"begun in one, {name}"] = run(folder / f"begun-{name}", name, "distributed", resume=True)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[str, Tensor]]]]:
    folder = tmp_path_factory.mktemp("two")
    for name in GUESSING:
        assert run(folder / f"begun-{name}", name, stop_after=9)[0] == "interrupted"
    return folder, together(2, in_two, folder, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train_as_one_does(name: str, two: Any, tmp_path: Path) -> None:
    folder, found = two
    status, weights = run(tmp_path, name, downsample=2)
    for process in found:
        assert process[name][0] == status == "finished"
        assert torch.equal(process[name][1], weights)
    assert records(folder / name) == records(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUESSING)
def test_a_run_stopped_with_batches_on_their_way_goes_on_in_one_process_and_in_two(
    name: str, two: Any, tmp_path: Path
) -> None:
    folder, found = two
    whole = run(tmp_path / "whole", name)
    assert [process[f"stopped {name}"][0] for process in found] == ["interrupted"] * 2
    for status, weights in (
        found[0][f"resumed {name}"],
        found[1][f"begun in one, {name}"],
        run(folder / f"stopped-{name}-in-one", name, resume=True),
    ):
        assert status == "finished"
        assert torch.equal(weights, whole[1])


@pytest.mark.parametrize(("name", "stop"), [("dni", 7), ("dni", 9), ("auxnet", 7), ("auxnet", 10), ("auxnet", 12)])
def test_resumed_with_batches_on_their_way_a_run_equals_the_uninterrupted_one(
    name: str, stop: int, tmp_path: Path
) -> None:
    """Also what its side networks have learned, and their optimisers."""
    options = {"downsample": 2, "clip": 0.3}
    assert run(tmp_path / "whole", name, **options)[0] == "finished"
    assert run(tmp_path / "parts", name, stop_after=stop, **options)[0] == "interrupted"
    assert run(tmp_path / "parts", name, resume=True, **options)[0] == "finished"
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    one, other = (everything(tmp_path / name) for name in ("parts", "whole"))
    assert one.keys() == other.keys()
    assert any(key.startswith("worker-1/beside/optimizer") or "worker-0/beside/optimizer" in key for key in one)
    for key, value in other.items():
        assert torch.equal(one[key], value), key


def everything(out: Path) -> dict[str, Tensor]:
    found = checkpoints.newest(out / "checkpoints", pytest.fail)
    assert found is not None
    return {f"{part}/{key}": value for part in found for key, value in found[part].items()}


def test_they_are_known_by_name_with_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text('method = "joint-penalty"\nstate-step = 0.4\nform = "sum"\n')
    made = make_method(make_recipe(read_recipe(tmp_path / "r.toml", methods.every_option()), {}))
    assert made == JointPenalty(state_step=0.4, form="sum")
    for name, method in METHODS.items():
        assert type(method) is methods.load(name)
        timing = methods.timing(name)
        assert [(timing.entry(k, 4), timing.lag(k, 4)) for k in range(4)] == [
            (method.entry(k, 4), method.lag(k, 4)) for k in range(4)
        ]
        assert methods.streams(name) == (name in GUESSING)
    assert train(tmp_path / "run", "--method", "dni", "--condition", "label") == 2
    assert answer(capsys).startswith("unknown condition 'label': write one of labels, none")
    assert train(tmp_path / "run", "--method", "al", "--trust", "0.5") == 2
    assert answer(capsys) == "trust is not for method 'al': leave it out, or write method joint-penalty or printed-al"


@pytest.mark.slow
def test_a_process_that_a_distributed_run_starts_knows_them_too(tmp_path: Path) -> None:
    words = "train --model resnet8 --dataset synthetic --synthetic-shape 1,8,8 --synthetic-samples 32 --batch-size 16"
    words += " --method dni --engine distributed --stages 2 --schedule parallel --epochs 2 --device cpu"
    made = subprocess.run(
        [sys.executable, "-m", "parlay_paper", *words.split(), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.slow
def test_their_weights_are_those_that_are_recorded() -> None:
    script = Path(__file__).parent / "weights.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize(
    ("name", "schedule"), [("dni", "latest"), ("auxnet", "forwards"), ("joint-penalty", "random-1")]
)
def test_captured_steps_equal_eager_ones(
    name: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side networks train with an optimiser that can be captured where there is no GPU."""
    for module in ("dni", "auxnet"):
        monkeypatch.setattr(f"parlay_paper.methods.{module}.adam", lambda lr: fused)  # noqa: ARG005
    data = problems.images(68)
    made = making(METHODS[name], 3, data, tmp_path, model=small)

    def make(lanes: Any) -> Engine:
        running = made(lanes)
        if lanes is not None:
            for worker in running.own.workers.values():
                lanes.adopt(
                    *(value for value in vars(worker).values() if isinstance(value, Tensor) and len(value.shape) == 0)
                )
        return running

    phases = [("parallel", steps(68, 2))]
    wanted, losses, _ = outcome(make, phases, None)
    found, other, counts = outcome(make, phases, schedule)
    assert difference(found, wanted) == ""
    assert other == losses
    assert counts.graphs == 1
