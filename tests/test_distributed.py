"""A process per stage gives the same weights as one process for all, to rounding: every method, schedule and filter."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Penalty, timeline
from parlay.data import CropAndFlip
from parlay.errors import InputError
from parlay.run import checkpoints
from parlay.run.progress import Silent
from ranks import together

ROUNDING = 2e-5  # of float32, after a few epochs; nothing at all is seen in most cases
REPLICAS = 2e-4  # sums in another order, which red and black states carry on: 2e-5 is seen

NETWORKS = {**problems.NETWORKS, "dense": problems.dense, "dropout": lambda: _with_dropout()}


def _with_dropout() -> nn.Sequential:
    middle = problems.dense()
    return nn.Sequential(*middle[:3], nn.Dropout(0.5), *middle[3:])


@contextmanager
def one_thread() -> Iterator[None]:
    """As the processes have it: with another number, sums are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """A small run, in either engine."""

    stages: int = 2
    network: str = "batch norm"
    method: parlay.Coupling = field(default_factory=AugmentedLagrangian)
    samples: int = 20
    epochs: int = 3
    lr: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, engine: str = "in-process", resume: bool = False, **options: Any) -> Ran:
        data = problems.images(self.samples)
        cut = parlay.partition(NETWORKS[self.network](), self.stages, data[0][:2])
        fixed = {"loss": nn.CrossEntropyLoss(), "schedule": "parallel", "batch_size": 8, "device": "cpu"}
        fixed |= {"seed": 4}  # no ReLU near its kink: noise of 1e-7 in the weights ends below 1e-5, with 3 above 8e-4
        fixed |= {"optimizer": lambda weights: torch.optim.SGD(weights, lr=self.lr, momentum=0.9), "progress": Silent()}
        if engine == "in-process":  # it has neither
            options = {"replicas": 1, "serial_phase": "auto", **{k: v for k, v in options.items() if k != "timeline"}}
        else:
            fixed |= {"serial_phase": "sequential"}
        made = parlay.Trainer(cut, method=self.method, engine=engine, **{**fixed, **self.options, **options})
        with one_thread():
            result = made.fit(data, problems.images(10, seed=2), epochs=self.epochs, resume=resume)
        rows = [{key: row[key] for key in row if "seconds" not in key} for row in result.records]
        values = {name: value.cpu().clone() for name, value in result.model.state_dict().items()}
        return Ran(result.status, result.message, values, rows, result.summary)


@dataclass(frozen=True)
class Ran:
    """What became of one."""

    status: str
    message: str
    values: dict[str, Tensor]
    records: list[dict[str, Any]]
    summary: dict[str, Any]


def off(one: Ran, other: Ran) -> float:
    """The largest relative difference of a weight or statistic."""
    assert one.values.keys() == other.values.keys()
    return max(
        float((value.float() - other.values[name].float()).norm() / other.values[name].float().norm().clamp_min(1e-6))
        for name, value in one.values.items()
    )


