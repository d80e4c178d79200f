"""Judging a network: losses and accuracy are exact means over samples, batch statistics exact means over batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.evaluate import estimate_statistics, evaluate, in_float32, unchanged_buffers
from parlay.trainer import _autocast

SIZES = [7, 7, 1, 4]  # unequal batches


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(2)


def samples(classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(SIZES), 5), torch.randint(classes, (sum(SIZES),))


def in_batches(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(torch.split(tensor, SIZES) for tensor in tensors), strict=True))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.ReLU(), nn.Linear(4, 3))


# Losses and accuracy


def test_loss_and_accuracy_over_unequal_batches_are_those_over_all_samples_at_once() -> None:
    model, (inputs, targets) = nn.Linear(5, 3), samples()
    scores = evaluate(model, nn.CrossEntropyLoss(), in_batches(inputs, targets))
    outputs = model(inputs).detach()
    assert scores["loss"] == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-6)
    assert scores["accuracy"] == pytest.approx(100 * int((outputs.argmax(1) == targets).sum()) / len(targets), rel=1e-6)


def test_all_right_is_a_hundred_percent_and_all_wrong_is_none() -> None:
    _, targets = samples()
    right = F.one_hot(targets, 3).float()
    assert evaluate(lambda x: x, nn.CrossEntropyLoss(), in_batches(right, targets))["accuracy"] == 100
    assert evaluate(lambda x: -x, nn.CrossEntropyLoss(), in_batches(right, targets))["accuracy"] == 0


def test_a_class_per_pixel_has_an_accuracy_over_the_pixels() -> None:
    outputs, targets = torch.randn(sum(SIZES), 3, 2, 2), torch.randint(3, (sum(SIZES), 2, 2))
    scores = evaluate(lambda x: x, nn.CrossEntropyLoss(), in_batches(outputs, targets))
    assert scores["accuracy"] == pytest.approx(100 * float((outputs.argmax(1) == targets).float().mean()), rel=1e-6)


def test_targets_that_are_no_classes_have_a_loss_and_no_accuracy() -> None:
    inputs, _ = samples()
    scores = evaluate(lambda x: 2 * x, nn.MSELoss(), in_batches(inputs, inputs))
    assert scores == {"loss": pytest.approx(float(inputs.square().mean()), rel=1e-6)}


def test_a_network_with_several_outputs_has_no_accuracy() -> None:
    inputs, targets = samples()
    scores = evaluate(lambda x: (x, x), lambda both, _: both[0].mean() + both[1].mean(), in_batches(inputs, targets))
    assert scores == {"loss": pytest.approx(float(2 * inputs.mean()), rel=1e-5)}


def test_an_evaluation_builds_no_graph() -> None:
    seen = []
    evaluate(lambda x: seen.append(nn.Linear(5, 3)(x)) or seen[-1], nn.CrossEntropyLoss(), in_batches(*samples()))
    assert not any(output.requires_grad for output in seen)


def test_mixed_precision_ends_at_the_loss() -> None:
    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    assert in_float32(half).dtype == torch.float32
    assert in_float32(whole) is whole
    assert [part.dtype for part in in_float32([half, whole])] == [torch.float32, torch.int64]


# Batch statistics


def test_estimated_statistics_are_the_exact_mean_over_the_batches() -> None:
    model, (inputs, _) = normed(), samples()
    parts = [part for part in torch.split(inputs, SIZES) if len(part) > 1]
    model[1].running_mean.fill_(100.0)  # what stood there before is forgotten
    estimate_statistics(model, model, parts)
    features = [model[0](part).detach() for part in parts]
    torch.testing.assert_close(model[1].running_mean, torch.stack([f.mean(0) for f in features]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([f.var(0) for f in features]).mean(0))


def test_estimation_leaves_weights_and_momentum_as_they_were() -> None:
    model, (inputs, _) = normed(), samples()
    before = [weight.clone() for weight in model.parameters()]
    estimate_statistics(model, model, [inputs])
    assert model[1].momentum == 0.3
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_a_network_without_batch_statistics_is_not_run_at_all() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    estimate_statistics(model, pytest.fail, [torch.randn(4, 5)])


def test_buffers_are_put_back_bit_for_bit() -> None:
    model, (inputs, _) = normed(), samples()
    model(inputs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with unchanged_buffers(model):
        estimate_statistics(model, model, [2 * inputs, 3 * inputs])
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_buffers_are_put_back_after_an_error_too() -> None:
    model, (inputs, _) = normed(), samples()
    before = model[1].running_mean.clone()

    def pass_and_fail() -> None:
        with unchanged_buffers(model):
            model(inputs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pass_and_fail()
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize(("supported", "low"), [(True, torch.bfloat16), (False, None)])
def test_a_gpu_without_bfloat16_computes_in_float32_unless_it_is_asked_for(
    supported: bool, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)  # noqa: ARG005
    gpu = [torch.device("cuda", 0)]
    assert _autocast("auto", gpu) == low
    assert _autocast("bfloat16", gpu) == torch.bfloat16
    assert _autocast("auto", [torch.device("cpu")]) is None
