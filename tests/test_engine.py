"""The engine in one process: odd batches, stages of every kind, losses that are not finite, states set anew, GPUs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import parlay
import problems
from parlay import AugmentedLagrangian, Coupling, Penalty, models
from parlay.engines import in_process
from parlay.engines.base import Totals
from parlay.engines.compiled import CompiledBlocks
from parlay.engines.graphs import Graphed
from parlay.engines.in_process import InProcess, Joint
from parlay.errors import Diverged
from parlay.evaluate import unchanged_buffers
from parlay.stores.host import HostMemory
from parlay.stores.window import Windows
from problems import batch, engine, images, never, recorded, relative, trainer

METHODS = [AugmentedLagrangian(), Penalty(), Penalty(order="joint")]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: getattr(m, "order", type(m).__name__))
cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def sgd(weights: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def fit(
    model: nn.Sequential, data: tuple[Tensor, Tensor], stages: int = 3, epochs: int = 3, **options: object
) -> parlay.Result:
    cut = parlay.partition(model, stages, data[0][:2])
    return trainer(cut, **{"batch_size": 8, "schedule": "parallel", "optimizer": sgd, **options}).fit(
        data, epochs=epochs
    )


# Batches


@methods
@pytest.mark.parametrize("samples", [17, 19, 24, 5, 1])
def test_the_last_incomplete_batch_is_trained_on(method: Coupling, samples: int) -> None:
    result = fit(problems.without_norm(), images(samples), method=method)
    assert result.status == "finished"
    assert all(torch.isfinite(w).all() for w in result.model.parameters())


@methods
def test_a_batch_of_one_sample_renews_its_state_and_no_other(method: Coupling, tmp_path: Path) -> None:
    data = images(9)
    cut = parlay.partition(problems.without_norm(), 3, data[0])
    running = engine(cut, data, method, folder=tmp_path, optimizer=sgd)
    running.refresh([batch(9)], never)
    for epoch in range(4):  # until the first stage has a signal to move by
        running.parallel_step(batch(9, epoch=epoch))
    before = [interface.states.tensor().clone() for interface in running.interfaces]
    running.parallel_step(batch(torch.tensor([6]), epoch=4))
    for interface, old in zip(running.interfaces, before, strict=True):
        changed = (interface.states.tensor() != old).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [6]


def test_of_a_single_sample_only_the_stages_whose_turn_it_is_have_a_gradient(tmp_path: Path) -> None:
    data = images(9)
    running = engine(parlay.partition(problems.without_norm(), 3, data[0]), data, Penalty(), folder=tmp_path)
    running.refresh([batch(9)], never)
    running.parallel_step(batch(torch.tensor([6]), epoch=0))
    assert [recorded(running, k) is not None for k in range(3)] == [True, False, True]


# Stages of every kind


@methods
def test_sequences_of_tokens_train_as_images_do(method: Coupling) -> None:
    class Attend(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return x + self.mix(h, h, h, need_weights=False)[0]

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    torch.manual_seed(0)
    tokens, classes = torch.randint(11, (20, 5)), torch.randint(3, (20,))
    model = nn.Sequential(nn.Embedding(11, 8), *(Attend(8) for _ in range(3)), nn.Sequential(Mean(), nn.Linear(8, 3)))
    result = fit(model, (tokens, classes), method=method, epochs=4)
    assert result.status == "finished"
    assert result.summary["auxiliary_bytes"] == 20 * 2 * 5 * 8 * 4 * (2 if method.keeps_multipliers else 1)


# Stores that a recorded step sees through windows


@methods
@pytest.mark.parametrize("kind", ["host", "file"])
def test_a_step_through_windows_is_the_same_as_one_on_the_stores(method: Coupling, kind: str, tmp_path: Path) -> None:
    def stepped(windows: bool) -> tuple[Tensor, list[Tensor]]:
        data, model = images(16), problems.without_norm()
        cut = parlay.partition(model, 3, data[0])
        running = engine(cut, data, method, folder=tmp_path / str(windows), optimizer=sgd, store=kind)
        running.refresh([batch(16)], never)
        if windows:
            stores = [store for interface in running.interfaces for store in interface.stores()]
            running._windows = through = Windows([store for store in stores if isinstance(store, HostMemory)], 8)
            running._quick_joints = [Joint.of(interface.through(through)) for interface in running.interfaces]
        step = running._parallel_step
        running._parallel = lambda inputs: step(inputs, quick=True) if windows else step(inputs)
        for visit, ids in enumerate([torch.arange(8), torch.arange(8, 16), torch.tensor([15, 4, 6, 1, 3, 8, 10, 12])]):
            running._ids = ids
            with running._through_windows():
                running.parallel_step(batch(ids, epoch=visit))
        return problems.weights(model), [interface.states.tensor().clone() for interface in running.interfaces]

    weights, states = stepped(windows=True)
    same_weights, same_states = stepped(windows=False)
    assert torch.equal(weights, same_weights)
    assert all(torch.equal(a, b) for a, b in zip(states, same_states, strict=True))


def test_modules_that_were_switched_to_evaluation_are_trained(tmp_path: Path) -> None:
    data, model = images(16), problems.with_norm()
    model.eval()
    running = engine(parlay.partition(model, 2, data[0]), data, AugmentedLagrangian(), folder=tmp_path)
    assert all(module.training for module in model.modules())
    running.evaluate([data])
    running.serial_step(batch(16))
    assert all(module.training for module in model.modules())


# Random numbers


def noisy() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(block, nn.Dropout(0.3)) for block in problems.dense()))


@methods
@pytest.mark.parametrize("schedule", ["parallel", "serial", "alternate:1:1"])
def test_dropout_is_a_function_of_the_seed(method: Coupling, schedule: str) -> None:
    def trained(seed: int, elsewhere: int) -> Tensor:
        model = noisy()
        torch.manual_seed(elsewhere)  # the caller's own numbers do not matter
        fit(model, images(20), method=method, schedule=schedule, seed=seed)
        return problems.weights(model)

    assert torch.equal(trained(1, 5), trained(1, 6))
    assert not torch.equal(trained(1, 5), trained(2, 5))


def test_training_leaves_the_random_numbers_of_the_caller_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    model = noisy()
    torch.manual_seed(3)
    fit(model, images(20), stages=3)
    assert torch.equal(torch.rand(4), expected)


def test_stages_draw_different_numbers(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    data = images(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(64, 3))
    running = engine(parlay.partition(model, 3, data[0], by=(3, 4)), data, AugmentedLagrangian(), folder=tmp_path)
    for k in (2, 3):
        model[k].register_forward_hook(lambda *io: seen.append(io[2] == 0))
    running.refresh([batch(8)], never)
    assert not torch.equal(seen[0], seen[1])


# Clipping


@pytest.mark.parametrize("clip", [1e-3, 0.1, 1e6])
def test_clipping_is_that_of_torch_for_each_stage_in_parallel_and_for_the_whole_network_in_serial(
    clip: float, tmp_path: Path
) -> None:
    data = images(8)
    cut = parlay.partition(problems.without_norm(), 3, data[0])
    found = {}
    for clipped in (None, clip):
        running = engine(cut, data, AugmentedLagrangian(), folder=tmp_path, clip=clipped)
        running.refresh([batch(8)], never)
        for _ in range(3):
            running.parallel_step(batch(8))
        found[clipped, "parallel"] = [stage.optimizer.kept for stage in running.stages]
        running.totals = Totals()
        running.serial_step(batch(8))
        found[clipped, "serial"] = [[g for stage in running.stages for g in stage.optimizer.kept]]
    for phase in ("parallel", "serial"):
        for plain, ours in zip(found[None, phase], found[clip, phase], strict=True):
            leaves = [nn.Parameter(torch.empty_like(gradient)) for gradient in plain]
            for leaf, gradient in zip(leaves, plain, strict=True):
                leaf.grad = gradient.clone()
            nn.utils.clip_grad_norm_(leaves, clip)
            for leaf, gradient in zip(leaves, ours, strict=True):
                torch.testing.assert_close(gradient, leaf.grad)


# Losses that are not finite


@methods
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_update_and_is_named(
    method: Coupling, value: float, tmp_path: Path
) -> None:
    data = images(8)
    cut = parlay.partition(problems.without_norm(), 3, data[0])
    running = engine(cut, data, method, folder=tmp_path, optimizer=sgd)
    running.refresh([batch(8)], never)
    running.interfaces[1].states.load(torch.full_like(running.interfaces[1].states.tensor(), value))
    before = problems.weights(cut.model)
    states = running.interfaces[0].states.tensor().clone()
    named = rf"loss of stage 1 of 3 is {value} in epoch 5, step 3 \(samples 3, 0, 5, 1, \.\.\.\)"
    with pytest.raises(Diverged, match=named):
        running.parallel_step(batch(torch.tensor([3, 0, 5, 1, 2, 4, 7]), epoch=4, step=2))
    assert torch.equal(problems.weights(cut.model), before)
    assert torch.equal(running.interfaces[0].states.tensor(), states)


def test_in_a_serial_step_the_loss_is_that_of_the_whole_network(tmp_path: Path) -> None:
    inputs, targets = images(8)
    inputs[2] = float("nan")
    cut = parlay.partition(problems.without_norm(), 3, inputs)
    running = engine(cut, (inputs, targets), AugmentedLagrangian(), folder=tmp_path, optimizer=sgd)
    before = problems.weights(cut.model)
    with pytest.raises(Diverged, match=r"the loss of the network is nan in epoch 2, step 4 \(samples 2, 4\)"):
        running.serial_step(batch(torch.tensor([2, 4]), epoch=1, step=3))
    assert torch.equal(problems.weights(cut.model), before)


# States set anew


@pytest.mark.parametrize("factor", [1, 2])
@methods
def test_a_refresh_sets_states_to_outputs_multipliers_to_zero_and_leaves_the_statistics(
    method: Coupling, factor: int, tmp_path: Path
) -> None:
    data = images(12)
    cut = parlay.partition(problems.with_norm(), 3, data[0])
    running = engine(cut, data, method, folder=tmp_path, downsample=factor, optimizer=sgd)
    buffers = {name: buffer.clone() for name, buffer in cut.model.named_buffers()}
    assert running.refresh([batch(12)], never) is None  # there were none before
    assert all(torch.equal(buffers[name], buffer) for name, buffer in cut.model.named_buffers())
    for _ in range(3):
        running.parallel_step(batch(12))
    old = [interface.states.tensor().clone() for interface in running.interfaces]
    violations = running.refresh([batch(12)], never)
    with unchanged_buffers(cut.model):
        plain = problems.backpropagate(cut, *data, factor)
    for k, interface in enumerate(running.interfaces):
        assert relative(interface.states.tensor(), plain.outputs[k]) < 1e-5
        assert violations[k] == pytest.approx(relative(old[k], plain.outputs[k]), rel=1e-4)
        assert violations[k] > 1e-3
        assert float(interface.mean_square) == pytest.approx(float(plain.outputs[k].square().mean()), rel=1e-4)
        assert interface.multipliers is None or not interface.multipliers.tensor().any()


def test_a_refresh_that_is_stopped_leaves_the_interfaces_unfilled(tmp_path: Path) -> None:
    data = images(12)
    running = engine(parlay.partition(problems.dense(), 3, data[0]), data, AugmentedLagrangian(), folder=tmp_path)
    running.refresh([batch(12)], never)
    assert running.filled
    assert running.refresh([batch(6), batch(6)], lambda: True) is None
    assert not running.filled


@methods
def test_states_are_set_anew_whenever_a_parallel_phase_begins(method: Coupling) -> None:
    rows = fit(problems.dense(), images(20), method=method, schedule="alternate:2:1", epochs=8).records
    assert "".join(row["phase"][0] for row in rows) == "spsppspp"
    began = [row["epoch"] for row in rows if row["refresh_seconds"] > 0]
    assert began == [1, 3, 6]
    assert [row["epoch"] for row in rows if row["violation_at_entry"] is not None] == [3, 6]


@methods
def test_the_violation_of_a_step_is_that_of_the_states_it_found(method: Coupling, tmp_path: Path) -> None:
    data = images(8)
    cut = parlay.partition(problems.dense(), 2, data[0])
    running = engine(cut, data, method, folder=tmp_path)
    running.refresh([batch(8)], never)
    x = running.interfaces[0].states.tensor().clone()
    running.interfaces[0].states.load(1.5 * x)
    running.parallel_step(batch(8))
    assert running.totals.means(running.totals.violation) == pytest.approx([0.5], rel=1e-5)


# GPUs


@pytest.mark.parametrize("schedule", ["serial", "parallel"])
@methods
@pytest.mark.parametrize("device", [pytest.param(["cpu", "cuda"], marks=cuda), pytest.param("cuda", marks=cuda)])
def test_stages_on_other_devices_train_as_on_the_cpu(method: Coupling, schedule: str, device: object) -> None:
    def trained(where: object) -> Tensor:
        model = problems.without_norm()
        options = {"method": method, "schedule": schedule, "device": where, "precision": "float32", "capture": False}
        assert fit(model, images(21), stages=2, **options).status == "finished"
        return problems.weights(model)

    assert relative(trained(device), trained("cpu")) < 1e-3


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=cuda), pytest.param("bfloat16", marks=cuda)])
@pytest.mark.parametrize("schedule", ["serial", "parallel", "alternate:2:1"])
@methods
def test_recorded_steps_train_as_those_that_are_not(
    method: Coupling, schedule: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = []
    record = Graphed._record
    monkeypatch.setattr(Graphed, "_record", lambda self: (recordings.append(self), record(self))[1])

    def trained(capture: bool) -> Tensor:
        model = problems.without_norm()
        options = {"method": method, "schedule": schedule, "device": "cuda", "precision": precision}
        fused = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, fused=True)}
        # 8 steps an epoch, the last one incomplete: 3 to warm up, then recorded ones
        fit(model, images(61), capture=capture, epochs=4, **options, **fused)
        return problems.weights(model)

    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        plain = trained(capture=False)
        assert not recordings
        graphed = trained(capture=True)
    assert len(recordings) == (1 if schedule == "serial" else 2)  # a parallel run begins with a serial epoch
    moved = relative(plain, problems.weights(problems.without_norm()))
    assert moved > 0.05
    assert relative(graphed, plain) < (1e-3 if precision == "float32" else 0.1) * moved


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=cuda), pytest.param(True, marks=cuda)])
@pytest.mark.parametrize("schedule", ["serial", "parallel"])
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("network", ["resnet20", "wrn-10-10"])
def test_epochs_of_recorded_steps_differ_from_their_eager_twin_by_less_than_bfloat16_rounds(
    network: str, method: Coupling, schedule: str, compiled: bool
) -> None:
    torch.manual_seed(1)
    data = torch.randn(1000, 3, 32, 32), torch.randint(0, 10, (1000,))

    def trained(precision: str, **how: bool) -> Tensor:
        torch.manual_seed(0)
        model = models.build(network, (3, 32, 32), 10)
        fused = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9, fused=True)}
        options = {"method": method, "schedule": schedule, "device": "cuda", "precision": precision, "batch_size": 64}
        fit(model, data, epochs=2, **options, **how, **fused)  # 16 steps each, the last one incomplete
        return problems.weights(model)

    eager = trained("bfloat16", capture=False, compile=False)
    rounding = relative(eager, trained("float32", capture=False, compile=False))
    assert relative(trained("bfloat16", capture=True, compile=compiled), eager) < rounding


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.parametrize(("network", "narrow"), [("resnet8", True), ("wrn-10-10", False)])
def test_only_narrow_blocks_are_tuned(network: str, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_fx(graph: GraphModule, inputs: list[Tensor], **how: object) -> GraphModule:
        asked.append((max(value.shape[1] for value in inputs if value.dim() == 4), how))
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    module = models.build(network, (3, 32, 32), 10)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(CompiledBlocks(module)(x), module(x))
    assert len(asked) > 3
    assert all(bool(how) == (channels <= 64) for channels, how in asked)
    assert all(bool(how) for _, how in asked) == narrow


@pytest.mark.parametrize("ahead", [pytest.param(True, marks=cuda)])
@methods
def test_recorded_steps_train_as_others_where_the_host_is_far_ahead_of_the_gpu(
    method: Coupling, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(capture: bool, wait: bool) -> Tensor:
        model = problems.without_norm()
        options = {"method": method, "device": "cuda", "precision": "float32", "capture": capture}
        fused = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, fused=True)}
        take = InProcess.parallel_step

        def late(self: InProcess, batch: object) -> None:
            torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host goes on
            take(self, batch)

        with monkeypatch.context() as patched:
            if wait:
                patched.setattr(InProcess, "parallel_step", late)
            fit(model, images(61), epochs=4, **options, **fused)
        return problems.weights(model)

    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        plain = trained(capture=False, wait=False)
        assert relative(trained(capture=True, wait=ahead), plain) < 1e-4


@pytest.mark.parametrize("every", [pytest.param(1, marks=cuda), pytest.param(3, marks=cuda)])
@methods
def test_losses_that_are_looked_at_on_the_way_are_those_of_one_look_at_the_end(
    method: Coupling, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(look_every: int) -> list[object]:
        monkeypatch.setattr(in_process, "LOOK_EVERY", look_every)
        options = {"method": method, "schedule": "alternate:2:1", "device": "cuda", "precision": "float32"}
        fused = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, fused=True)}
        rows = fit(problems.without_norm(), images(61), epochs=4, **options, **fused).records
        return [(row["losses"], row["violation"]) for row in rows]

    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        assert losses(every) == losses(1000)


@pytest.mark.parametrize("kind", [pytest.param("host", marks=cuda), pytest.param("file", marks=cuda)])
@methods
def test_recorded_steps_train_as_well_on_states_that_are_kept_on_the_host(
    method: Coupling, kind: str, tmp_path: Path
) -> None:
    def trained(store: str) -> Tensor:
        model = problems.without_norm()
        options = {"method": method, "device": "cuda", "precision": "float32", "store": store, "out": tmp_path / store}
        fused = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, fused=True)}
        fit(model, images(61), epochs=4, **options, **fused)
        return problems.weights(model)

    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        assert relative(trained(kind), trained("device")) < 1e-4
