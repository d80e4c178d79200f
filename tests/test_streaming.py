"""Streaming methods: states that live a few steps. Delays are counted, and with weights that stand still they are
backpropagation."""

import copy
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import parlay
import problems
from parlay.coupling import DNI, AugmentedLagrangian, AuxNet, Delayed, Local, Pair, Replay, Streaming
from parlay.coupling.auxnet import generator
from parlay.coupling.local import head
from parlay.coupling.replay import BOUND
from parlay.data import CropAndFlip
from parlay.engines.base import Batch, Totals
from parlay.engines.graphs import Graphed
from parlay.engines.in_process import InProcess
from parlay.engines.stream import Mail, Stop, Way
from parlay.errors import Diverged, InputError
from parlay.partitioning import Partition
from problems import NETWORKS, backpropagate, batch, engine, images, recorded, relative, trainer
from runs import SMALL, answer, kept, listen, records, resume, summary, train
from runs import parlay as parlay_command

ROWS, BATCHES = 6, 11
SAMPLES = ROWS * BATCHES - 2  # the last batch is incomplete
ROUNDING = 2e-5  # of float32, through a network with batch norm: 2e-6 is seen

ALL = [Replay(), Delayed(), Local(), DNI(), AuxNet()]
FED = ALL[:-1]
"""Methods that feed a stage with what the one before puts out."""
PLAIN = [Replay(beta=0.0), Delayed()]
"""Methods that find the gradient of backpropagation where nothing moves."""

cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
networks = pytest.mark.parametrize("network", NETWORKS)
stages = pytest.mark.parametrize("stages", [1, 2, 3, 5])
factors = pytest.mark.parametrize("factor", [1, 2])


def name(method: Streaming) -> str:
    return type(method).__name__


plain = pytest.mark.parametrize("method", PLAIN, ids=name)
everyone = pytest.mark.parametrize("method", ALL, ids=name)
fed = pytest.mark.parametrize("method", FED, ids=name)


def sgd(weights: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3)


def problem(network: str, stages: int) -> tuple[Partition, tuple[Tensor, Tensor]]:
    data = images(SAMPLES)
    return parlay.partition(NETWORKS[network](), stages, data[0][:ROWS]), data


def steps(epoch: int = 0) -> list[Batch]:
    return [batch(ids, epoch, step) for step, ids in enumerate(torch.split(torch.arange(SAMPLES), ROWS))]


def running(cut: Partition, data: tuple[Tensor, Tensor], method: Streaming, to: Path, **options: object) -> InProcess:
    return engine(cut, data, method, folder=to, **{"batch_size": ROWS, **options})


def run_out(made: InProcess, look: Callable[[], None]) -> None:
    """The steps of `finish`, one by one."""
    while not made._stream.empty:
        made._stream_step(made._stream, None)
        look()


# Which batch is where


def test_the_way_of_three_stages_of_replay() -> None:
    way = Way([4, 2, 0])
    a, b, c = steps()[:3]
    assert way.enter(a) == [Stop(a, 0, None, 1), Stop(None, 2, None, 0), Stop(None, 0, None, 0)]
    assert way.enter(b) == [Stop(b, 1, None, 2), Stop(a, 0, None, 1), Stop(None, 0, None, 0)]
    assert way.enter(c) == [Stop(c, 2, None, 3), Stop(b, 1, None, 2), Stop(a, 0, None, 0)]
    assert way.enter(None) == [Stop(None, 3, None, 4), Stop(c, 2, a, 0), Stop(b, 0, None, 0)]
    assert way.enter(None) == [Stop(None, 4, a, 0), Stop(None, 0, b, 1), Stop(c, 0, None, 0)]
    assert way.enter(None) == [Stop(None, 0, b, 1), Stop(None, 1, c, 2), Stop(None, 0, None, 0)]
    assert way.enter(None) == [Stop(None, 1, c, 2), Stop(None, 2, None, 0), Stop(None, 0, None, 0)]
    assert not way.batches
    assert way.enter(a)[0] == Stop(a, 0, None, 1)  # and again from the beginning


def test_the_way_of_three_stages_upwards() -> None:
    way = Way([0, 2, 2], upwards=True)
    a, b = steps()[:2]
    assert way.enter(a) == [Stop(None, 0, None, 0), Stop(None, 2, None, 0), Stop(a, 0, None, 1)]
    assert way.enter(b) == [Stop(None, 0, None, 0), Stop(a, 0, None, 1), Stop(b, 1, None, 2)]
    assert way.enter(None) == [Stop(a, 0, None, 0), Stop(b, 1, None, 2), Stop(None, 2, a, 0)]
    assert way.enter(None) == [Stop(b, 0, None, 0), Stop(None, 2, a, 0), Stop(None, 0, b, 1)]
    assert way.enter(None) == [Stop(None, 0, None, 0), Stop(None, 0, b, 1), Stop(None, 1, None, 2)]
    assert not way.batches


@stages
@plain
def test_the_delay_is_two_steps_for_every_stage_behind(method: Streaming, stages: int) -> None:
    assert [method.delay(k, stages) for k in range(stages)] == [2 * (stages - 1 - k) for k in range(stages)]
    assert method.staleness(stages) == 2 * (stages - 1)


# Transparency


@networks
@stages
@factors
@plain
def test_with_frozen_weights_every_stage_has_the_gradient_of_backpropagation_of_every_batch_once(
    method: Streaming, network: str, stages: int, factor: int, tmp_path: Path
) -> None:
    cut, data = problem(network, stages)
    made = running(cut, data, method, tmp_path, downsample=factor)
    wanted = [backpropagate(cut, data[0][b.ids], data[1][b.ids], factor).gradients for b in steps()]
    trained: list[list[int]] = [[] for _ in range(stages)]
    step = 0

    def look() -> None:
        nonlocal step
        for k in range(stages):
            late = step - 2 * (stages - 1) + k  # the batch whose turn it is
            if 0 <= late < BATCHES:
                trained[k].append(late)
                assert relative(recorded(made, k), wanted[late][k]) < ROUNDING
            else:
                assert recorded(made, k) is None or (late >= BATCHES and trained[k][-1] == BATCHES - 1)
        step += 1

    for each in steps():
        made.parallel_step(each)
        look()
    run_out(made, look)
    assert trained == [list(range(BATCHES))] * stages
    assert made.totals.counts == [SAMPLES] * stages


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_an_adjoint_is_shrunk_at_every_interface_that_it_crosses(stages: int, tmp_path: Path) -> None:
    cut, data = problem("no batch norm", stages)
    made = running(cut, data, Replay(shrink=0.5, predict=0.0), tmp_path)
    first = steps()[0]
    wanted = backpropagate(cut, data[0][first.ids], data[1][first.ids]).gradients
    found: dict[int, Tensor] = {}
    made.parallel_step(first)
    run_out(made, lambda: found.update({k: g for k in range(stages) if (g := recorded(made, k)) is not None}))
    for k in range(stages):
        assert relative(found[k], 0.5 ** (stages - 1 - k) * wanted[k]) < ROUNDING