def assert_same(one: Ran, other: Ran, tolerance: float = ROUNDING, records: float = 1e-3) -> None:
    assert one.status == other.status == "finished"
    assert off(one, other) < tolerance
    assert len(one.records) == len(other.records)
    for mine, theirs in zip(one.records, other.records, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            exact = value is None or isinstance(value, str)
            assert mine[key] == (value if exact else pytest.approx(value, rel=records, abs=1e-5)), key
    assert one.summary["auxiliary_bytes"] == other.summary["auxiliary_bytes"]


LAST_OF_ONE = {"samples": 17, "network": "no batch norm"}
RED_BLACK, JOINT = Penalty(), Penalty(order="joint", beta=30.0, trust=0.3)
HYBRID = {"schedule": "alternate:2:1"}

TWO = {
    "al": Case(),
    "al, downsampled, hybrid": Case(epochs=5, options={**HYBRID, "downsample": 2}),
    "al, tail, augmented": Case(epochs=4, options={"schedule": "tail:1:1", "augment": CropAndFlip(2)}),
    "al, clipped": Case(options={**HYBRID, "clip": 0.3}),
    "al, bfloat16": Case(options={"store_dtype": "bfloat16"}),
    "al, in a file": Case(options={"store": "file"}),
    "al, as printed": Case(method=AugmentedLagrangian(multiplier="printed", multiplier_step=0.1)),
    "al, detail, shrunk": Case(
        method=AugmentedLagrangian(detail=1.0, shrink=0.7, beta_final=9.0), options={"downsample": 2}
    ),
    "red-black": Case(method=RED_BLACK),
    "red-black, last batch of one": Case(method=RED_BLACK, **LAST_OF_ONE),
    "joint": Case(method=JOINT),
    "joint, last batch of one": Case(method=JOINT, **LAST_OF_ONE),
    "serial": Case(options={"schedule": "serial"}),
    "dense": Case(network="dense"),
    "dropout": Case(network="dropout"),
}
THREE = {
    "al, hybrid": Case(3, epochs=5, options=HYBRID),
    "al, last batch of one": Case(3, **LAST_OF_ONE),
    "al, downsampled odd sides": Case(3, network="no batch norm", options={"downsample": 2}),
    "red-black": Case(3, method=RED_BLACK, samples=19),
    "joint, clipped": Case(3, method=JOINT, options={"clip": 1.0}),
}
FOUR = {
    "al": Case(),
    "al, no batch norm, hybrid": Case(network="no batch norm", samples=19, epochs=5, options=HYBRID),
    "al, augmented": Case(options={**HYBRID, "augment": CropAndFlip(2)}),
    "red-black": Case(method=RED_BLACK, samples=21),
    "joint, clipped": Case(method=JOINT, options={"clip": 1.0}),
}
PIPED = {
    "two micro-batches": {"micro_batches": 2},
    "eight micro-batches": {"micro_batches": 8},
    "by itself": {},
}


# What the processes do


def of_two(folder: Path) -> dict[str, Ran]:
    found = {name: case.run("distributed") for name, case in TWO.items()}
    for name, options in PIPED.items():
        # 20 samples: the last batch of 4 does not divide by 8, and goes through the stages as a whole
        piped = Case(network="no batch norm", options={"schedule": "serial", "augment": CropAndFlip(2)})
        found[f"piped, {name}"] = piped.run("distributed", serial_phase="pipeline", **options)
    found["piped, batch norm"] = Case(options=HYBRID).run(
        "distributed", serial_phase="auto", timeline=2, out=folder / "t"
    )
    found["one stage, two replicas"] = Case(1, options={"replicas": 2}).run("distributed")
    return found


def of_three(folder: Path) -> dict[str, Ran]:
    found = {name: case.run("distributed") for name, case in THREE.items()}
    plain = Case(3, network="no batch norm", options={"schedule": "serial"})
    found["piped"] = plain.run("distributed", serial_phase="pipeline", micro_batches=4)
    found["from two"] = Case(3, samples=44).run("distributed", resume=True, out=folder / "two to three")
    return found


def of_four(folder: Path) -> dict[str, Ran]:
    found = {name: case.run("distributed", replicas=2) for name, case in FOUR.items()}
    out = folder / "replicas"
    found["stopped"] = STOPPED.run("distributed", replicas=2, out=out, loss=Spoiler(8, "signal"))
    if os.environ["RANK"] == "0":
        shutil.copytree(out, folder / "replicas in process")
    found["resumed"] = STOPPED.run("distributed", replicas=2, out=out, resume=True)
    found["undisturbed"] = STOPPED.run("distributed", replicas=2)
    found["diverged"] = STOPPED.run("distributed", replicas=2, loss=Spoiler(8, "nan"))
    return found


@dataclass
class Spoiler:
    """Cross-entropy. At its n-th training call it gets this process a signal, or it or its gradient is not a number."""

    at: int
    how: str
    calls: int = 0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        value = nn.functional.cross_entropy(output, targets)
        if self.calls != self.at or not torch.is_grad_enabled():
            return value
        if self.how == "signal":
            signal.raise_signal(signal.SIGTERM)
            return value
        if self.how == "gradient":
            return value + (0 * output.sum()).sqrt()
        return value * float("nan")


@dataclass
class Preparing:
    """What a batch is prepared by; at its n-th call in the first process, that gets a signal."""

    at: int
    calls: int = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and os.environ.get("RANK") == "0":
            signal.raise_signal(signal.SIGTERM)
        return inputs


STOPPED = Case(samples=44, epochs=3)  # S P P, six steps each
STOPS = (3, 8, 14)


def disturbed(folder: Path) -> dict[str, Any]:
    """Runs of two processes that end early. The loss is that of the last stage: the other has to learn of it."""
    found: dict[str, Any] = {}
    for at in STOPS:
        out = folder / f"stopped at {at}"
        found[f"stopped at {at}"] = STOPPED.run("distributed", out=out, loss=Spoiler(at, "signal"))
        if os.environ["RANK"] == "0":
            shutil.copytree(out, folder / f"in process from {at}")
        found[f"resumed from {at}"] = STOPPED.run("distributed", resume=True, out=out)
    refreshing = folder / "stopped while refreshing"
    # six serial steps and two batches that are evaluated: the tenth is in the middle of the pass that sets the states
    found["stopped while refreshing"] = STOPPED.run("distributed", out=refreshing, prepare=Preparing(10))
    found["resumed while refreshing"] = STOPPED.run("distributed", resume=True, out=refreshing)
    for at in (2, 8):
        out = folder / f"diverged at {at}"
        found[f"diverged at {at}"] = STOPPED.run("distributed", out=out, loss=Spoiler(at, "nan"))
    spoiled = folder / "spoiled"  # by the last step of the second epoch
    found["spoiled"] = STOPPED.run("distributed", out=spoiled, loss=Spoiler(12, "gradient"))
    found["from one process"] = STOPPED.run("distributed", resume=True, out=folder / "from one process")
    found["two to three"] = STOPPED.run("distributed", out=folder / "two to three", loss=Spoiler(8, "signal"))
    found["refused"] = _refused(folder)
    return found


def _refused(folder: Path) -> list[str]:
    """Wrong input that only one process sees, or that all see."""
    rank, told = os.environ["RANK"], []
    STOPPED.run("distributed", out=folder / "taken")
    for case, options in (
        (STOPPED, {"out": folder / "taken"}),
        (STOPPED, {"out": folder / f"of rank {rank} alone"}),
        (Case(3), {}),
        (Case(network="dense", options={"downsample": 2}), {}),
    ):
        try:
            case.run("distributed", **options)
        except InputError as error:
            told.append(str(error))
    return told


# The tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Ran]]:
    return together(2, of_two, folder)


@pytest.fixture(scope="module")
def ends(folder: Path) -> list[dict[str, Any]]:
    STOPPED.run(out=folder / "from one process", loss=Spoiler(8, "signal"))
    found = together(2, disturbed, folder)
    shutil.copytree(folder / "two to three", folder / "parts")
    return found


@pytest.fixture(scope="module")
def three(ends: list[dict[str, Any]], folder: Path) -> list[dict[str, Ran]]:  # noqa: ARG001
    shutil.copytree(folder / "two to three", folder / "two to three in process")
    return together(3, of_three, folder)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Ran]]:
    return together(4, of_four, folder, timeout=90)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one_does(name: str, two: list[dict[str, Ran]]) -> None:
    rounded = TWO[name].options.get("store_dtype") == "bfloat16"  # outputs are, before they cross and are compared
    assert_same(two[0][name], TWO[name].run(), records=1e-2 if rounded else 1e-3)


