"""A loss that is not finite stops all updates in its step, also where the host does not look at every one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Penalty
from parlay.coupling import DNI, AuxNet, Delayed, Local, Replay
from parlay.engines.base import Batch, raise_if_not_finite
from parlay.engines.guard import Guard, all_finite
from parlay.engines.in_process import InProcess
from parlay.errors import Diverged
from parlay.stage import Stage
from problems import images, relative, trainer

cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
AT = 20  # the parallel step that is spoiled: recorded ones have begun, and the host does not look for twelve more


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-2, fused=True),
        lambda weights: torch.optim.Adam(weights, lr=0.1, fused=True),
    ],
    ids=["sgd", "adam"],
)
def test_fused_optimisers_change_nothing_while_the_flag_is_up(make: object) -> None:
    stage = Stage(nn.Sequential(nn.Linear(3, 2)), make, torch.device("cpu"), None)
    flag = torch.zeros(())
    stage.hold_by(flag)

    def step() -> dict[str, Tensor]:
        stage.forward(torch.ones(4, 3)).sum().backward()
        stage.apply()
        return {name: value.clone() for name, value in stage.tensors().items()}

    before = step()
    flag.fill_(1)
    held = step()
    assert all(torch.equal(held[name], value) for name, value in before.items())
    flag.fill_(0)
    assert not torch.equal(step()["weights/0.weight"], held["weights/0.weight"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_host_looks_at_all_losses(bad: float) -> None:
    guard = Guard(None, torch.device("cpu"))
    for values, fine in (((1.0, 2.0), True), ((1.0, bad), False), ((bad, 1.0), False), ((3e38, 3e38), True)):
        for value in values:
            guard.seen(torch.tensor(value))
        assert guard.look() is fine
    assert not all_finite([torch.tensor(bad, dtype=torch.bfloat16)])


def test_a_stage_that_trains_before_its_first_answer_has_come_is_named_too() -> None:
    with pytest.raises(Diverged, match="the loss of stage 0 of 2 is nan in the first steps of a parallel phase"):
        raise_if_not_finite([None, None], [float("nan"), 0.0], 2)


@pytest.mark.parametrize(
    "method",
    [
        *(AugmentedLagrangian(), Penalty(), Penalty(order="joint"), None),
        *(Replay(), Delayed(), DNI(), Local(), AuxNet()),
    ],
    ids=["al", "red-black", "joint", "serial", "replay", "delayed", "dni", "local", "auxnet"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_a_run_ends_with_the_weights_from_before_the_loss_that_is_not_finite_recorded_or_not(
    method: object, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(capture: bool) -> tuple[str, Tensor]:
        """From a step on, an image of the batch has a pixel that is not a number."""
        name = "serial_step" if method is None else "parallel_step"
        take, calls = getattr(InProcess, name), []

        def spoiled(self: InProcess, batch: Batch) -> None:
            calls.append(batch)
            if len(calls) == AT:
                self.feed.split.inputs[batch.ids[0], 0, 0, 0] = float("nan")
            take(self, batch)

        data = images(61)  # 8 steps an epoch, the last one incomplete
        cut = parlay.partition(problems.without_norm(), 3, data[0][:2])
        options = {"method": method or AugmentedLagrangian(), "schedule": "parallel" if method else "serial"}
        options |= {"device": device, "precision": "float32", "capture": capture, "batch_size": 8}
        options |= {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9, fused=True)}
        with monkeypatch.context() as patched:
            patched.setattr(InProcess, name, spoiled)
            result = trainer(cut, **options).fit(data, epochs=8)
        assert result.status == "diverged"
        return result.message, problems.weights(cut.model)

    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        (said, eager), (said_too, recorded) = ended(capture=False), ended(capture=True)
    assert said == said_too
    assert torch.isfinite(recorded).all()
    assert relative(recorded, eager) < 1e-4