@networks
@plain
def test_dropout_drops_the_same_when_a_batch_is_replayed(method: Streaming, network: str, tmp_path: Path) -> None:
    """With one stage it is the dropout of serial training; with three, the same of each stage."""

    def noisy() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.3)) for block in NETWORKS[network]()))

    data = images(SAMPLES)
    cut = parlay.partition(noisy(), 3, data[0][:ROWS])
    made = running(cut, data, method, tmp_path)
    first, found = steps()[0], {}
    made.parallel_step(first)
    run_out(made, lambda: found.update({k: g for k in range(3) if (g := recorded(made, k)) is not None}))
    made.totals = Totals()
    made.serial_step(first)
    for k in range(3):
        assert relative(found[k], recorded(made, k)) < ROUNDING


@fed
@stages
def test_batch_statistics_are_counted_once_a_batch(method: Streaming, stages: int, tmp_path: Path) -> None:
    cut, data = problem("batch norm", stages)
    made = running(cut, data, method, tmp_path, optimizer=lambda weights: torch.optim.SGD(weights, 0.0, 0.9))
    for each in steps():
        made.parallel_step(each)
    made.finish()
    other, _ = problem("batch norm", 1)
    other.model.train()
    for each in steps():
        other.model(data[0][each.ids].contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(problems.statistics(cut.model), problems.statistics(other.model))


def fitted(model: nn.Sequential, stages: int, method: Streaming | None, schedule: str, **options: object) -> Tensor:
    data = images(21)
    cut = parlay.partition(model, stages, data[0][:2])
    given = {"augment": CropAndFlip(2), "batch_size": 8, "seed": 5, "schedule": schedule, **options}
    assert trainer(cut, method, **given).fit(data, epochs=3).status == "finished"
    return torch.cat([problems.weights(model), problems.statistics(model)])


@networks
@everyone
def test_one_stage_is_serial_training_with_augmentation_bit_for_bit(network: str, method: Streaming) -> None:
    serial = fitted(NETWORKS[network](), 1, None, "serial")
    assert torch.equal(fitted(NETWORKS[network](), 1, method, "parallel"), serial)


@everyone
def test_several_stages_are_another_method_and_augmentation_matters(method: Streaming) -> None:
    serial = fitted(problems.without_norm(), 3, None, "serial")
    ours = fitted(problems.without_norm(), 3, method, "parallel")
    assert not torch.equal(ours, serial)
    assert not torch.equal(fitted(problems.without_norm(), 3, method, "parallel", augment=None), ours)


# Every sample once an epoch


class Counted(torch.optim.SGD):
    """Counts its steps."""

    def __init__(self, weights: object) -> None:
        super().__init__(weights, lr=0.01, momentum=0.9)
        self.steps = 0

    def step(self, closure: object = None) -> None:  # noqa: ARG002
        self.steps += 1
        super().step()


@pytest.mark.parametrize("method", [Replay(), Delayed(), Local()], ids=name)
@pytest.mark.parametrize(
    ("schedule", "phases"),
    [("parallel", "sppppp"), ("alternate:2:1", "spsppspp"), ("tail:2:1", "sppppss"), ("alternate:1:1", "sspsps")],
)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("samples", [20, 17, 8, 3])
def test_every_stage_trains_on_every_sample_once_an_epoch(
    method: Streaming, schedule: str, phases: str, stages: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an epoch has fewer batches than are on their way."""
    data, model = images(samples), problems.dense(blocks=4)
    trained: list[list[Tensor]] = [[] for _ in range(stages)]
    enter = Way.enter

    def seen(self: Way, one: Batch | None) -> list[Stop]:
        stops = enter(self, one)
        for k, (stop, lag) in enumerate(zip(stops, self.lags, strict=True)):
            if (its := stop.trained(lag)) is not None:
                trained[k].append(its.ids)
        return stops

    monkeypatch.setattr(Way, "enter", seen)
    cut = parlay.partition(model, stages, data[0][:2])
    result = trainer(cut, method, schedule=schedule, batch_size=8, optimizer=sgd).fit(data, epochs=len(phases))
    parallel = sum(row["phase"] == "parallel" for row in result.records)
    assert "".join(row["phase"][0] for row in result.records) == phases
    for k in range(stages):
        assert torch.cat(trained[k]).bincount(minlength=samples).tolist() == [parallel] * samples


def test_a_phase_that_an_adaptive_schedule_ends_is_drained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decided after the epoch: the last batches are trained on before the serial epoch that follows."""
    trained: list[list[Tensor]] = [[] for _ in range(3)]
    enter = Way.enter

    def seen(self: Way, one: Batch | None) -> list[Stop]:
        stops = enter(self, one)
        for k, (stop, lag) in enumerate(zip(stops, self.lags, strict=True)):
            trained[k].extend([its.ids] if (its := stop.trained(lag)) is not None else [])
        return stops

    monkeypatch.setattr(Way, "enter", seen)
    monkeypatch.setattr("parlay.run.loop.healthy", lambda *_: False)
    data = images(20)
    cut = parlay.partition(problems.dense(), 3, data[0][:2])
    result = trainer(cut, Replay(), schedule="adaptive", batch_size=8, optimizer=sgd).fit(data, epochs=5)
    assert "".join(row["phase"][0] for row in result.records) == "spsps"
    for k in range(3):
        assert torch.cat(trained[k]).bincount(minlength=20).tolist() == [2] * 20


@pytest.mark.parametrize("stages", [2, 3, 5])
@plain
def test_the_first_gradient_of_a_phase_is_that_of_backpropagation_at_every_stage(
    method: Streaming, stages: int, tmp_path: Path
) -> None:
    """Also where weights move, because none moves before its first answer has come."""
    cut, data = problem("no batch norm", stages)
    made = running(cut, data, method, tmp_path, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5))
    wanted = backpropagate(cut, data[0][:ROWS], data[1][:ROWS]).gradients
    before = [problems.weights(stage) for stage in cut.stages]
    for step, each in enumerate(steps()[: 2 * stages - 1]):
        made.parallel_step(each)
        k = 2 * (stages - 1) - step
        for j in range(stages):
            moved = before[j] - problems.weights(cut.stages[j])
            if j < k:
                assert not moved.any()
            elif j == k:
                assert relative(moved / 0.5, wanted[j]) < 1e-4


@everyone
def test_updates_are_as_many_as_those_of_serial_training(method: Streaming) -> None:
    made: list[Counted] = []

    def counting(weights: object) -> Counted:
        made.append(Counted(weights))
        return made[-1]

    data = images(21)
    cut = parlay.partition(problems.dense(), 3, data[0][:2])
    trainer(cut, method, schedule="alternate:2:1", batch_size=8, optimizer=counting).fit(data, epochs=5)
    of_stages = made[:3]  # those of networks beside them come later
    assert [one.steps for one in of_stages] == [15, 15, 15]


# Against plain loops


def reference(cut: Partition, data: tuple[Tensor, Tensor], method: Replay | Delayed, sgd: dict[str, float]) -> Tensor:
    """Replay and delayed gradients as one would write them down: dictionaries by batch, nothing reused.

    Spike compensation is that of Kosson et al. 2021, w − lr (a v + b g).
    """
    blocks, count = cut.stages, len(cut)
    ids = torch.split(torch.arange(SAMPLES), ROWS)
    weights = [{n: w.detach().clone() for n, w in stage.named_parameters()} for stage in blocks]
    momenta = [{n: torch.zeros_like(w) for n, w in own.items()} for own in weights]
    inputs: list[dict[int, Tensor]] = [{} for _ in blocks]
    then: list[dict[int, dict[str, Tensor]]] = [{} for _ in blocks]
    adjoints: list[dict[int, Tensor]] = [{} for _ in blocks]
    inputs[0] = {b: data[0][part] for b, part in enumerate(ids)}
    moved = [False] * count
    for step in range(len(ids) + 2 * (count - 1)):
        gradients: dict[int, dict[str, Tensor]] = {}
        for k, stage in enumerate(blocks):
            late = 2 * (count - 1 - k)
            if (b := step - k) in range(len(ids)):
                ahead = method.predict * late * sgd["lr"]
                then[k][b] = {n: w - ahead * momenta[k][n] for n, w in weights[k].items()}
                if k + 1 < count:
                    inputs[k + 1][b] = torch.func.functional_call(stage, then[k][b], inputs[k][b]).detach()
            if (b := step - k - late) in range(len(ids)):
                used = {
                    n: w.clone().requires_grad_()
                    for n, w in (then[k][b] if type(method) is Delayed else weights[k]).items()
                }
                x = inputs[k][b].clone().requires_grad_()
                out = torch.func.functional_call(stage, used, x)
                if k + 1 == count:
                    loss = nn.functional.cross_entropy(out, data[1][ids[b]])
                else:
                    adjoint = adjoints[k][b]
                    if type(method) is Replay and method.beta > 0:
                        first = inputs[k + 1][b]
                        by, size = out.detach() - first, float(first.square().mean())
                        full = method.pull(late) / (first[0].numel() * size)
                        most = BOUND * len(x) * float(adjoint.norm()) / max(2 * float(by.norm()), 1e-12)
                        adjoint = adjoint + 2 * min(full, most) * by / len(x)
                    loss = (out * adjoint).sum()
                *found, p = torch.autograd.grad(loss, [*used.values(), x])
                gradients[k] = dict(zip(used, found, strict=True))
                if k > 0:
                    adjoints[k - 1][b] = method.shrink * p
        for k, found in gradients.items():
            moved[k] = True
            m, late = sgd["momentum"], method.compensate * 2 * (count - 1 - k)
            a, b = m**late, (1 - m**late) / (1 - m)
            for n, g in found.items():
                g = g + sgd.get("weight_decay", 0.0) * weights[k][n]
                momenta[k][n] = m * momenta[k][n] + g
                weights[k][n] = weights[k][n] - sgd["lr"] * (a * momenta[k][n] + b * g)
    assert all(moved)
    return torch.cat([w.flatten() for own in weights for w in own.values()])


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "method",
    [
        Replay(beta=0.0),
        Replay(),
        Replay(beta=100.0),
        Replay(beta=2.0, shrink=0.7, predict=0.5, compensate=1.0),
        Delayed(),
        Delayed(shrink=0.6, predict=0.7),
        Delayed(compensate=0.5),
    ],
    ids=["plain", "pulled", "pulled hard", "corrected", "delayed", "delayed, corrected", "delayed, compensated"],
)
def test_with_moving_weights_a_method_is_what_one_would_write_down(
    method: Replay | Delayed, stages: int, tmp_path: Path
) -> None:
    data, sgd = images(SAMPLES), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    cut = parlay.partition(problems.dense(), stages, data[0][:ROWS])
    wanted, before = reference(cut, data, method, sgd), problems.weights(cut.model)
    made = running(cut, data, method, tmp_path, optimizer=lambda weights: torch.optim.SGD(weights, **sgd))
    for each in steps():
        made.parallel_step(each)
    made.finish()
    moved = problems.weights(cut.model)
    assert relative(moved, before) > 0.1
    assert relative(moved, wanted) < 1e-5


