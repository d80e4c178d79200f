"""Several processes train as one does, to rounding; they stop together, resume in any number, and refuse together."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Delayed, InputError, Local, Penalty, Replay, faults, timeline
from parlay.data import CropAndFlip
from parlay.run import checkpoints
from ranks import together
from runs import Heard

slow = pytest.mark.slow
ROUNDING = 2e-5  # of float32, after a few epochs; nothing at all is seen in most cases
REPLICAS = 2e-4  # sums in another order, which red and black states carry on: 2e-5 is seen


def with_dropout() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.2)) for block in problems.without_norm()))


NETWORKS = {**problems.NETWORKS, "dense": problems.dense, "dropout": with_dropout}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As the processes have it: with another number, sums are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Ran:
    """What became of a run."""

    status: str
    message: str
    values: dict[str, Tensor]
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    said: list[str]


@dataclass(frozen=True)
class Case:
    """A small run, in one process or several."""

    stages: int = 2
    network: str = "batch norm"
    method: parlay.Method = field(default_factory=AugmentedLagrangian)
    samples: int = 20
    epochs: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, engine: str = "in-process", resume: bool = False, **options: Any) -> Ran:
        data, heard = problems.images(self.samples), Heard()
        cut = parlay.partition(NETWORKS[self.network](), self.stages, data[0][:2])
        # with this seed no ReLU is near its kink: noise of 1e-7 in the weights ends below 1e-5, with others above 8e-4
        given: dict[str, Any] = {"schedule": "parallel", "batch_size": 8, "seed": 4, "serial_phase": "sequential"}
        given |= {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9)}
        given |= {**self.options, **options, "engine": engine, "progress": heard}
        if engine == "in-process":
            given |= {"replicas": 1, "processes": None}
        made = problems.trainer(cut, self.method, **given)
        result = made.fit(data, problems.images(10, seed=2), epochs=self.epochs, resume=resume)
        rows = [{key: row[key] for key in row if "seconds" not in key} for row in result.records]
        values = {name: value.cpu().clone() for name, value in result.model.state_dict().items()}
        return Ran(result.status, result.message, values, rows, result.summary, heard.lines)


def off(one: Ran, other: Ran) -> float:
    """The largest relative difference of a weight or statistic."""
    assert one.values.keys() == other.values.keys()
    pairs = [(value.float(), other.values[name].float()) for name, value in one.values.items()]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in pairs)


def assert_same(one: Ran, other: Ran, tolerance: float = ROUNDING, records: float = 1e-3) -> None:
    assert one.status == other.status == "finished"
    assert off(one, other) < tolerance
    for mine, theirs in zip(one.records, other.records, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            exact = value is None or isinstance(value, str)
            assert mine[key] == (value if exact else pytest.approx(value, rel=records, abs=1e-5)), key
    assert one.summary.get("staleness") == other.summary.get("staleness")
    if "staleness" not in one.summary:  # else both ends of a link have slots
        assert one.summary["auxiliary_bytes"] == other.summary["auxiliary_bytes"]


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
        return value + (0 * output.sum()).sqrt() if self.how == "gradient" else value * float("nan")


HYBRID: dict[str, Any] = {"schedule": "alternate:2:1", "augment": CropAndFlip(2)}
ODD: dict[str, Any] = {"network": "no batch norm", "samples": 17}  # a last batch of one, maps of odd sides
PIPED = {"schedule": "serial", "serial_phase": "pipeline"}
ALL = Replay(beta=0.5, predict=0.5, accumulate=2)
HALF, ON_TWO, REPLICATED = {"precision": "bfloat16"}, {"processes": 2}, {"replicas": 2}

QUICK = {
    "one stage, two replicas": Case(1, samples=21, options=REPLICATED),
    "al, downsampled, clipped": Case(options={"schedule": "alternate:1:1", "downsample": 2, "clip": 0.3}),
    "penalty, last batch of one": Case(method=Penalty(), **ODD),
    "replay, dropout": Case(network="dropout", method=Replay(), options={"augment": CropAndFlip(2)}),
    "three stages on two, al": Case(3, epochs=4, options={**HYBRID, **ON_TWO}),
    "three stages on two, replay": Case(3, method=ALL, options={**HYBRID, **ON_TWO, "clip": 0.3}),
}
TWO = {
    "al, tail": Case(epochs=4, options={"schedule": "tail:1:1"}),
    "al, bfloat16": Case(options={"store_dtype": "bfloat16"}),
    "al, in a file": Case(method=AugmentedLagrangian(detail=1.0), options={"store": "file", "downsample": 2}),
    "al, dropout, adam": Case(network="dropout", options={"optimizer": lambda w: torch.optim.Adam(w, lr=0.003)}),
    "penalty": Case(method=Penalty(), options=HYBRID),
    "serial": Case(options={"schedule": "serial", "clip": 0.3}),
    "replay, everything": Case(method=ALL, epochs=4, options={**HYBRID, "downsample": 2, "clip": 0.3}),
    "replay, fewer batches than are on their way": Case(method=Replay(), samples=6, options=HYBRID),
    "replay, bfloat16": Case(network="dense", method=Replay(), options=HALF),
    "delayed": Case(method=Delayed(predict=0.5, accumulate=3), epochs=5, options=HYBRID),
    "local": Case(method=Local(), epochs=5, options=HYBRID),
    "three stages on two, penalty": Case(3, method=Penalty(), samples=19, options=ON_TWO),
    "five stages on two, delayed": Case(5, method=Delayed(), options={**HYBRID, **ON_TWO}),
    "five stages on two, local": Case(5, method=Local(), options={**HYBRID, **ON_TWO, "downsample": 2}),
    "three stages on two, serial": Case(3, options={"schedule": "serial", "clip": 0.3, **ON_TWO}),
    "piped": Case(network="no batch norm", options={"augment": CropAndFlip(2), **PIPED}),
}
THREE = {
    "al": Case(3, epochs=5, options=HYBRID),
    "al, last batch of one": Case(3, **ODD, options={"downsample": 2}),
    "penalty": Case(3, method=Penalty(), samples=19),
    "replay": Case(3, network="no batch norm", method=ALL, options={"downsample": 2, "clip": 0.3}),
    "delayed": Case(3, method=Delayed(), options=HYBRID),
    "seven stages on three, replay": Case(7, method=Replay(), options={**HYBRID, "processes": 3}),
    "piped": Case(3, network="no batch norm", options=PIPED),
}
FOUR = {
    "al": Case(epochs=5, options={**HYBRID, **REPLICATED}),
    "al, no batch norm, clipped": Case(network="no batch norm", samples=19, options={**REPLICATED, "clip": 0.5}),
    "penalty": Case(method=Penalty(), samples=21, options=REPLICATED),
    "three stages on two of each": Case(3, options={**REPLICATED, **ON_TWO}),
}
GROUPS = {"two": (2, TWO), "three": (3, THREE), "four": (4, FOUR)}

# Runs of two processes that end early: S P P, six steps each. The loss is that of the last stage: others have to learn
# of it. The eighth is early in a parallel epoch.
STOPPED = {
    "al": Case(samples=44),
    "replay": Case(method=Replay(accumulate=2), samples=44, options={"augment": CropAndFlip(2)}),
    "three on two": Case(3, method=Replay(), samples=44, options=ON_TWO),
}
AT = 8


def quick(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: case.run("distributed") for name, case in QUICK.items()}
    for name, case in STOPPED.items():
        out = folder / name
        found[f"stopped {name}"] = case.run("distributed", out=out, loss=Spoiler(AT, "signal"), timeline=2)
        if os.environ["RANK"] == "0":
            for other in ("in one", "on others", "in half"):
                shutil.copytree(out, folder / f"{name} {other}")
        found[f"resumed {name}"] = case.run("distributed", out=out, resume=True)
        found[f"undisturbed {name}"] = case.run("distributed")
        found[f"diverged {name}"] = case.run("distributed", loss=Spoiler(AT, "nan"), out=folder / f"{name} nan")
    cut = Case(3, method=Replay(accumulate=2), samples=44, options=ON_TWO)
    found["cut"] = cut.run("distributed", out=folder / "replay on others", resume=True)
    found["in half"] = STOPPED["replay"].run("distributed", out=folder / "replay in half", resume=True, **HALF)
    found["begun in one"] = STOPPED["al"].run("distributed", out=folder / "begun in one", resume=True)
    found["fault"] = with_a_fault("distributed")
    found["refused"] = refused(folder)
    return found


def with_a_fault(engine: str) -> Ran:
    """In the first stage, of which the process of the second learns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, "stage0:step8:nan")
        faults.arm(2)
    try:
        return STOPPED["al"].run(engine)
    finally:
        faults.arm(2)


