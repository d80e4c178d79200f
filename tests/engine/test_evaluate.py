"""Losses and accuracy are exact means over samples, batch statistics exact means over batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.engine.evaluate import estimate_statistics, evaluate, unchanged_buffers

SIZES = [7, 7, 1, 4]  # unequal batches
CROSS = nn.CrossEntropyLoss()
INPUTS = torch.randn(sum(SIZES), 5, generator=torch.Generator().manual_seed(2))
TARGETS = torch.arange(sum(SIZES)) % 3


def in_batches(*tensors: Tensor) -> Any:
    return list(zip(*(torch.split(tensor, SIZES) for tensor in tensors), strict=True))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.ReLU(), nn.Linear(4, 3))


def test_loss_and_accuracy_over_unequal_batches_are_those_over_all_samples_at_once() -> None:
    pixels = torch.randn(sum(SIZES), 3, 2, 2)  # a class per pixel
    for outputs, targets in ((INPUTS[:, :3], TARGETS), (pixels, torch.randint(3, (sum(SIZES), 2, 2)))):
        found = evaluate(lambda x: x, CROSS, in_batches(outputs, targets))
        accuracy = 100 * float((outputs.argmax(1) == targets).float().mean())
        assert found["loss"] == pytest.approx(float(CROSS(outputs, targets)), rel=1e-6)
        assert found["accuracy"] == pytest.approx(accuracy, rel=1e-6)


def test_mixed_precision_ends_at_the_loss() -> None:
    seen: list[Tensor] = []
    right = F.one_hot(TARGETS, 3).bfloat16()
    for sign, percent in ((1, 100), (-1, 0)):
        batches = in_batches(sign * right, TARGETS)
        assert evaluate(lambda x: x, lambda x, y: seen.append(x) or CROSS(x, y), batches)["accuracy"] == percent
    assert {output.dtype for output in seen} == {torch.float32}


def test_targets_that_are_no_classes_and_several_outputs_have_a_loss_and_no_accuracy() -> None:
    assert evaluate(lambda x: x + 1, nn.L1Loss(), in_batches(INPUTS, INPUTS)) == {"loss": pytest.approx(1.0)}
    two = evaluate(lambda x: (x, x), lambda both, _: both[0].mean() + both[1].mean(), in_batches(INPUTS, TARGETS))
    assert two == {"loss": pytest.approx(2 * float(INPUTS.mean()), rel=1e-5)}


def test_estimated_statistics_are_the_exact_mean_over_the_batches_and_nothing_else_changes() -> None:
    model, parts = normed(), [part for part in torch.split(INPUTS, SIZES) if len(part) > 1]
    model[1].running_mean.fill_(100.0)  # what stood there before is forgotten
    before = [weight.clone() for weight in model.parameters()]
    estimate_statistics(model, model, parts)
    features = [model[0](part).detach() for part in parts]
    torch.testing.assert_close(model[1].running_mean, torch.stack([f.mean(0) for f in features]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([f.var(0) for f in features]).mean(0))
    assert model[1].momentum == 0.3
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    without = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    estimate_statistics(without, pytest.fail, parts)  # is not run at all


def test_buffers_are_put_back_bit_for_bit_after_an_error_too() -> None:
    model = normed()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ZeroDivisionError), unchanged_buffers(model):  # noqa: PT012
        estimate_statistics(model, model, [2 * INPUTS, 3 * INPUTS])
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        _ = 1 / 0
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