def test_replay_and_delayed_gradients_differ_where_weights_move() -> None:
    replay = fitted(problems.without_norm(), 3, Replay(beta=0.0), "parallel")
    assert not torch.equal(fitted(problems.without_norm(), 3, Delayed(), "parallel"), replay)


# What makes up for delays


@pytest.mark.parametrize("stages", [1, 3])
def test_accumulated_gradients_make_one_update_of_their_mean_at_as_many_times_the_rate(
    stages: int, tmp_path: Path
) -> None:
    """Eleven batches by four: two updates of four batches and, at the end, one of three."""
    data = images(SAMPLES)
    cut = parlay.partition(problems.dense(), stages, data[0][:ROWS])
    made = running(
        cut, data, Replay(1.0, 0.0, accumulate=4), tmp_path, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)
    )
    before = problems.weights(cut.stages[-1])
    wanted = torch.zeros_like(before)
    for each in steps()[:4]:
        wanted += 0.1 * backpropagate(cut, data[0][each.ids], data[1][each.ids]).gradients[-1]
    for each in steps()[: 4 + stages - 1]:  # the last stage has seen four of them
        made.parallel_step(each)
    assert relative(before - problems.weights(cut.stages[-1]), wanted) < 1e-4
    left = [station.pending for station in made._stream.stations]
    for each in steps()[4 + stages - 1 :]:
        made.parallel_step(each)
    assert left[-1] == 0
    made.finish()
    assert [station.pending for station in made._stream.stations] == [0] * stages