REFUSED: list[tuple[Case, dict[str, Any], str]] = [
    (STOPPED["al"], {"out": "al"}, "holds a run already"),
    (STOPPED["al"], {"out": "of rank RANK alone"}, "not the same folder"),
    (Case(3), {}, "2 processes for 3 stages: start 3 of them, or write --stages 2"),
    (Case(network="dense", options={"downsample": 2}), {}, "can be downsampled"),  # seen by one of them alone
    (Case(1, method=Replay(), options=REPLICATED), {}, "Replay takes no replicas: write replicas 1"),
    (
        Case(method=Replay(predict=0.5)),
        {"optimizer": torch.optim.Adam},
        "predict looks ahead along the momentum of SGD",
    ),
]


def refused(folder: Path) -> list[str]:
    told, rank = [], os.environ["RANK"]
    for case, options, _ in REFUSED:
        if "out" in options:
            options = {"out": folder / options["out"].replace("RANK", rank)}
        with pytest.raises(InputError) as caught:
            case.run("distributed", **options)
        told.append(str(caught.value).replace(f"of rank {rank}", "of rank RANK"))
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    STOPPED["al"].run(out=folder / "begun in one", loss=Spoiler(AT, "signal"))
    return together(2, quick, folder, timeout=120)


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_train_as_one_does(name: str, two: list[dict[str, Ran]]) -> None:
    tolerance = REPLICAS if QUICK[name].options.get("replicas") else ROUNDING
    assert_same(two[0][name], QUICK[name].run(), tolerance)
    assert off(two[0][name], two[1][name]) == 0  # each has the whole model in the end
    assert two[0][name].records == two[1][name].records


