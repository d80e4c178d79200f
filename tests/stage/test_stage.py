"""A stage: low precision, its optimiser's rate and look ahead, compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import problems
from parlay import InputError, models
from parlay.stage.compiled import CompiledBlocks
from parlay.stage.precision import LowPrecision, autocast_dtype
from parlay.stage.stage import Stage

CPU = torch.device("cpu")


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.relu(self.one(x)))
        return out


def made(copies: bool) -> Stage:
    torch.manual_seed(0)
    module = nn.Sequential(problems.with_norm(), nn.Linear(problems.CLASSES, 6), Shared())
    stage = Stage(module, lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9), CPU, torch.bfloat16)
    if copies:  # made on GPUs alone
        stage._low = LowPrecision(module, stage.parameters, torch.bfloat16)
    return stage


def trained(stage: Stage, micro_batches: int = 1) -> Tensor:
    images, _ = problems.images(8)
    for _ in range(3):
        outputs = [stage.forward(part) for part in images.chunk(micro_batches)]
        for output in outputs:
            output.float().square().mean().backward()
        stage.apply()
    return problems.weights(stage.module)


def test_copies_in_low_precision_train_bit_for_bit_as_autocast_does() -> None:
    stage = made(copies=True)
    assert stage._low is not None
    assert len(stage._low.copies) > 10
    assert not any("2.one.weight" in name or "2.other.weight" in name for name in stage._low.copies)
    assert torch.equal(trained(stage), trained(made(copies=False)))
    # several forward passes before their backward passes: the gradients are added in low precision
    assert problems.relative(trained(made(copies=True), 2), trained(made(copies=False), 2)) < 0.01


@pytest.mark.parametrize(("supported", "low"), [(True, torch.bfloat16), (False, None)])
def test_a_gpu_without_bfloat16_computes_in_float32_unless_it_is_asked_for(
    supported: bool, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)  # noqa: ARG005
    gpu = torch.device("cuda", 0)
    assert [autocast_dtype("auto", gpu), autocast_dtype("bfloat16", gpu)] == [low, torch.bfloat16]
    assert autocast_dtype("auto", CPU) is None
    with pytest.raises(InputError, match="write auto, float32 or bfloat16"):
        autocast_dtype("half", CPU)


# The optimiser


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_rate_is_a_share_of_the_first_and_a_tensor_stays_the_same_tensor(lr: Any) -> None:
    stage = Stage(nn.Sequential(nn.Linear(3, 2)), lambda w: torch.optim.Adam(list(w), lr=lr), CPU, None)
    before = stage.optimiser.groups[0]["lr"]
    for share in (0.5, torch.tensor(0.25, dtype=torch.float64)):
        stage.optimiser.set_rate(share)
        assert stage.optimiser.rate == pytest.approx(0.1 * float(share))
    stage.optimiser.load(stage.optimiser.tensors())
    assert stage.optimiser.can_be_captured == isinstance(lr, Tensor)
    assert not isinstance(lr, Tensor) or stage.optimiser.groups[0]["lr"] is before


# Compiled blocks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.parametrize(("network", "narrow"), [("resnet8", True), ("wrn-10-10", False)])
def test_only_narrow_blocks_are_tuned(network: str, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_fx(graph: GraphModule, inputs: list[Tensor], **how: object) -> GraphModule:
        asked.append((max(value.shape[1] for value in inputs if value.dim() == 4), how))
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    module, x = models.build(network, (3, 32, 32), 10), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(CompiledBlocks(module)(x), module(x))
    assert len(asked) > 3
    assert all(bool(how) == (channels <= 64) for channels, how in asked)
    assert all(bool(how) for _, how in asked) == narrow