def test_accumulation_makes_as_many_updates_fewer() -> None:
    made: list[Counted] = []

    def counting(weights: object) -> Counted:
        made.append(Counted(weights))
        return made[-1]

    data = images(40)
    cut = parlay.partition(problems.dense(), 3, data[0][:2])
    options = {"schedule": "parallel", "batch_size": 8, "optimizer": counting}
    trainer(cut, Replay(accumulate=4), **options).fit(data, epochs=3)  # one serial, then 10 batches: 4, 4 and 2
    assert [one.steps for one in made] == [5 + 3] * 3


@pytest.mark.parametrize("stages", [3])
def test_with_a_slow_start_the_learning_rate_of_a_stage_begins_divided_by_its_delay(
    stages: int, tmp_path: Path
) -> None:
    method = Replay(slow_start=2.0)
    assert [method.pace(k, 3, 0.0) for k in range(3)] == [1 / 4, 1 / 2, 1]
    assert [method.pace(k, 3, 1.0) for k in range(3)] == [1 / 2, 2**-0.5, 1]
    assert [method.pace(k, 3, time) for k in range(3) for time in (2.0, 7.0)] == [1] * 6
    assert Replay(slow_start=2.0, accumulate=2).pace(0, 3, 0.0) == 1 / 2  # two updates late
    assert [Replay().pace(k, 3, 0.0) for k in range(3)] == [1] * 3
    cut, data = problem("no batch norm", stages)
    made = running(cut, data, method, tmp_path, optimizer=sgd)
    made.parallel_step(replace(steps()[0], time=1.0))
    assert [stage.learning_rate for stage in made.stages] == pytest.approx([0.025, 0.05 * 2**-0.5, 0.05])


@pytest.mark.parametrize("method", [Replay(predict=0.5), Delayed(predict=0.5)], ids=name)
@pytest.mark.parametrize(
    "optimizer", [lambda w: torch.optim.Adam(w), lambda w: torch.optim.SGD(w, 0.1)], ids=["adam", "no momentum"]
)
def test_prediction_needs_a_momentum(method: Streaming, optimizer: object, tmp_path: Path) -> None:
    cut, data = problem("no batch norm", 3)
    with pytest.raises(InputError, match="write predict 0, or take SGD with momentum"):
        running(cut, data, method, tmp_path, optimizer=optimizer)


@pytest.mark.parametrize("kind", [Replay, Delayed])
def test_where_nothing_is_late_compensated_momentum_is_plain_momentum_bit_for_bit(kind: type, tmp_path: Path) -> None:
    """At the last stage; and everywhere with one stage."""

    def last(compensate: float, stages: int) -> Tensor:
        cut, data = problem("no batch norm", stages)
        made = running(cut, data, kind(compensate=compensate), tmp_path, optimizer=sgd)
        for each in steps()[: stages + 1]:  # nothing that the first stage changes has come there yet
            made.parallel_step(each)
        return problems.weights(cut.stages[-1])

    for stages in (1, 3):
        assert torch.equal(last(1.0, stages), last(0.0, stages))
    serial = fitted(problems.without_norm(), 1, None, "serial")
    assert torch.equal(fitted(problems.without_norm(), 1, kind(compensate=1.0), "parallel"), serial)


def test_accumulated_updates_are_compensated_for_the_delay_in_updates(tmp_path: Path) -> None:
    cut, data = problem("no batch norm", 3)
    made = running(cut, data, Replay(compensate=1.0, accumulate=4), tmp_path, optimizer=sgd)
    assert [station._late for station in made._stream.stations] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("kind", [Replay, Delayed])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda w: torch.optim.Adam(w),
        lambda w: torch.optim.SGD(w, 0.1),
        lambda w: torch.optim.SGD(w, 0.1, 0.9, nesterov=True),
        lambda w: torch.optim.SGD(w, 0.1, 0.9, dampening=0.5),
    ],
    ids=["adam", "no momentum", "nesterov", "dampening"],
)
def test_compensation_needs_a_plain_momentum(kind: type, optimizer: object, tmp_path: Path) -> None:
    cut, data = problem("no batch norm", 3)
    with pytest.raises(InputError, match="write compensate 0, or take SGD with momentum"):
        running(cut, data, kind(predict=0.0, compensate=1.0), tmp_path, optimizer=optimizer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compensate": -0.5}, "compensate is -0.5: write a number of at least 0"),
        ({"shrink": 0.0}, "shrink is 0.0: write a number greater than 0"),
        ({"predict": -1.0}, "predict is -1.0: write a number of at least 0"),
        ({"accumulate": 0}, "accumulate is 0: write a number of batches of at least 1"),
        ({"slow_start": float("nan")}, "slow-start is nan: write a number of epochs of at least 0"),
    ],
)
@pytest.mark.parametrize("kind", [Replay, Delayed])
def test_wrong_options_are_refused_with_what_to_write(kind: type, options: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        kind(**options)


@networks
@pytest.mark.parametrize("beta", [0.3, 100.0])
def test_with_frozen_weights_the_pull_towards_the_first_pass_is_nothing(
    network: str, beta: float, tmp_path: Path
) -> None:
    cut, data = problem(network, 3)
    made = running(cut, data, replace(PLAIN[0], beta=beta), tmp_path)
    for each in steps()[:6]:
        made.parallel_step(each)
    for k in range(3):
        its = steps()[5 - 4 + k].ids
        wanted = backpropagate(cut, data[0][its], data[1][its]).gradients[k]
        assert relative(recorded(made, k), wanted) < ROUNDING * max(1, beta)


@pytest.mark.parametrize("lag", [2, 4, 6, 8, 10, 16])
def test_the_weight_of_the_pull_falls_with_the_delay_as_what_a_feedback_bears(lag: int) -> None:
    """v ← 0.9 v − G (v + ... + v of lag − 1 steps ago) is just stable at the largest G."""

    def stable(gain: float) -> bool:
        step = torch.diag(torch.ones(lag - 1), -1)
        step[0] = -gain
        step[0, 0] += 0.9
        return bool(torch.linalg.eigvals(step).abs().max() < 1)

    low, high = 0.0, 2.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    assert Replay(beta=1.0).pull(lag) == pytest.approx(low, rel=0.08)
    assert Replay().pull(0) == 0


@pytest.mark.parametrize(("by", "bounded"), [(0.001, False), (0.1, True)])
def test_with_the_pull_replay_is_the_augmented_lagrangian_with_states_of_a_few_steps(
    by: float, bounded: bool, tmp_path: Path
) -> None:
    """λ = x_then, κ = p: the gradient of stage 0 is that of the augmented Lagrangian's local loss, at a b that leaves
    the pull no larger than a share of p."""
    cut, data = problem("no batch norm", 2)
    made = running(cut, data, replace(PLAIN[0], beta=2.0), tmp_path)
    first = steps()[0].ids
    for each in steps()[:2]:
        made.parallel_step(each)
    then, p = cut.stages[0](data[0][first]).detach(), made._stream.adjoints[0].kept.clone()
    with torch.no_grad():  # the weights move
        for weight in cut.stages[0].parameters():
            weight += by * torch.randn_like(weight)
    made.parallel_step(steps()[2])
    x = cut.stages[0](data[0][first])
    s2 = then.square().mean()
    b = AugmentedLagrangian(beta=2.0).stiffness(torch.tensor(2.0), then[0].numel(), s2)
    moved = x.detach() - then
    most = BOUND * p.norm() / (2 * moved.norm())
    assert (b > most) == bounded
    b = torch.minimum(b, most)
    loss = AugmentedLagrangian(beta=2.0, reach=1e9).local_loss(x, Pair(then, p), b)
    wanted = torch.autograd.grad(loss, list(cut.stages[0].parameters()))
    assert relative(recorded(made, 0), torch.cat([g.flatten() for g in wanted])) < ROUNDING
    assert made.totals.loss[0] / ROWS == pytest.approx(float(loss.detach()), rel=1e-4)


@networks
@pytest.mark.parametrize("kind", [Replay, Delayed])
def test_what_the_detail_adds_is_the_gradient_of_the_roughness_of_the_output_alone(
    network: str, kind: type, tmp_path: Path
) -> None:
    cut, data = problem(network, 2)
    found = []
    for detail in (0.0, 2.0):
        made = running(cut, data, kind(shrink=1.0, predict=0.0, detail=detail), tmp_path, downsample=2)
        for each in steps()[:3]:
            made.parallel_step(each)
        found.append([recorded(made, k) for k in range(2)])
    assert torch.equal(found[0][1], found[1][1])  # the last stage has the loss of the network
    x = copy.deepcopy(cut.stages[0]).train()
    out = x(data[0][steps()[0].ids].contiguous(memory_format=torch.channels_last))
    after = made._stream.stations[0].site.after
    lost = (out - after.up(after.down(out))).square().mean() / out.detach().square().mean()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(2 * 3 * lost, list(x.parameters()))])
    assert relative(found[1][0] - found[0][0], wanted) < 1e-3