def trained(group: str) -> dict[str, Ran]:
    return {name: case.run("distributed") for name, case in GROUPS[group][1].items()}


@cache
def answers(group: str) -> list[dict[str, Ran]]:
    return together(GROUPS[group][0], trained, group, timeout=180)


@slow
@pytest.mark.parametrize(("group", "name"), [(group, name) for group, (_, cases) in GROUPS.items() for name in cases])
def test_all_methods_train_in_several_processes_as_in_one(group: str, name: str) -> None:
    case, ran = GROUPS[group][1][name], answers(group)[0][name]
    rounded = case.options.get("store_dtype") == "bfloat16"  # outputs are, before they cross and are compared
    tolerance = REPLICAS if case.options.get("replicas") else ROUNDING
    assert_same(ran, case.run(), tolerance, records=1e-2 if rounded else 1e-3)
    assert all(off(found[name], ran) == 0 for found in answers(group))


# Runs that end early


@pytest.mark.parametrize("name", STOPPED)
def test_a_signal_to_one_process_stops_all_at_the_same_step_and_the_run_goes_on_from_there(
    name: str, two: list[dict[str, Any]], folder: Path
) -> None:
    stopped = [found[f"stopped {name}"] for found in two]
    assert [ran.status for ran in stopped] == ["interrupted"] * 2
    assert stopped[0].message == stopped[1].message
    assert "after 0 of" not in stopped[0].message
    resumed, whole = two[0][f"resumed {name}"], two[0][f"undisturbed {name}"]
    assert off(resumed, whole) == 0
    assert resumed.summary["auxiliary_bytes"] == whole.summary["auxiliary_bytes"]
    alone = STOPPED[name].run()
    for ran in (resumed, STOPPED[name].run(resume=True, out=folder / f"{name} in one")):
        assert_same(ran, alone)


def test_a_run_goes_on_in_other_processes(two: list[dict[str, Any]], folder: Path) -> None:
    assert_same(two[0]["begun in one"], STOPPED["al"].run())
    for other in ("cut", "in half"):
        assert two[0][other].status == "finished"
        assert [sum("on their way" in line for line in found[other].said) for found in two] == [1, 0]  # by the leader
    kept = checkpoints.newest(folder / "three on two on others" / "checkpoints", pytest.fail)
    assert kept is not None
    assert sorted(kept) == [f"{part}-{k}" for part in ("stage", "worker") for k in range(3)]


