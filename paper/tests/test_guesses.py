"""Synthetic gradients and generated states: exact guesses give the gradients of backpropagation, and are learned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import parlay
import problems
from parlay import InputError
from parlay.engine.engine import Engine
from parlay.errors import Diverged
from parlay.partitioning import Partition
from parlay_paper.methods.auxnet import AuxNet, GeneratingWorker, generator
from parlay_paper.methods.dni import DNI, GuessingWorker, bounded
from problems import NETWORKS, backpropagate, batch, engine, images, recorded, relative, trainer
from runs import parlay as command
from runs import summary, train

ROWS, BATCHES = 6, 5
ROUNDING = 2e-5
STEPS = [batch(torch.arange(n * ROWS, (n + 1) * ROWS), step=n) for n in range(BATCHES)]
cases = pytest.mark.parametrize(
    ("network", "stages", "factor"), [("batch norm", 2, 2), ("no batch norm", 3, 1), ("batch norm", 3, 1)]
)
both = pytest.mark.parametrize("method", [DNI(), AuxNet()], ids=lambda method: type(method).__name__)


def problem(network: str, stages: int) -> tuple[Partition, tuple[Tensor, Tensor]]:
    data = images(ROWS * BATCHES)
    return parlay.partition(NETWORKS[network](), stages, data[0][:2]), data


def running(cut: Partition, data: tuple[Tensor, Tensor], method: parlay.Method, to: Path, **options: Any) -> Engine:
    return engine(cut, data, method, folder=to, **{"batch_size": ROWS, **options})


def still(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.0)


# Synthetic gradients


@cases
def test_with_the_true_adjoint_as_its_guess_a_stage_has_the_gradient_of_backpropagation(
    network: str, stages: int, factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, data = problem(network, stages)
    made = running(cut, data, DNI(), tmp_path, downsample=factor)
    plain = [backpropagate(cut, data[0][b.ids], data[1][b.ids], factor) for b in STEPS]
    for k, worker in list(made.own.workers.items())[:-1]:
        assert isinstance(worker, GuessingWorker)

        def oracle(output: Tensor, labels: Tensor, scale: Tensor, k: int = k) -> Tensor:  # noqa: ARG001
            (right,) = [
                one
                for b, one in zip(STEPS, plain, strict=True)
                if torch.equal(data[1][b.ids], labels) and relative(output, one.outputs[k]) < 1e-5
            ]
            return right.adjoints[k].requires_grad_()

        monkeypatch.setattr(worker, "guess", oracle)
        worker.error.zero_()
        worker.scale.fill_(1e6)
    for step, each in enumerate(STEPS):
        made.parallel_step(each)
        for k in range(min(stages, step + 1)):
            assert relative(recorded(made, k), plain[step - k].gradients[k]) < ROUNDING
    assert made.totals.losses()[:-1] == pytest.approx([0.0] * (stages - 1), abs=1e-8)  # there is nothing to learn


def test_a_guess_is_no_larger_than_what_guesses_have_explained() -> None:
    guess = torch.randn(ROWS, 6, 7, 7)
    scale, error = torch.tensor(2.0), torch.tensor(0.75)
    assert not bounded(guess, torch.zeros(()), torch.ones(())).any()  # nothing so far
    assert bounded(5 * guess, scale, error).square().mean().sqrt() == pytest.approx(1.0)
    assert torch.equal(bounded(guess / 5, scale, error), guess / 5)


@pytest.mark.parametrize("condition", ["labels", "none"])
def test_the_synthesiser_learns_the_adjoints_of_a_fixed_problem(condition: str, tmp_path: Path) -> None:
    cut, data = problem("no batch norm", 3)
    made = running(cut, data, DNI(condition, synthesiser_lr=1e-2), tmp_path, optimizer=still)
    workers = [worker for worker in made.own.workers.values() if isinstance(worker, GuessingWorker)]
    assert [float(worker.error) for worker in workers] == [1.0, 1.0]
    for _ in range(20):
        for each in STEPS:
            made.parallel_step(each)
    # the labels are random: without them there is nothing to see of the last stage's adjoints in the features
    assert float(workers[1].error) < (0.25 if condition == "labels" else 1.01)
    assert float(workers[0].error) < 0.5


def test_without_classes_a_synthesiser_is_not_told_labels(tmp_path: Path) -> None:
    regression = problems.Regression.make(0.1)
    cut = parlay.partition(regression.network(), 3, regression.inputs)
    options = {"loss": problems.squared_error, "batch_size": 8}
    with pytest.raises(InputError, match="write condition none"):
        running(cut, regression.data, DNI(), tmp_path, **options)
    running(cut, regression.data, DNI(condition="none"), tmp_path, **options).parallel_step(batch(8))


# Generated states


@cases
@pytest.mark.parametrize("beta", [0.3, 3.0])
def test_with_exact_generators_every_stage_has_the_gradient_of_backpropagation_of_every_batch_once(
    network: str, stages: int, factor: int, beta: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, data = problem(network, stages)
    made = running(cut, data, AuxNet(beta), tmp_path, downsample=factor)
    plain = [backpropagate(cut, data[0][b.ids], data[1][b.ids], factor) for b in STEPS]
    for k, worker in list(made.own.workers.items())[1:]:

        def oracle(inputs: Tensor, k: int = k) -> Tensor:
            (right,) = [b for b, each in enumerate(STEPS) if torch.equal(data[0][each.ids], inputs)]
            return plain[right].outputs[k - 1].clone()

        monkeypatch.setattr(worker, "generated", oracle)
        monkeypatch.setattr(worker, "correlation", lambda: torch.tensor(1.0))
    trained: list[list[int]] = [[] for _ in range(stages)]
    for step in range(BATCHES + stages - 1):
        made.steps.step(STEPS[step] if step < BATCHES else None, made.totals)
        for k in range(stages):
            if 0 <= (its := step - (stages - 1 - k)) < BATCHES:
                trained[k].append(its)
                assert relative(recorded(made, k), plain[its].gradients[k]) < 10 * ROUNDING
    made.finish()
    assert trained == [list(range(BATCHES))] * stages
    assert made.totals.counts == [ROWS * BATCHES] * stages


@pytest.mark.parametrize(("network", "factor"), [("batch norm", 1), ("no batch norm", 2)])
def test_a_stage_is_pulled_towards_the_displaced_state_as_the_generator_is_trusted(
    network: str, factor: int, tmp_path: Path
) -> None:
    """c b ‖x − λ*‖² with λ* = λ − p / (2b); but channels become no larger or smaller by it."""
    cut, data = problem(network, 2)
    made = running(cut, data, AuxNet(beta=2.0), tmp_path, downsample=factor)
    (after,), last = made.own.links, made.own.workers[1]
    assert isinstance(last, GeneratingWorker)
    last.error.fill_(0.36)
    c, u, targets = 0.8, data[0][STEPS[0].ids], data[1][STEPS[0].ids]
    state = last.generated(u).clone().requires_grad_()
    below, above = (copy.deepcopy(stage).train() for stage in cut.stages)
    loss = nn.functional.cross_entropy(above(after.up(state).contiguous(memory_format=torch.channels_last)), targets)
    *wanted, p = torch.autograd.grad(loss, [*above.parameters(), state])
    made.parallel_step(STEPS[0])
    assert relative(recorded(made, 1), c * torch.cat([g.flatten() for g in wanted])) < ROUNDING
    b = 2.0 / (state[0].numel() * state.detach().square().mean())
    target = state.detach() - ROWS * p / (2 * b)
    x = after.down(below(u.contiguous(memory_format=torch.channels_last)))
    local = c * b * (x - target).square().sum() / ROWS
    (pull,) = torch.autograd.grad(local, x, retain_graph=True)
    for channel in range(x.shape[1]):
        size = x[:, channel].detach()
        pull[:, channel] -= (pull[:, channel] * size).sum() / size.square().sum() * size
    wanted = torch.autograd.grad(x, list(below.parameters()), pull)
    made.parallel_step(STEPS[1])
    assert relative(recorded(made, 0), torch.cat([g.flatten() for g in wanted])) < 10 * ROUNDING
    assert made.totals.losses()[0] == pytest.approx(float(local.detach()), rel=1e-4)


def test_what_a_generator_learns_is_the_updated_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of ‖g − (x − c p / (2b))‖² / ‖x‖², two batches after the state was used."""
    cut, data = problem("no batch norm", 2)
    made = running(cut, data, AuxNet(beta=2.0), tmp_path)
    worker = made.own.workers[1]
    assert isinstance(worker, GeneratingWorker)
    side = worker.side
    assert side is not None
    worker.error.fill_(0.36)
    its = STEPS[0].ids
    state = worker.generated(data[0][its]).requires_grad_()
    nn.functional.cross_entropy(cut.stages[1](state), data[1][its]).backward()
    assert state.grad is not None
    d = 0.8 * ROWS * state.grad * state[0].numel() * state.detach().square().mean() / (2 * 2.0)
    x = cut.stages[0](data[0][its]).detach()
    network = copy.deepcopy(side.module)
    loss = (network(data[0][its]) - (x - d)).square().sum() / x.square().sum()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])
    cut.model.zero_grad()
    learned: list[Tensor] = []
    apply = side.apply
    monkeypatch.setattr(
        side, "apply", lambda: (learned.append(torch.cat([g.flatten() for g in side.gradients()])), apply())
    )
    for each in STEPS[:3]:
        made.parallel_step(each)
    assert len(learned) == 1
    assert relative(learned[0], wanted) < 10 * ROUNDING