# Stages with a classifier of their own


@networks
@pytest.mark.parametrize("stages", [2, 3])
@factors
def test_a_local_stage_has_the_gradient_of_its_own_classifiers_loss(
    network: str, stages: int, factor: int, tmp_path: Path
) -> None:
    cut, data = problem(network, stages)
    made = running(cut, data, Local(), tmp_path, downsample=factor)
    for each in steps()[:stages]:  # each stage is at another batch
        made.parallel_step(each)
    for k, station in enumerate(made._stream.stations):
        its = steps()[stages - 1 - k].ids
        copied = copy.deepcopy(cut.model)
        slices = Partition(copied.train(), cut.cuts, cut.shapes).stages
        x = data[0][its].contiguous(memory_format=torch.channels_last)
        for j in range(k):
            small = made._stream.stations[j].site.after.down(slices[j](x)).detach()
            x = made._stream.stations[j].site.after.up(small)
        out = slices[k](x)
        judged = out if station.beside is None else copy.deepcopy(station.beside.module)(out)
        nn.functional.cross_entropy(judged, data[1][its]).backward()
        wanted = torch.cat([w.grad.flatten() for w in slices[k].parameters()])
        assert relative(recorded(made, k), wanted) < ROUNDING
        assert (station.beside is None) == (k == stages - 1)


def test_local_heads_learn_and_are_left_behind(tmp_path: Path) -> None:
    assert train(tmp_path, "--method", "local", "--schedule", "parallel", "--epochs", 3) == 0
    plain = parlay.build_model("resnet8", (1, 8, 8), 10).state_dict()
    assert load_file(tmp_path / "model.safetensors").keys() == plain.keys()
    cut, data = problem("no batch norm", 3)
    made = running(cut, data, Local(), tmp_path, optimizer=sgd)
    before = [problems.weights(station.beside.module) for station in made._stream.stations[:2]]
    for each in steps():
        made.parallel_step(each)
    for station, old in zip(made._stream.stations, before, strict=False):
        assert not torch.equal(problems.weights(station.beside.module), old)