@pytest.mark.parametrize(("name", "whose"), [("al", "stage 1 of 2"), ("three on two", "stage 2 of 3")])
def test_a_loss_that_is_not_finite_stops_all_processes_before_the_update_and_is_named(
    name: str, whose: str, two: list[dict[str, Any]], folder: Path
) -> None:
    runs, alone = [found[f"diverged {name}"] for found in two], STOPPED[name].run(loss=Spoiler(AT, "nan"))
    assert [ran.status for ran in (*runs, alone)] == ["diverged"] * 3
    assert runs[0].message == runs[1].message
    assert f"the loss of {whose} is nan in epoch 2, step 2 (samples " in runs[0].message
    assert runs[0].message.partition(";")[0] == alone.message.partition(";")[0]
    assert off(runs[0], alone) < ROUNDING  # which makes no update of that step
    assert checkpoints.newest(folder / f"{name} nan" / "checkpoints", pytest.fail) is not None


def test_a_fault_on_demand_spoils_the_loss_of_one_stage_in_one_process_or_two(two: list[dict[str, Any]]) -> None:
    alone = with_a_fault("in-process")
    for ran in (alone, two[0]["fault"], two[1]["fault"]):
        assert ran.message.startswith("the loss of stage 0 of 2 is nan in epoch 2, step 3 (samples ")
        assert off(ran, alone) < ROUNDING


def test_a_run_says_how_it_was_run_and_leaves_a_timeline(two: list[dict[str, Any]], folder: Path) -> None:
    summary = two[0]["resumed al"].summary
    assert (summary["engine"], summary["processes"], summary["replicas"]) == ("distributed", 2, 1)
    assert len(summary["waited_seconds"]) == 2
    names = {(span.rank, span.name) for span in timeline.read(folder / "al" / timeline.FILE)}
    assert names >= {(rank, name) for rank in (0, 1) for name in ("forward", "backward", "update", "send", "wait")}


def test_what_one_process_refuses_all_refuse_in_the_same_words(
    two: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert two[0]["refused"] == two[1]["refused"]
    assert all(words in line for line, (_, _, words) in zip(two[0]["refused"], REFUSED, strict=True))
    monkeypatch.delenv("RANK", raising=False)
    for options, told in ((ON_TWO, "torchrun --nproc-per-node 2"), ({"processes": 4}, "write --processes 1 to 3")):
        with pytest.raises(InputError, match=told):
            Case(3, options=options).run("distributed")


# Four processes: two replicas of two stages


def of_four(folder: Path) -> dict[str, Ran]:
    case, out, found = Case(samples=44, options=REPLICATED), folder / "replicas", {}
    found["stopped"] = case.run("distributed", out=out, loss=Spoiler(AT, "signal"))
    if os.environ["RANK"] == "0":
        shutil.copytree(out, folder / "replicas in one")
    found["resumed"] = case.run("distributed", out=out, resume=True)
    found["undisturbed"] = case.run("distributed")
    found["diverged"] = case.run("distributed", loss=Spoiler(AT, "nan"))
    found["spoiled"] = case.run("distributed", loss=Spoiler(12, "gradient"))
    return found


@slow
def test_replicas_stop_together_and_go_on_with_their_own_states(tmp_path: Path) -> None:
    four = together(4, of_four, tmp_path, timeout=180)
    assert {(f["stopped"].status, f["stopped"].message) for f in four} == {("interrupted", four[0]["stopped"].message)}
    assert off(four[0]["resumed"], four[0]["undisturbed"]) == 0
    kept = checkpoints.newest(tmp_path / "replicas in one" / "checkpoints", pytest.fail)
    assert kept is not None
    assert {f"link-1-replica-{replica}-of-2" for replica in range(2)} < set(kept)
    assert Case(samples=44).run(resume=True, out=tmp_path / "replicas in one").status == "finished"  # states set anew
    for found in four:
        assert "the loss of stage 1 of 2 is nan in epoch 2, step 2" in found["diverged"].message
        assert "the weights of stage 1 of 2 are not finite after epoch 2" in found["spoiled"].message