@pytest.mark.parametrize("name", THREE)
def test_three_processes_train_as_one_does(name: str, three: list[dict[str, Ran]]) -> None:
    assert_same(three[0][name], THREE[name].run())


@pytest.mark.parametrize("name", FOUR)
def test_two_replicas_of_two_stages_train_as_one_process_does(name: str, four: list[dict[str, Ran]]) -> None:
    assert_same(four[0][name], FOUR[name].run(), REPLICAS)


def test_every_process_has_the_whole_model_and_the_records_in_the_end(two: list[dict[str, Ran]]) -> None:
    for name in TWO:
        assert off(two[0][name], two[1][name]) == 0, name
        assert two[0][name].records == two[1][name].records


@pytest.mark.parametrize("name", PIPED)
def test_a_pipeline_trains_as_a_plain_loop_where_there_is_no_batch_norm(name: str, two: list[dict[str, Ran]]) -> None:
    plain = Case(network="no batch norm", options={"schedule": "serial", "augment": CropAndFlip(2)}).run()
    assert_same(two[0][f"piped, {name}"], plain)


def test_a_pipeline_of_three_trains_as_a_plain_loop(three: list[dict[str, Ran]]) -> None:
    assert_same(three[0]["piped"], Case(3, network="no batch norm", options={"schedule": "serial"}).run())


