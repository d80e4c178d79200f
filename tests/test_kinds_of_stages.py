"""Stages of every kind, by every method: without parameters, frozen, with a first layer that works in place."""

import pytest
import torch
from torch import Tensor, nn

import parlay
import problems
from parlay import DNI, AugmentedLagrangian, AuxNet, Delayed, Local, Penalty, Replay
from parlay.coupling import Method
from problems import images, trainer

METHODS = [AugmentedLagrangian(), Penalty(), Penalty(order="joint"), Replay(), Delayed(), Local(), DNI(), AuxNet()]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: getattr(m, "order", type(m).__name__))


def sgd(weights: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


@methods
@pytest.mark.parametrize("cuts", [(1, 3), (2, 3), (3, 4), (2, 5)])
def test_stages_without_parameters_train_with_the_others(method: Method, cuts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Softsign(), nn.Linear(6, 3), nn.LogSoftmax(1))
    before, data = problems.weights(model), images(20)
    cut = parlay.partition(model, 3, data[0], by=cuts)
    made = trainer(cut, method, loss=nn.NLLLoss(), schedule="parallel", batch_size=8, optimizer=sgd)
    assert made.fit(data, epochs=4).status == "finished"
    assert not torch.equal(problems.weights(model), before)


@methods
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_stage_keeps_its_weights_and_passes_the_signal_on(method: Method, frozen: int) -> None:
    data, model = images(24), problems.dense()
    cut = parlay.partition(model, 3, data[0])
    cut.stages[frozen].requires_grad_(False)
    before = [problems.weights(stage) for stage in cut.stages]
    trainer(cut, method, batch_size=8, schedule="parallel", optimizer=sgd).fit(data, epochs=5)
    same = [torch.equal(problems.weights(stage), old) for stage, old in zip(cut.stages, before, strict=True)]
    assert same == [k == frozen for k in range(3)]


@methods
def test_a_stage_that_begins_in_place_is_the_same_as_one_that_does_not(method: Method) -> None:
    def network(inplace: bool) -> nn.Sequential:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 6), nn.ReLU(inplace), nn.Linear(6, 6), nn.ReLU(inplace), nn.Linear(6, 3))
        return nn.Sequential(nn.Flatten(), *layers)

    def trained(inplace: bool) -> Tensor:
        data, model = images(20), network(inplace)
        cut = parlay.partition(model, 3, data[0], by=(2, 4))
        trainer(cut, method, batch_size=8, schedule="parallel", optimizer=sgd).fit(data, epochs=3)
        return problems.weights(model)

    assert torch.equal(trained(True), trained(False))