@pytest.mark.parametrize("shape", [(16, 8, 8), (8, 4, 3), (4, 1, 1), (7,), (5, 7)])
@pytest.mark.parametrize("outputs", [(3,), (2, 5)])
def test_a_head_takes_what_any_stage_puts_out(shape: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    for rows in (1, 4):
        assert head(shape, outputs)(torch.randn(rows, *shape)).shape == (rows, *outputs)


# Guessed adjoints


@networks
@factors
@pytest.mark.parametrize("stages", [2, 3])
def test_with_the_true_adjoint_as_its_guess_a_stage_has_the_gradient_of_backpropagation(
    network: str, stages: int, factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, data = problem(network, stages)
    made = running(cut, data, DNI(), tmp_path, downsample=factor)
    plain = [backpropagate(cut, data[0][b.ids], data[1][b.ids], factor) for b in steps()]
    for k, station in enumerate(made._stream.stations[:-1]):

        def oracle(output: Tensor, labels: Tensor, k: int = k) -> Tensor:
            (right,) = [
                b
                for b, one in enumerate(plain)
                if torch.equal(data[1][steps()[b].ids], labels) and relative(output, one.outputs[k]) < 1e-5
            ]
            return plain[right].adjoints[k].requires_grad_()

        monkeypatch.setattr(station, "guess", oracle)
        station.error.zero_()
        station.scale.fill_(1e6)
    for step, each in enumerate(steps()):
        made.parallel_step(each)
        for k in range(stages):
            if step >= k:
                assert relative(recorded(made, k), plain[step - k].gradients[k]) < ROUNDING
    assert made.totals.losses()[:-1] == pytest.approx([0.0] * (stages - 1), abs=1e-8)  # and there is nothing to learn


def test_a_guess_is_no_larger_than_what_guesses_have_explained(tmp_path: Path) -> None:
    cut, data = problem("no batch norm", 2)
    station = running(cut, data, DNI(), tmp_path)._stream.stations[0]
    guess = torch.randn(ROWS, 6, 7, 7)
    assert not station.bounded(guess).any()  # nothing so far
    station.scale.fill_(2.0)
    station.error.fill_(0.75)
    assert station.bounded(5 * guess).square().mean().sqrt() == pytest.approx(1.0)
    assert torch.equal(station.bounded(guess / 5), guess / 5)


@pytest.mark.parametrize("condition", ["labels", "none"])
def test_the_synthesiser_learns_the_adjoints_of_a_fixed_problem(condition: str, tmp_path: Path) -> None:
    cut, data = problem("no batch norm", 3)
    made = running(
        cut, data, DNI(condition, synthesiser_lr=1e-2), tmp_path, optimizer=lambda w: torch.optim.SGD(w, 0.0)
    )
    errors = []
    for _ in range(20):
        made.totals = Totals()
        for each in steps():
            made.parallel_step(each)
        errors.append(made.totals.losses()[:-1])
    assert errors[0] == pytest.approx([1.0, 1.0], abs=0.5)  # it begins by saying zero
    # the labels are random: without them there is nothing to see of the last stage's adjoints in the features
    assert max(errors[-1]) < (0.2 if condition == "labels" else 1.0)
    assert errors[-1][0] < 0.5


def test_without_classes_a_synthesiser_is_not_told_labels(tmp_path: Path) -> None:
    problem = problems.Regression.make(0.1)
    cut = parlay.partition(problem.network(), 3, problem.inputs)
    options = {"loss": problems.squared_error, "batch_size": 8}
    with pytest.raises(InputError, match="write condition none"):
        running(cut, problem.data, DNI(), tmp_path, **options)
    made = running(cut, problem.data, DNI(condition="none"), tmp_path, **options)
    made.parallel_step(batch(8))


# Generated states


def exactly(made: InProcess, plain: list[problems.Backpropagated], patch: pytest.MonkeyPatch, data: Tensor) -> None:
    """Generators that return what the whole network would feed their stages, and that are trusted."""
    for k, station in enumerate(made._stream.stations[1:]):

        def oracle(inputs: Tensor, k: int = k) -> Tensor:
            (right,) = [b for b, each in enumerate(steps()) if torch.equal(data[each.ids], inputs)]
            return plain[right].outputs[k].clone().requires_grad_()

        patch.setattr(station, "generated", oracle)
        patch.setattr(station, "correlation", lambda: torch.tensor(1.0))


@networks
@stages
@factors
@pytest.mark.parametrize("beta", [0.3, 3.0])
def test_with_exact_generators_every_stage_has_the_gradient_of_backpropagation_of_every_batch_once(
    network: str, stages: int, factor: int, beta: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, data = problem(network, stages)
    made = running(cut, data, AuxNet(beta), tmp_path, downsample=factor)
    plain = [backpropagate(cut, data[0][b.ids], data[1][b.ids], factor) for b in steps()]
    exactly(made, plain, monkeypatch, data[0])
    trained: list[list[int]] = [[] for _ in range(stages)]
    step = 0

    def look() -> None:
        nonlocal step
        for k in range(stages):
            if 0 <= (its := step - (stages - 1 - k)) < BATCHES:
                trained[k].append(its)
                assert relative(recorded(made, k), plain[its].gradients[k]) < 10 * ROUNDING
        step += 1

    for each in steps():
        made.parallel_step(each)
        look()
    run_out(made, look)
    assert trained == [list(range(BATCHES))] * stages
    assert made.totals.counts == [SAMPLES] * stages


@networks
@factors
def test_a_stage_is_pulled_towards_the_displaced_state_as_the_generator_is_trusted(
    network: str, factor: int, tmp_path: Path
) -> None:
    """c b ‖x − λ*‖² with λ* = λ − p / (2b); but channels become no larger or smaller by it."""
    cut, data = problem(network, 2)
    made = running(cut, data, AuxNet(beta=2.0), tmp_path, downsample=factor)
    first, last = made._stream.stations
    last.error.fill_(0.36)
    c, after = 0.8, first.site.after
    u, targets = data[0][steps()[0].ids], data[1][steps()[0].ids]
    state = last.generated(u).detach().requires_grad_()
    below, above = (copy.deepcopy(stage).train() for stage in cut.stages)
    loss = nn.functional.cross_entropy(above(after.up(state).contiguous(memory_format=torch.channels_last)), targets)
    *wanted, p = torch.autograd.grad(loss, [*above.parameters(), state])
    made.parallel_step(steps()[0])
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
    made.parallel_step(steps()[1])
    assert relative(recorded(made, 0), torch.cat([g.flatten() for g in wanted])) < 10 * ROUNDING
    assert made.totals.losses()[0] == pytest.approx(float(local.detach()), rel=1e-4)


def test_generators_learn_the_states_of_a_fixed_network_and_are_trusted_more_and_more(tmp_path: Path) -> None:
    """At a large β, where the updated state is next to x."""
    cut, data = problem("batch norm", 2)
    made = running(cut, data, AuxNet(beta=1000.0), tmp_path, optimizer=lambda w: torch.optim.SGD(w, 0.0))
    stations = made._stream.stations
    assert [float(station.correlation()) for station in stations] == [1.0, 0.0]
    for _ in range(12):
        for each in steps():
            made.parallel_step(each)
    assert all(float(station.correlation()) > 0.5 for station in stations)  # the images are noise


def test_what_a_generator_learns_is_the_updated_state(tmp_path: Path) -> None:
    """The gradient of ‖g − (x − c p / (2b))‖² / ‖x‖², two batches after the state was used."""
    cut, data = problem("no batch norm", 2)
    made = running(cut, data, AuxNet(beta=2.0), tmp_path)
    station = made._stream.stations[1]
    station.error.fill_(0.36)
    its = steps()[0].ids
    state = station.generated(data[0][its])
    nn.functional.cross_entropy(cut.stages[1](state), data[1][its]).backward()
    d = 0.8 * ROWS * state.grad * state[0].numel() * state.detach().square().mean() / (2 * 2.0)
    x = cut.stages[0](data[0][its]).detach()
    network = copy.deepcopy(station.beside.module)
    loss = (network(data[0][its]) - (x - d)).square().sum() / x.square().sum()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])
    cut.model.zero_grad()
    learned: list[Tensor] = []
    apply = station.beside.apply
    station.beside.apply = lambda: (
        learned.append(torch.cat([g.flatten() for g in station.beside.gradients()])),
        apply(),
    )
    for each in steps()[:3]:
        made.parallel_step(each)
    assert len(learned) == 1
    assert relative(learned[0], wanted) < 10 * ROUNDING


def test_generators_are_left_behind(tmp_path: Path) -> None:
    assert train(tmp_path, "--method", "auxnet", "--schedule", "parallel", "--epochs", 3) == 0
    plain = parlay.build_model("resnet8", (1, 8, 8), 10).state_dict()
    assert load_file(tmp_path / "model.safetensors").keys() == plain.keys()


@pytest.mark.parametrize("inputs", [(3, 32, 32), (1, 28, 28), (1, 8, 5), (20,)])
@pytest.mark.parametrize("state", [(16, 8, 8), (8, 7, 7), (4, 1, 1), (6, 40, 3), (7,), (5, 7)])
def test_a_generator_makes_states_of_any_shape(inputs: tuple[int, ...], state: tuple[int, ...]) -> None:
    for rows in (1, 4):
        assert generator(inputs, state)(torch.randn(rows, *inputs)).shape == (rows, *state)


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"generator_lr": float("nan")}])
def test_wrong_options_of_generators_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="write a number greater than 0"):
        AuxNet(**options)


