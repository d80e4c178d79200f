"""On a GPU: captured steps train as eager ones do; processes over NCCL as one process. The rehearsal does the rest.

NCCL refuses two processes on one GPU of a host. So that one GPU is enough, they pose as hosts of one GPU each
(NCCL_HOSTID): its transport between hosts then carries all that crosses a link.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_processes import STOPPED, Case, Ran, Spoiler, off
from torch import Tensor

import parlay
import problems
from parlay import AugmentedLagrangian, Penalty, Replay, models
from parlay.data import CropAndFlip
from parlay.engine import losses
from parlay.engine.captured import Captured
from problems import images, relative
from ranks import together

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
METHODS = [AugmentedLagrangian(), Penalty(), Replay(), parlay.Local()]


def fused(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.02, momentum=0.9, fused=True)


EXACT: dict[str, Any] = {"device": "cuda", "precision": "float32", "optimizer": fused}


def trained(method: parlay.Method, model: Any = None, epochs: int = 4, **options: Any) -> Tensor:
    """Eight steps an epoch, the last one incomplete: three to warm up, then captured ones."""
    model, data = model or problems.without_norm(), options.pop("data", images(61))
    cut = parlay.partition(model, 3, data[0][:2])
    given = {"schedule": "parallel", "batch_size": 8, **EXACT, **options}
    if method.fresh_inputs:
        given |= {"augment": CropAndFlip(2)}
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        assert problems.trainer(cut, method, **given).fit(data, epochs=epochs).status == "finished"
    return problems.weights(model)


@pytest.mark.parametrize("schedule", ["serial", "parallel", "alternate:2:1"])
@pytest.mark.parametrize(
    ("method", "precision", "tolerance"),
    [
        *((method, "float32", 1e-3) for method in METHODS[:2]),
        *((method, "bfloat16", 0.1) for method in METHODS[:2]),
        *((method, "float32", 0.02) for method in METHODS[2:]),
    ],
    ids=str,
)
def test_captured_steps_train_as_eager_ones(
    method: parlay.Method, precision: str, tolerance: float, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, capture = [], Captured._capture
    monkeypatch.setattr(Captured, "_capture", lambda self, piece: (captures.append(self), capture(self, piece))[1])
    plain = trained(method, schedule=schedule, precision=precision, capture=False)
    assert not captures
    graphed = trained(method, schedule=schedule, precision=precision)
    assert len(captures) == (1 if schedule == "serial" else 2)  # a parallel run begins with a serial epoch
    moved = relative(plain, problems.weights(problems.without_norm()))
    assert moved > 0.02
    assert relative(graphed, plain) < tolerance * moved
    if tolerance == 1e-3:
        assert relative(trained(method, schedule=schedule, device="cpu"), plain) < 1e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("network", ["resnet20", "wrn-10-10"])
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda m: type(m).__name__)
def test_epochs_of_captured_steps_differ_from_eager_ones_by_less_than_bfloat16_rounds(
    method: parlay.Method, network: str, compiled: bool
) -> None:
    torch.manual_seed(1)
    data = torch.randn(1000, 3, 32, 32), torch.randint(0, 10, (1000,))

    def found(precision: str, **how: bool) -> Tensor:
        torch.manual_seed(0)
        model = models.build(network, (3, 32, 32), 10)
        return trained(method, model, 2, data=data, precision=precision, batch_size=64, **how)

    eager = found("bfloat16", capture=False, compile=False)
    rounding = relative(eager, found("float32", capture=False, compile=False))
    assert relative(found("bfloat16", compile=compiled), eager) < rounding


@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda m: type(m).__name__)
def test_states_on_the_host_and_a_host_far_ahead_change_nothing(
    method: parlay.Method, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(method)
    assert relative(trained(method, store=kind, out=tmp_path), plain) < 1e-4
    call = Captured.__call__

    def late(self: Captured, *given: Any) -> Tensor:
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # some 10 ms, in which the host goes on
        return call(self, *given)

    monkeypatch.setattr(Captured, "__call__", late)
    monkeypatch.setattr(losses, "LOOK_EVERY", 3)
    assert relative(trained(method), plain) < 1e-4


# Processes over NCCL

HYBRID = {"schedule": "alternate:2:1"}
CASES = {
    2: {
        "al, downsampled, hybrid": Case(epochs=5, options={**HYBRID, "downsample": 2}),
        "penalty": Case(method=Penalty()),
        "replay": Case(network="no batch norm", method=Replay()),
        "three stages on two": Case(3, network="no batch norm", method=Replay(), options={"processes": 2}),
        "piped": Case(network="no batch norm", options={"schedule": "serial", "serial_phase": "pipeline"}),
    },
    3: {"al, hybrid": Case(3, epochs=5, options=HYBRID)},
}
SPOILED, STATISTICS = Spoiler(8, "nan"), ("running_mean", "running_var", "num_batches_tracked")


def on_gpus(ranks: int) -> tuple[str, dict[str, Ran]]:
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        found = {name: case.run("distributed", **EXACT) for name, case in CASES[ranks].items()}
        if ranks == 2:
            found["spoiled"] = STOPPED["al"].run("distributed", loss=replace(SPOILED), **EXACT)
    return dist.get_backend_config(), found


def learned(ran: Ran) -> Ran:
    """Without statistics: the host sends a few more steps ahead, which change no weight."""
    return replace(ran, values={name: value for name, value in ran.values.items() if not name.endswith(STATISTICS)})


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
@pytest.mark.parametrize("ranks", CASES)
def test_processes_over_nccl_train_as_one_process(ranks: int) -> None:
    answers = together(ranks, on_gpus, ranks, timeout=150, hosts=True)
    assert {backend for backend, _ in answers} == {"cpu:gloo,cuda:nccl"}
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        alone = {name: case.run(capture=False, **EXACT) for name, case in CASES[ranks].items()}
        spoiled = STOPPED["al"].run(capture=False, loss=replace(SPOILED), **EXACT)
    for _, found in answers:
        for name, ran in alone.items():
            assert found[name].status == ran.status == "finished"
            assert off(found[name], ran) < 1e-3, name  # algorithms of convolutions may differ by the processes
        if ranks == 2:
            assert (found["spoiled"].status, found["spoiled"].message) == ("diverged", spoiled.message)
            assert off(learned(found["spoiled"]), learned(spoiled)) < 1e-3