def test_a_pipeline_with_batch_norm_trains_too(two: list[dict[str, Ran]]) -> None:
    ran = two[0]["piped, batch norm"]
    assert ran.status == "finished"
    assert all(torch.isfinite(value).all() for value in ran.values.values())


def test_a_single_stage_with_replicas_is_serial_training(two: list[dict[str, Ran]]) -> None:
    assert_same(two[0]["one stage, two replicas"], Case(1).run(), REPLICAS)


def test_a_run_says_how_it_was_run_and_leaves_a_timeline(two: list[dict[str, Ran]], folder: Path) -> None:
    summary = two[0]["piped, batch norm"].summary
    assert (summary["engine"], summary["processes"], summary["replicas"]) == ("distributed", 2, 1)
    assert len(summary["waited_seconds"]) == 2
    spans = timeline.read(folder / "t" / timeline.FILE)
    assert {span.rank for span in spans} == {0, 1}
    assert {"forward", "backward", "update", "send", "wait"} <= {span.name for span in spans}
    assert Case().run().summary["engine"] == "in-process"


# Runs that end early


@pytest.mark.parametrize("at", STOPS)
def test_a_signal_to_one_process_stops_all_at_the_same_step_and_the_run_goes_on_from_there(
    at: int, ends: list[dict[str, Any]], folder: Path
) -> None:
    stopped = [found[f"stopped at {at}"] for found in ends]
    assert [ran.status for ran in stopped] == ["interrupted"] * 2
    assert stopped[0].message == stopped[1].message
    if at > 6:  # in the middle of a parallel epoch
        assert "after 0 of" not in stopped[0].message
    undisturbed = STOPPED.run()
    resumed, in_process = ends[0][f"resumed from {at}"], STOPPED.run(resume=True, out=folder / f"in process from {at}")
    for ran in (resumed, in_process):
        assert off(ran, undisturbed) < ROUNDING
        for mine, theirs in zip(ran.records, undisturbed.records, strict=True):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


def test_a_run_stopped_while_its_states_are_set_goes_on_from_there(ends: list[dict[str, Any]]) -> None:
    stopped = [found["stopped while refreshing"] for found in ends]
    assert [ran.message for ran in stopped] == ["interrupted in epoch 2 of 3, after 0 of 6 steps"] * 2
    assert off(ends[0]["resumed while refreshing"], STOPPED.run()) < ROUNDING


def test_replicas_stop_together_and_go_on_with_their_own_states(four: list[dict[str, Ran]], folder: Path) -> None:
    assert {found["stopped"].message for found in four} == {four[0]["stopped"].message}
    assert four[0]["stopped"].status == "interrupted"
    assert off(four[0]["resumed"], four[0]["undisturbed"]) == 0
    kept = checkpoints.newest(folder / "replicas in process" / "checkpoints", pytest.fail)
    assert kept is not None
    assert [name for name in kept.parts if name.startswith("interface")] == [
        "interface-1-replica-0-of-2",
        "interface-1-replica-1-of-2",
    ]
    set_anew = STOPPED.run(resume=True, out=folder / "replicas in process")
    assert set_anew.status == "finished"