def test_generators_are_trusted_more_and_more(tmp_path: Path) -> None:
    """At a large β, where the updated state is next to x, of a fixed network."""
    cut, data = problem("batch norm", 2)
    made = running(cut, data, AuxNet(beta=1000.0), tmp_path, optimizer=still)
    workers = [worker for worker in made.own.workers.values() if isinstance(worker, GeneratingWorker)]
    assert [float(worker.correlation()) for worker in workers] == [1.0, 0.0]
    for _ in range(12):
        for each in STEPS:
            made.parallel_step(each)
    assert all(float(worker.correlation()) > 0.5 for worker in workers)  # the images are noise


@pytest.mark.parametrize("inputs", [(3, 32, 32), (1, 8, 5), (20,)])
@pytest.mark.parametrize("state", [(16, 8, 8), (8, 7, 7), (4, 1, 1), (6, 40, 3), (7,), (5, 7)])
def test_a_generator_makes_states_of_any_shape(inputs: tuple[int, ...], state: tuple[int, ...]) -> None:
    for rows in (1, 4):
        assert generator(inputs, state)(torch.randn(rows, *inputs)).shape == (rows, *state)


# Whole runs


@both
def test_side_networks_are_left_behind(method: parlay.Method, tmp_path: Path) -> None:
    words = "--method", type(method).__name__.lower(), "--schedule", "parallel", "--epochs", 3
    assert train(tmp_path, *words) == 0
    plain = parlay.build_model("resnet8", (1, 8, 8), 10).state_dict()
    assert load_file(tmp_path / "model.safetensors").keys() == plain.keys()
    assert summary(tmp_path)["staleness"] == method.delay(3)