# Stages of every kind


@everyone
def test_sequences_of_tokens_train_as_images_do(method: Streaming) -> None:
    """States are generated from numbers, which tokens are not."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    torch.manual_seed(0)
    tokens, classes = torch.randint(11, (20, 5)), torch.randint(3, (20,))
    middle = (problems.Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())) for _ in range(3))
    model = nn.Sequential(nn.Embedding(11, 8), *middle, nn.Sequential(Mean(), nn.Linear(8, 3)))
    cut = parlay.partition(model, 3, tokens[:2])
    made = trainer(cut, method, batch_size=8, schedule="parallel", optimizer=sgd)
    if type(method) is AuxNet:
        with pytest.raises(InputError, match="inputs that are numbers: write method replay"):
            made.fit((tokens, classes), epochs=3)
        return
    result = made.fit((tokens, classes), epochs=3)
    assert result.status == "finished"
    assert result.summary["staleness"] == method.staleness(3)


@pytest.mark.parametrize("method", ["replay", "delayed", "auxnet"])
def test_a_variational_autoencoder_streams_too(method: str, tmp_path: Path) -> None:
    words = ["--model", "resnet-vae", "--synthetic-shape", "1,8,8", "--augment", "random", "--lr", 0.001]
    assert train(tmp_path, *words, "--method", method, "--schedule", "parallel", "--epochs", 2) == 0


@everyone
@pytest.mark.parametrize("samples", [17, 5, 1])
def test_the_last_incomplete_batch_is_trained_on(method: Streaming, samples: int) -> None:
    data, model = images(samples), problems.without_norm()
    cut = parlay.partition(model, 3, data[0][:2])
    result = trainer(cut, method, batch_size=8, schedule="parallel", optimizer=sgd).fit(data, epochs=3)
    assert result.status == "finished"
    assert all(torch.isfinite(w).all() for w in model.parameters())


# From the command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--method local --shrink 0.5",
            "shrink is not for method 'local': leave it out, or write method penalty or al or",
        ),
        (
            "--method dni --predict 0.5",
            "predict is not for method 'dni': leave it out, or write method replay or delayed",
        ),
        ("--method local --accumulate 2", "accumulate is not for method 'local'"),
        ("--method al --slow-start 2", "slow-start is not for method 'al'"),
        ("--method delayed --beta 2", "beta is not for method 'delayed'"),
        ("--method replay --predict 0.5 --optimizer adam", "predict looks ahead along the momentum of SGD"),
        ("--method replay --compensate 1 --predict 0 --optimizer adam", "compensate changes the plain momentum of SGD"),
        ("--method auxnet --compensate 1", "compensate is not for method 'auxnet'"),
        ("--method local --model resnet-vae", "method local needs a network that puts out one tensor"),
        ("--method dni --condition label", "unknown condition 'label': write one of labels, none"),
    ],
)
def test_what_makes_no_sense_is_answered_in_a_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, *words.split()) == 2
    assert said in answer(capsys)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--method replay", {"beta": 8.0, "shrink": 1.0, "predict": 0.0, "slow-start": 0.0, "detail": 0.0}),
        ("--method replay --predict 0.5", {"predict": 0.5, "accumulate": 1}),
        ("--method delayed --compensate 1", {"predict": 0.0, "compensate": 1.0}),
        ("--method delayed --accumulate 2", {"shrink": 1.0, "compensate": 0.0, "predict": 0.0, "accumulate": 2}),
        ("--method dni", {"condition": "labels"}),
    ],
)
def test_a_run_folder_says_what_was_made_up_for_delays(words: str, wanted: dict[str, object], tmp_path: Path) -> None:
    assert train(tmp_path, *words.split(), "--epochs", 2, "--schedule", "parallel") == 0
    found = tomllib.loads((tmp_path / "recipe.toml").read_text())
    assert {key: found[key] for key in wanted} == wanted


def test_replay_learns_the_digits(tmp_path: Path) -> None:
    """Serial training has 97.5 % after these three epochs."""
    words = "--dataset digits --model resnet8 --method replay --stages 3 --schedule parallel --epochs 3 --batch-size 32"
    assert parlay_command("train", *words.split(), "--device", "cpu", "--out", tmp_path) == 0
    assert summary(tmp_path)["test_accuracy"] > 85


@pytest.mark.parametrize("stages", [2, 3])
def test_generated_states_learn_the_digits(stages: int, tmp_path: Path) -> None:
    """Serial training has 98.9 % after these six epochs."""
    words = "--dataset digits --model resnet8 --method auxnet --schedule parallel --epochs 6 --batch-size 32"
    words += f" --stages {stages}"
    assert parlay_command("train", *words.split(), "--device", "cpu", "--out", tmp_path) == 0
    assert summary(tmp_path)["test_accuracy"] > 85


# Losses


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@plain
def test_a_loss_that_is_not_finite_is_named_with_its_batch_before_any_update(
    method: Streaming, value: float, tmp_path: Path
) -> None:
    cut, data = problem("no batch norm", 3)
    made = running(cut, data, method, tmp_path, optimizer=sgd)
    for each in steps()[:5]:
        made.parallel_step(replace(each, epoch=4))
    before = problems.weights(cut.model)
    made._stream.adjoints[0].kept = torch.full_like(made._stream.adjoints[0].kept, value)
    with pytest.raises(
        Diverged, match=r"loss of stage 0 of 3 is (nan|inf|-inf) in epoch 5, step 2 \(samples 6, 7, 8, 9,"
    ):
        made.parallel_step(steps()[5])
    assert torch.equal(problems.weights(cut.model), before)


def test_a_run_that_diverges_says_so() -> None:
    data = images(40)
    cut = parlay.partition(problems.without_norm(), 3, data[0][:2])
    made = trainer(cut, Replay(), schedule="parallel", batch_size=8, optimizer=lambda w: torch.optim.SGD(w, 1e6, 0.9))
    result = made.fit(data, epochs=4)
    assert result.status == "diverged"
    assert "the loss of" in result.message


# Stopped and resumed

KINDS = {
    "delayed": "--method delayed --schedule parallel --epochs 4",
    "delayed, predicted": "--method delayed --predict 0.5 --accumulate 2 --schedule alternate:2:1 --epochs 5",
    "local, hybrid": "--method local --schedule alternate:2:1 --epochs 5",
    "auxnet": "--method auxnet --schedule parallel --epochs 4",
    "auxnet, hybrid, downsampled": "--method auxnet --schedule alternate:2:1 --epochs 5 --downsample 2",
    "delayed, compensated": "--method delayed --compensate 1 --schedule parallel --epochs 4",
    "dni, hybrid": "--method dni --schedule alternate:2:1 --epochs 5",
    "replay": "--method replay --schedule parallel --epochs 4",
    "replay, hybrid": "--method replay --schedule alternate:2:1 --epochs 5",
    "replay, downsampled, five stages": "--method replay --schedule parallel --epochs 4 --stages 5 --downsample 2",
    "replay, accumulated": "--method replay --schedule parallel --epochs 4 --accumulate 2",
    "replay, adam": "--method replay --schedule parallel --epochs 4 --optimizer adam --lr 0.01",
}
CASES = [(kind, step) for kind in KINDS for step in ((4, 5, 6, 7, 8, 10, 11) if "," not in kind else (4, 8))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of that kind that nobody stopped; each is made once."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("undisturbed")
            assert train(made[kind], "--augment", "random", *KINDS[kind].split()) == 0
        return made[kind]

    return run


def stop(out: Path, kind: str, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, stop_after=step)
        assert train(out, "--augment", "random", *KINDS[kind].split()) == 1
    assert summary(out)["status"] == "interrupted"


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_a_run_stopped_with_batches_on_their_way_and_resumed_equals_one_that_was_not(
    kind: str, step: int, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    stop(tmp_path, kind, step)
    assert resume(tmp_path) == 0
    whole = undisturbed(kind)
    assert records(tmp_path) == records(whole)
    one, other = kept(tmp_path), kept(whole)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_does_not_depend_on_when_it_is_saved(undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    train(tmp_path, "--augment", "random", *KINDS["replay"].split(), "--checkpoint-every", 0)
    assert records(tmp_path) == records(undisturbed("replay"))


@pytest.mark.parametrize("other", ["--stages 2", "--partition 1,3", "--accumulate 3", "--downsample 2", "--beta 0"])
def test_batches_on_their_way_are_left_out_where_they_do_not_fit_and_that_is_said(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(tmp_path, "replay", 8)
    heard = listen(monkeypatch)
    assert resume(tmp_path, *other.split()) == 0
    assert sum("on their way" in line for line in heard.lines) == 1
    assert summary(tmp_path)["status"] == "finished"


# Recorded steps


@everyone
@networks
def test_messages_at_fixed_places_are_the_same_messages(
    method: Streaming, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a recorded step needs them; batches of 8, 8 and 5 samples."""
    free = fitted(NETWORKS[network](), 3, method, "parallel")
    make = Mail.__init__
    monkeypatch.setattr(Mail, "__init__", lambda self, rows, fixed: make(self, rows, fixed=not fixed))
    assert torch.equal(fitted(NETWORKS[network](), 3, method, "parallel"), free)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("schedule", ["parallel", "alternate:2:1"])