def test_a_loss_that_is_not_a_number_in_one_replica_is_named(four: list[dict[str, Ran]]) -> None:
    assert [found["diverged"].status for found in four] == ["diverged"] * 4
    assert "the loss of stage 1 of 2 is nan in epoch 2, step 2" in four[0]["diverged"].message


def test_a_run_begun_in_one_process_goes_on_in_two(ends: list[dict[str, Any]]) -> None:
    ran = ends[0]["from one process"]
    assert ran.status == "finished"
    assert off(ran, STOPPED.run()) < ROUNDING


def test_two_stages_go_on_as_three(three: list[dict[str, Ran]], folder: Path) -> None:
    in_process = Case(3, samples=44).run(resume=True, out=folder / "two to three in process")
    assert three[0]["from two"].status == "finished"
    assert three[0]["from two"].summary["stages"] == 3
    assert off(three[0]["from two"], in_process) < ROUNDING


@pytest.mark.parametrize(("at", "whose", "epoch", "step"), [(2, "the network", 0, 1), (8, "stage 1 of 2", 1, 1)])
def test_a_loss_that_is_not_a_number_stops_all_processes_and_is_named(
    at: int, whose: str, epoch: int, step: int, ends: list[dict[str, Any]], folder: Path
) -> None:
    runs = [found[f"diverged at {at}"] for found in ends]
    assert [ran.status for ran in runs] == ["diverged"] * 2
    assert runs[0].message == runs[1].message
    assert f"the loss of {whose} is nan in epoch {epoch + 1}, step {step + 1} (samples " in runs[0].message
    assert off(runs[0], STOPPED.run(loss=Spoiler(at, "nan"))) < ROUNDING  # which makes no update of that step
    found = checkpoints.newest(folder / f"diverged at {at}" / "checkpoints", pytest.fail)
    assert (found is None) == (epoch == 0)


def test_weights_that_an_epochs_last_step_has_spoiled_in_one_process_go_into_no_checkpoint(
    ends: list[dict[str, Any]], folder: Path
) -> None:
    runs = [found["spoiled"] for found in ends]
    assert [ran.status for ran in runs] == ["diverged"] * 2
    assert runs[0].message == runs[1].message
    assert "the weights of stage 1 of 2 are not finite after epoch 2" in runs[0].message
    found = checkpoints.newest(folder / "spoiled" / "checkpoints", pytest.fail)
    assert found is not None
    assert found.path.name == "0000000006"


def test_a_checkpoint_has_a_part_of_each_process_and_parts_of_different_steps_are_no_checkpoint(
    ends: list[dict[str, Any]],  # noqa: ARG001
    folder: Path,
) -> None:
    root = folder / "parts" / "checkpoints"
    newest, older = sorted(root.glob("0*"), reverse=True)[:2]
    found = checkpoints.newest(root, pytest.fail)
    assert found is not None
    assert sorted(found.parts) == ["interface-1", "stage-0", "stage-1"]
    shutil.copy(older / "stage-1.safetensors", newest / "stage-1.safetensors")
    told: list[str] = []
    found = checkpoints.newest(root, told.append)
    assert found is not None
    assert found.path == older
    assert "stage-1.safetensors" in told[0]


def test_what_one_process_refuses_all_refuse_in_the_same_words(ends: list[dict[str, Any]]) -> None:
    one, other = ([line.replace(f"of rank {rank} alone", "") for line in ends[rank]["refused"]] for rank in (0, 1))
    assert one == other
    assert [any(words in line for line in one) for words in ("holds a run already", "not the same folder")] == [
        True
    ] * 2
    assert any("2 processes for 3 stages: start 3 of them, or write --stages 2" in line for line in one)
    assert any("can be downsampled" in line for line in one)


def test_without_processes_the_engine_says_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"):
        Case().run("distributed")
