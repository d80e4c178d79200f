"""A process per stage over NCCL gives the weights of one process, and stops before the same update.

NCCL refuses two processes on one GPU of a host. So that one GPU is enough, they pose as hosts of one GPU each
(NCCL_HOSTID): its transport between hosts then carries all that crosses an interface.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parlay.coupling import Replay
from ranks import together
from test_distributed import HYBRID, RED_BLACK, STOPPED, Case, Ran, Spoiler, off

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and NCCL"),
]
ON_A_GPU: dict[str, Any] = {
    "device": "cuda",
    "precision": "float32",
    "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9, fused=True),
}
TWO = {
    "al, downsampled, hybrid": Case(epochs=5, options={**HYBRID, "downsample": 2}),
    "red-black": Case(method=RED_BLACK),
    "replay": Case(network="no batch norm", method=Replay()),
    "piped": Case(network="no batch norm", options={"schedule": "serial"}),
}
CASES = {2: TWO, 3: {"al, hybrid": Case(3, epochs=5, options=HYBRID)}}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AT = 8  # the training step that is spoiled, the second of a parallel epoch
ROUNDING = 1e-3  # algorithms for convolutions may differ by the number of processes


def on_gpus(ranks: int) -> tuple[str, dict[str, Ran]]:
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        piped = {"piped": {"serial_phase": "pipeline", "micro_batches": 2}}
        found = {
            name: case.run("distributed", **ON_A_GPU, **piped.get(name, {})) for name, case in CASES[ranks].items()
        }
        if ranks == 2:
            found["spoiled"] = STOPPED.run("distributed", loss=Spoiler(AT, "nan"), **ON_A_GPU)
    return dist.get_backend_config(), found


def in_one_process(case: Case, **options: Any) -> Ran:
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        return case.run("in-process", capture=False, **ON_A_GPU, **options)


def learned(ran: Ran) -> Ran:
    """Without statistics: the host sends a few more steps ahead, which change no weight."""
    kept = {name: value for name, value in ran.values.items() if not name.endswith(STATISTICS)}
    return replace(ran, values=kept)


@pytest.mark.parametrize("ranks", CASES)
def test_processes_over_nccl_train_as_one_process(ranks: int) -> None:
    answers = together(ranks, on_gpus, ranks, timeout=150, hosts=True)
    assert {backend for backend, _ in answers} == {"cpu:gloo,cuda:nccl"}
    for name, case in CASES[ranks].items():
        alone = in_one_process(case)
        assert alone.status == "finished"
        for _, found in answers:
            assert found[name].status == "finished"
            assert off(found[name], alone) < ROUNDING, name
    if ranks == 2:
        alone = in_one_process(STOPPED, loss=Spoiler(AT, "nan"))
        for _, found in answers:
            assert found["spoiled"].status == alone.status == "diverged"
            assert found["spoiled"].message == alone.message
            assert off(learned(found["spoiled"]), learned(alone)) < ROUNDING