@pytest.mark.parametrize("method", [*ALL, Replay(beta=1.0, compensate=0.5)], ids=[*map(name, ALL), "Replay, all of it"])
def test_recorded_steps_train_as_those_that_are_not(
    method: Streaming, schedule: str, network: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = []
    record = Graphed._record
    monkeypatch.setattr(Graphed, "_record", lambda self: (recordings.append(self), record(self))[1])

    def trained(capture: bool) -> Tensor:
        model, data = NETWORKS[network](), images(61)
        cut = parlay.partition(model, 3, data[0][:2])
        fused = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, fused=True)}
        options = {"device": device, "precision": "float32", "capture": capture, "schedule": schedule, **fused}
        # 16 steps an epoch, the last one incomplete: some fill the queues, 3 warm up, then come recorded ones
        trainer(cut, method, batch_size=4, augment=CropAndFlip(2), **options).fit(data, epochs=4)
        return problems.weights(model)

    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        plain = trained(capture=False)
        assert not recordings
        graphed = trained(capture=True)
    assert len(recordings) == (2 if method.recordable else 1)  # a parallel run begins with a serial epoch
    moved = relative(plain, problems.weights(NETWORKS[network]()))
    assert relative(graphed, plain) < 0.02 * moved


# Plans


@pytest.mark.parametrize("words", ["--stages 3", "--stages 4 --downsample 2", "--stages 1"])
@pytest.mark.parametrize("method", ["replay", "replay --beta 1", "delayed", "local", "dni", "auxnet"])
def test_the_memory_of_a_plan_is_what_the_stations_of_the_run_hold(
    method: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*SMALL, "--method", *method.split(), "--schedule", "parallel", "--epochs", 2, *words.split()]
    assert parlay_command("plan", *common, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["auxiliary_gib"] * 2**30
    assert parlay_command("train", *common, "--out", tmp_path) == 0
    assert planned == summary(tmp_path)["auxiliary_bytes"]
    assert (planned > 0) == (words != "--stages 1")


def test_a_plan_of_auxnet_on_digits_counts_its_generators_and_the_images_that_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", "resnet8", "--dataset", "digits", "--method", "auxnet", "--stages", 2, "--epochs", 2]
    assert parlay_command("plan", *common, "--device", "cpu", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert parlay_command("train", *common, "--device", "cpu", "--out", tmp_path) == 0
    planned = round(told["auxiliary_gib"] * 2**30)
    assert planned == summary(tmp_path)["auxiliary_bytes"]
    (state,), slots = told["interfaces"], 3
    in_queues = slots * told["batch_size"] * (8 * 8 + math.prod(state))  # images, and displacements of states
    weights = [w.numel() for w in generator((1, 8, 8), tuple(state)).parameters()]
    # every weight with Adam's two moments, and a count of its steps for each tensor; the running error of g
    assert planned == 4 * (in_queues + 3 * sum(weights) + len(weights) + 1)