@both
@pytest.mark.parametrize("samples", [17, 5, 1])
def test_the_last_incomplete_batch_is_trained_on(method: parlay.Method, samples: int) -> None:
    data, model = images(samples), problems.without_norm()
    cut = parlay.partition(model, 3, data[0][:2])
    options = {"batch_size": 8, "schedule": "parallel", "optimizer": lambda w: torch.optim.SGD(w, 0.05, 0.9)}
    assert trainer(cut, method, **options).fit(data, epochs=3).status == "finished"
    assert all(torch.isfinite(w).all() for w in model.parameters())


@both
def test_tokens_have_adjoints_to_guess_and_no_states_to_generate(method: parlay.Method) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    torch.manual_seed(0)
    tokens, classes = torch.randint(11, (20, 5)), torch.randint(3, (20,))
    middle = (problems.Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())) for _ in range(3))
    model = nn.Sequential(nn.Embedding(11, 8), *middle, nn.Sequential(Mean(), nn.Linear(8, 3)))
    options = {"batch_size": 8, "schedule": "parallel", "optimizer": lambda w: torch.optim.SGD(w, 0.05, 0.9)}
    made = trainer(parlay.partition(model, 3, tokens[:2]), method, **options)
    if isinstance(method, AuxNet):
        with pytest.raises(InputError, match="inputs that are numbers: write method replay"):
            made.fit((tokens, classes), epochs=3)
    else:
        assert made.fit((tokens, classes), epochs=3).status == "finished"


@both
def test_a_network_in_float64_is_trained(method: parlay.Method) -> None:
    inputs, targets = images(20)
    model = problems.without_norm().double()
    cut = parlay.partition(model, 3, inputs.double()[:2])
    options = {"batch_size": 8, "schedule": "parallel", "optimizer": lambda w: torch.optim.SGD(w, 0.05, 0.9)}
    result = trainer(cut, method, **options).fit((inputs.double(), targets), epochs=3)
    assert result.status == "finished"
    assert {w.dtype for w in result.model.parameters()} == {torch.float64}


def test_states_are_generated_for_a_variational_autoencoder_too(tmp_path: Path) -> None:
    """Its targets are the images as they are augmented at each stage."""
    words = "--model resnet8-vae --method auxnet --schedule parallel --augment random --lr 0.001 --epochs 2"
    assert train(tmp_path, *words.split()) == 0


def test_a_loss_that_is_not_finite_is_named_before_any_update(tmp_path: Path) -> None:
    """Of the batch that a stage trains on now, not of the one that it learns from."""
    for method, k in ((DNI(), 0), (AuxNet(), 2)):
        cut, data = problem("no batch norm", 3)
        data[0][STEPS[3].ids] = float("nan")
        made = running(cut, data, method, tmp_path, optimizer=lambda w: torch.optim.SGD(w, 0.1))
        for each in STEPS[:3]:
            made.parallel_step(each)
        before = problems.weights(cut.model)
        named = rf"loss of stage {k} of 3 is nan in epoch 1, step 4 \(samples 18"
        with pytest.raises(Diverged, match=named):
            made.parallel_step(STEPS[3])
        assert torch.equal(problems.weights(cut.model), before)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_generated_states_learn_the_digits(stages: int, tmp_path: Path) -> None:
    """Serial training has 98.9 % after these six epochs."""
    words = "--dataset digits --model resnet8 --method auxnet --schedule parallel --epochs 6 --batch-size 32"
    assert command("train", *words.split(), "--stages", stages, "--device", "cpu", "--out", tmp_path) == 0
    assert summary(tmp_path)["test_accuracy"] > 85
