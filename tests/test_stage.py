"""A stage in mixed precision: copies of the weights, and the same numbers as autocast makes of them."""

import pytest
import torch
from torch import Tensor, nn

import problems
from parlay.stage import Stage

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
        stage._copies = stage._low_precision()
    return stage


def trained(stage: Stage, micro_batches: int = 1) -> list[Tensor]:
    images, _ = problems.images(8)
    for _ in range(3):
        outputs = [stage.forward(part) for part in images.chunk(micro_batches)]
        for output in outputs:
            output.float().square().mean().backward()
        stage.apply()
    return [weight.detach().clone() for weight in stage.parameters.values()]


def test_copies_in_low_precision_train_bit_for_bit_as_autocast_does() -> None:
    stage = made(copies=True)
    assert len(stage._copies) > 10
    assert not any("2.one.weight" in name or "2.other.weight" in name for name in stage._copies)
    plain = trained(made(copies=False))
    assert all(torch.equal(a, b) for a, b in zip(trained(stage), plain, strict=True))


def test_several_forward_passes_may_come_before_their_backward_passes() -> None:
    plain, copied = trained(made(copies=False), 2), trained(made(copies=True), 2)
    whole = [torch.cat([weight.flatten() for weight in weights]) for weights in (copied, plain)]
    assert problems.relative(*whole) < 0.01  # the gradients of the micro-batches are added in low precision


def test_gradients_of_a_step_that_is_given_up_are_forgotten() -> None:
    stage = made(copies=True)
    stage.forward(problems.images(8)[0]).float().sum().backward()
    assert stage.gradients()
    stage.forget_gradients()
    assert not stage.gradients()


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_a_learning_rate_is_a_share_of_the_first(rate: float | Tensor) -> None:
    stage = made(copies=False)
    stage.set_rate(rate)
    assert stage.learning_rate == pytest.approx(0.05)
