"""Stopped and resumed, a run equals the same run uninterrupted, bit for bit: batches on their way, any optimiser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import AugmentedLagrangian, Delayed, InputError, Local, Penalty, Replay
from parlay.data import CropAndFlip
from rehearsed import small
from runs import Heard, kept, records

SAMPLES, EPOCHS = 44, 3  # six steps an epoch, the last one incomplete; S P P or S P S
slow = pytest.mark.slow


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3)


def run(
    out: Path,
    method: parlay.Method,
    stop_after: int = -1,
    resume: bool = False,
    network: Callable[[], nn.Sequential] = small,
    stages: int = 3,
    **options: Any,
) -> Heard:
    data, heard = problems.images(SAMPLES), Heard(stop_after)
    cut = parlay.partition(network(), stages, data[0][:2])
    given = {"schedule": "parallel", "optimizer": sgd, "batch_size": 8, **options}
    result = problems.trainer(cut, method, out=out, progress=heard, **given).fit(data, epochs=EPOCHS, resume=resume)
    assert result.status == ("finished" if stop_after < 0 else "interrupted")
    return heard


def assert_resumed_equals_uninterrupted(to: Path, stops: list[int], method: parlay.Method, **options: Any) -> None:
    run(to / "whole", method, **options)
    for n, stop in enumerate(stops):
        run(to / "parts", method, stop - sum(stops[:n]), resume=n > 0, **options)
    run(to / "parts", method, resume=True, **options)
    assert records(to / "parts") == records(to / "whole")
    one, other = kept(to / "parts"), kept(to / "whole")
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name].dtype == value.dtype
        assert torch.equal(one[name], value), name


@pytest.mark.parametrize(
    ("method", "stop", "options"),
    [
        *((Replay(), stop, {}) for stop in (7, 9)),
        *(pytest.param(Replay(), stop, {}, marks=slow) for stop in (6, 8, 10, 11, 12)),
        (Replay(accumulate=4), 9, {"schedule": "alternate:1:1"}),
        (Replay(predict=0.5), 10, {"downsample": 2, "clip": 0.3, "network": problems.without_norm}),
        (Delayed(), 8, {}),
        pytest.param(Delayed(), 12, {}, marks=slow),
        (Delayed(predict=0.5, accumulate=2), 10, {"schedule": "alternate:1:1"}),
        (Local(), 9, {}),
        (AugmentedLagrangian(), 9, {"store_dtype": "bfloat16", "store": "file"}),
        (Penalty(), 12, {"store": "host"}),
    ],
    ids=str,
)
def test_with_batches_on_their_way(method: parlay.Method, stop: int, options: dict[str, Any], tmp_path: Path) -> None:
    augment = CropAndFlip(2) if method.fresh_inputs else None
    assert_resumed_equals_uninterrupted(tmp_path, [stop], method, augment=augment, **options)


# Whatever an optimiser keeps


class Own(torch.optim.Optimizer):
    """Numbers in its state and groups, one in a tensor without dimensions, one per row, whole ones and long ones."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.02, "warmth": 0.5, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        (group,) = self.param_groups
        group["seen"] += 1
        group["warmth"] = 0.9 * group["warmth"] + 0.01 / group["seen"]
        for w in (w for w in group["params"] if w.grad is not None):
            first = {"calls": 0, "size": torch.ones((), dtype=torch.float64), "count": torch.tensor(0)}
            state = self.state[w] = self.state[w] or {**first, "rows": torch.zeros(len(w))}
            state["calls"] += 1
            state["count"] += 1
            state["size"].lerp_(w.grad.double().norm(), 1 / (2 + state["calls"]))
            state["rows"].lerp_(w.grad.reshape(len(w), -1).norm(dim=1), 0.1)
            scale = state["rows"].view(-1, *[1] * (w.dim() - 1)) + state["size"].float() + 1e-3
            w.sub_(w.grad / scale * group["lr"] * group["warmth"] * (1 + 0.1 * float(state["count"] % 3)))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "own": Own,
    "adam, rate in a tensor": lambda w: torch.optim.Adam(list(w), lr=torch.tensor(0.01), amsgrad=True),
    "fused adam": lambda w: torch.optim.AdamW(list(w), lr=0.01, fused=True),
    "factored": lambda w: torch.optim.Adafactor(list(w), lr=0.02),
    "nadam": lambda w: torch.optim.NAdam(list(w), lr=0.01),
    "asgd": lambda w: torch.optim.ASGD(list(w), lr=0.05, t0=3),
    "rprop": lambda w: torch.optim.Rprop(list(w), lr=0.001),
}


def partly_frozen() -> nn.Sequential:
    model = problems.without_norm()
    for block in (model[0], model[3]):
        next(block.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", [AugmentedLagrangian(), pytest.param(Replay(), marks=slow)])
def test_with_any_optimiser_and_weights_that_are_frozen(optimizer: str, method: parlay.Method, tmp_path: Path) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "network": partly_frozen, "schedule": "alternate:1:1"}
    assert_resumed_equals_uninterrupted(tmp_path, [9, 13], method, **options)
    state = {name for name in kept(tmp_path / "whole") if name.startswith("optimizer/")}
    assert state
    assert not any(name.startswith("optimizer/0.weight/") for name in state)


class Drifting(nn.Module):
    """Adds a tenth of the running mean of what it sees, which a saved model is without."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(), 0.1)
        return x + 0.1 * self.mean.clone()


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Replay(), Delayed()], ids=lambda m: type(m).__name__)
def test_with_buffers_that_are_not_persistent(method: parlay.Method, tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(block, Drifting()) for block in problems.dense()))

    assert_resumed_equals_uninterrupted(tmp_path, [8], method, network=network)
    assert "0.1.mean" not in network().state_dict()


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None: ...


def test_what_a_checkpoint_cannot_keep_is_refused_at_the_start(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sequential(nn.Tanh(), Extra(8, 3)))
    told = r"1 \(Extra\) has a get_extra_state, .* hold what it saves in buffers \(register_buffer\)"
    with pytest.raises(InputError, match=told):
        run(tmp_path, AugmentedLagrangian(), network=lambda: model, stages=2)


# Resumed as another run


LEFT_OUT = "of another cut or method: they are left out"
LOW = {"precision": "bfloat16"}


@pytest.mark.parametrize(
    ("method", "then", "now", "said"),
    [
        *((method, {}, LOW, LEFT_OUT) for method in (Replay(), Delayed())),
        (Replay(), LOW, {"precision": "float32"}, LEFT_OUT),
        *((Replay(), {}, {"method": method}, LEFT_OUT) for method in (Replay(accumulate=3), Delayed())),
        *((Replay(), {}, other, LEFT_OUT) for other in ({"downsample": 2}, {"stages": 2})),
        (AugmentedLagrangian(), {}, {"method": Penalty()}, "they are set anew"),
        *((AugmentedLagrangian(), {}, other, "") for other in ({"method": Replay()}, {"schedule": "serial"})),
    ],
    ids=str,
)
def test_what_does_not_fit_is_left_out_and_that_is_said_once(
    method: parlay.Method, then: dict[str, Any], now: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run(tmp_path, method, stop_after=9, **then)
    heard = run(tmp_path, **{"method": method, "resume": True, **now})
    assert sum(said in line for line in heard.lines) == bool(said), heard.lines
