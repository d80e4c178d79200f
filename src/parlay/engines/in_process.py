"""All stages in one process, on any mix of devices: the reference that other engines are compared with.

A step is one function from tensors to a row of losses and violations. On a GPU it is recorded once as a CUDA graph;
everywhere else, and for last incomplete batches, the same function runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from parlay import faults
from parlay.coupling import Coupling, Pair
from parlay.coupling.streaming import Station, Streaming
from parlay.data.feed import Feed
from parlay.engines.base import Batch, Engine, Totals, clip_gradients, raise_if_not_finite, stage_tensors
from parlay.engines.branches import Branches
from parlay.engines.compiled import CompiledBlocks, compiled
from parlay.engines.graphs import Graphed, Inputs
from parlay.engines.guard import Guard
from parlay.engines.probe import Gradients, cosines
from parlay.engines.stream import Stream
from parlay.evaluate import Loss, evaluate, in_float32, unchanged_buffers
from parlay.interface import Interface
from parlay.lanes import Cuda, Event, Lanes
from parlay.stage import Stage
from parlay.stores.host import HostMemory
from parlay.stores.window import Windows

NOTHING = torch.empty(0)
LOOK_EVERY = 32  # recorded steps between two looks at their losses, those of the steps before the last such; others: 1

Steps = list[tuple[Batch | list[Batch | None], Tensor, int]]
"""What steps have put out: the batch (or that of each stage, where they differ), its row, how many losses are in it."""


class Joint(NamedTuple):
    """What a step asks of an interface, as it is or compiled: a dozen small kernels each become one or two."""

    gather: Callable[[Tensor], Pair]
    local_loss: Callable[[Tensor, Pair, Tensor], Tensor]
    update: Callable[..., Tensor]

    @classmethod
    def of(cls, interface: Interface) -> Joint:
        return cls(interface.gather, interface.local_loss, interface.update)

    def compiled(self) -> Joint:
        return Joint(compiled(self.gather), compiled(self.local_loss), compiled(self.update))


class Coming(NamedTuple):
    """Rows of some steps on their way to the host."""

    steps: Steps
    rows: Tensor
    arrived: Event


@final
class InProcess(Engine):
    """Stages and interfaces side by side. `interfaces[k]` joins stages k and k+1; there is one fewer than stages."""

    def __init__(
        self,
        model: torch.nn.Module,
        stages: list[Stage],
        interfaces: list[Interface],
        coupling: Coupling | Streaming,
        loss: Loss,
        feed: Feed,
        *,
        stations: list[Station] | None = None,
        clip: float | None = None,
        batch_size: int = 0,
        capture: bool = False,
        compile: bool = False,
        say: Callable[[str], None] = print,
        lanes: Lanes | None = None,
    ) -> None:
        """`stations` are the stages at work, for a streaming method; there are no interfaces then.

        `capture`: record steps as CUDA graphs, the stages side by side in them; `say` tells where that fails.

        Recorded steps are those of `batch_size` samples. `compile`: they go through compiled blocks and interfaces.
        """
        self.model = model
        self.stages = stages
        self.interfaces = interfaces
        self.coupling = coupling
        self.loss = loss
        self.feed = feed
        self.clip = clip
        self.totals = Totals()
        self._seen: Steps = []
        self._coming: Coming | None = None
        self._captured = capture
        self._unproven = compile
        self._say = say
        self._seeds: list[int] = []
        self._ids = NOTHING
        self._following: Tensor | None = None
        device = stages[0].device
        model.train()
        self._lanes = lanes or (Cuda(device) if capture else Lanes())
        self._branches = Branches(self._lanes, len(stages))
        self._joints = self._quick_joints = [Joint.of(interface) for interface in interfaces]
        self._windows: Windows | None = None
        on_host = [store for interface in interfaces for store in interface.stores() if isinstance(store, HostMemory)]
        if capture and on_host:
            self._windows = windows = Windows(on_host, batch_size)
            self._quick_joints = [Joint.of(interface.through(windows)) for interface in interfaces]
        if compile:
            self._quick_joints = [joint.compiled() for joint in self._quick_joints]
        if compile:
            for stage in stages:
                stage.speed_up(CompiledBlocks(stage.module))
        self._parallel: Callable[[Inputs], Tensor] = self._parallel_step
        self._serial: Callable[[Inputs], Tensor] = self._serial_step
        if capture:

            def full(inputs: Inputs) -> bool:
                return len(inputs["ids"]) == batch_size

            self._parallel = Graphed(self._parallel_step, full, self._lanes, self._forget, say, self._through_windows)
            self._serial = Graphed(self._serial_step, full, self._lanes, self._forget, say)
        networks = [part for station in stations or [] for part in station.parts()] or stages
        self._guard = Guard(self._lanes if capture else None, device, networks)
        self._stream: Stream | None = None
        if isinstance(coupling, Streaming):
            recorded = capture and coupling.recordable
            common = coupling, stations or [], feed, self._branches, self._guard, self._clip
            self._stream = Stream(*common, recorded=recorded)
            self._streaming: Callable[[Inputs], Tensor] = self._stream.step
            if recorded:  # only steady steps come there, and all of them are alike
                self._streaming = Graphed(self._stream.step, _always, self._lanes, self._forget, say)

    def parallel_step(self, batch: Batch) -> None:
        if self._stream is not None:
            self._stream_step(self._stream, batch)
            return
        assert isinstance(self.coupling, Coupling)
        inputs = {"ids": batch.ids, "beta": torch.tensor(batch.beta)}
        for k in range(len(self.stages)):
            # a single stage has no neighbour to take turns with: it is serial training
            turn = self.coupling.turn(batch.ids, batch.epoch, k) if self.interfaces else None
            if turn is not None:
                inputs[f"turn-{k}"] = turn
        self._ids, self._following = batch.ids, batch.following
        self._step(self._parallel, batch, inputs, losses=len(self.stages))

    def serial_step(self, batch: Batch) -> None:
        changes = self.feed.draw(len(batch.ids), batch.generator())
        self._following = None
        self._step(self._serial, batch, {"ids": batch.ids, **changes}, losses=1)

    def _step(self, step: Callable[[Inputs], Tensor], batch: Batch, inputs: Inputs, losses: int) -> None:
        self._train_mode()
        self._begin(batch)
        inputs["rate"] = torch.tensor(batch.rate, dtype=torch.float64)
        if self._unproven:
            self._prove_compiled(batch)
        if self._captured:  # a recorded step finds its inputs on the device
            inputs = self._on_device(inputs)
        self._see(batch, step(inputs), losses)

    def _stream_step(self, stream: Stream, batch: Batch | None) -> None:
        """One batch enters, or none; every stage trains on the one that it has an answer to."""
        self._train_mode()
        if batch is not None and self._unproven and stream.recorded:
            self._prove_compiled(batch)
        trained, inputs = stream.enter(batch)
        if self._captured:
            inputs = self._on_device(inputs)
        if stream.recorded and stream.steady:  # what has random numbers draws them from one stream then
            if batch is not None:
                self._lanes.seed(batch.random(0))
            row = self._streaming(inputs)
        else:
            with self._lanes.current:
                row = stream.step(inputs)
        self._see(trained, row, len(self.stages))

    def finish(self) -> None:
        stream = self._stream
        if stream is None:
            return
        while not stream.empty:
            self._stream_step(stream, None)
        stream.settle()
        self.drain()

    def _on_device(self, inputs: Inputs) -> Inputs:
        return {name: self._lanes.send(value) for name, value in inputs.items()}

    def _see(self, batch: Batch | list[Batch | None], row: Tensor, losses: int) -> None:
        self._seen.append((batch, row, losses))
        if not self._captured:
            self.drain()
        elif len(self._seen) >= LOOK_EVERY:
            self._look()

    def _look(self) -> None:
        """At losses that have come; those of the last steps are sent on their way. The GPU is not waited for."""
        seen, self._seen = self._seen, []
        rows = self._lanes.fetch(torch.stack([row for _, row, _ in seen]))
        before, self._coming = self._coming, Coming(seen, rows, self._lanes.current.mark())
        if before is not None:
            before.arrived.synchronize()
            self._add(before.steps, before.rows)

    def _prove_compiled(self, batch: Batch) -> None:
        """One pass there and back that changes nothing; where the compiler fails, the blocks stay as they are."""
        self._unproven = False
        try:
            with unchanged_buffers(self.model):
                x, targets = self.feed.batch(batch.ids)
                for stage in self.stages:
                    x = stage.forward(x, quick=True)
                self.loss(in_float32(x), targets).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may fail in any way
            reason = str(error).strip().partition("\n")[0]
            self._say(f"blocks are not compiled: {reason}")
            self._quick_joints = self._joints
            for stage in self.stages:
                stage.speed_up(stage.module)
        self._forget()

    def _begin(self, batch: Batch) -> None:
        """Random numbers inside the network depend on the step and the stage alone."""
        self._seeds = [batch.random(k) for k in range(len(self.stages))]
        if self._captured:
            self._lanes.seed(self._seeds[0])
        else:
            torch.manual_seed(self._seeds[0])

    def _train_mode(self) -> None:
        """Asking all modules of a deep network takes as long as some of its kernels."""
        if not self.model.training:
            self.model.train()

    def _forward(self, k: int, x: Tensor, quick: bool = False) -> Tensor:
        if not self._captured:  # a recorded step has one stream of random numbers, seeded before it
            torch.manual_seed(self._seeds[k])
        return self.stages[k].forward(x, quick)

    @contextmanager
    def _through_windows(self) -> Iterator[None]:
        """Around a recorded step: states come from the host and go back there, while others are computed."""
        if self._windows is None:
            yield
            return
        self._windows.bring(self._ids)
        if self._following is not None:
            self._windows.prefetch(self._following)
        yield
        self._windows.carry(self._ids)

    def _forget(self) -> None:
        """Of a step that could not be recorded nothing may stay behind."""
        for stage in self.stages:
            stage.forget_gradients()
        for station in self._stream.stations if self._stream is not None else []:
            station.forget()

    def _parallel_step(self, inputs: Inputs, quick: bool = False) -> Tensor:
        """One step of every stage, each in its lane; what crosses from one lane to another waits for it."""
        ids, beta = inputs["ids"], inputs["beta"]
        count, branches, joints = len(self.stages), self._branches, self._quick_joints if quick else self._joints
        turns = [inputs.get(f"turn-{k}") for k in range(count)]
        with branches.side_by_side():
            pairs = []
            for k, joint in enumerate(joints):
                with branches.lane(k + 1):
                    pairs.append(joint.gather(ids))
                branches.after(k, k + 1)
            if self._following is not None and not quick:  # on its way while this batch is computed
                for interface in self.interfaces:
                    interface.prefetch(self._following)

            # 1. every stage at once: its state through its blocks, its own loss, its own gradient
            losses, outputs, adjoints = [], [], []
            for k in range(count):
                with branches.lane(k):
                    x, loss, p = self._local_gradient(k, ids, turns[k], pairs, beta, quick, self._guard.seen)
                losses.append(loss)
                outputs.append(x)
                adjoints.append(p)
            if not self._guard.look():
                return _row(losses)  # before any update; `drain` names the stage
            for k, stage in enumerate(self.stages):
                with branches.lane(k):
                    self._guard.hold()
                    self._clip(stage.gradients())
                    stage.set_rate(inputs["rate"])
                    stage.apply()

            # 2. every interface: new states and multipliers
            violations = []
            for k, joint in enumerate(joints):
                branches.after(k + 1, k)
                with branches.lane(k + 1):
                    args = ids, pairs[k], outputs[k], turns[k], adjoints[k + 1], turns[k + 1], beta
                    violations.append(joint.update(*args))
        return _row(losses, violations)

    def _local_gradient(
        self,
        k: int,
        ids: Tensor,
        turn: Tensor | None,
        pairs: list[Pair],
        beta: Tensor,
        quick: bool,
        seen: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stage k on its own problem: its output, its loss, and the adjoint of its state; the ends lack one of them.

        `seen` is told the loss before the way back.
        """
        if turn is not None:
            ids = ids[turn.to(ids.device)]
        if len(ids) == 0:  # a last batch of one sample, in which another stage has its turn
            return NOTHING, torch.zeros((), device=self.stages[k].device), NOTHING
        first, last = k == 0, k == len(self.interfaces)
        inputs, targets = self.feed.batch(ids) if first or last else (NOTHING, NOTHING)
        state = NOTHING
        if not first:
            state = pairs[k - 1].of(turn).state.detach().requires_grad_()
            inputs = self.interfaces[k - 1].up(self.stages[k].lowered(state))
        x = self._forward(k, inputs, quick)
        if last:
            loss = self.loss(in_float32(x), targets)
        else:
            loss = (self._quick_joints if quick else self._joints)[k].local_loss(x, pairs[k].of(turn), beta)
        loss = faults.spoil(k, loss)
        if seen is not None:
            seen(loss)
        if loss.requires_grad:  # not where a first stage has nothing to train
            loss.backward()  # type: ignore[no-untyped-call]
        p = state.grad * len(ids) if state.grad is not None else NOTHING  # the loss is a mean, the adjoint per sample
        return NOTHING if last else x.detach(), loss.detach(), p

    def _serial_step(self, inputs: Inputs, quick: bool = False) -> Tensor:
        x, targets = self.feed.batch(inputs["ids"], inputs)
        for k in range(len(self.stages)):
            x = self._forward(k, x, quick)
        loss = faults.spoil(len(self.stages) - 1, self.loss(in_float32(x), targets))
        self._guard.seen(loss)
        if self._guard.look():
            loss.backward()  # type: ignore[no-untyped-call]
            self._guard.hold()
            self._clip([g for stage in self.stages for g in stage.gradients()])
            for stage in self.stages:
                stage.set_rate(inputs["rate"])
                stage.apply()
        return loss.detach().reshape(1)

    def refresh(self, batches: Iterable[Batch], stop: Callable[[], bool]) -> list[float] | None:
        if not self.interfaces:
            return None
        had_states = self.filled
        violations: list[Tensor] = []
        for interface in self.interfaces:
            interface.filled = False
            interface.mean_square.zero_()
        self.model.train()
        with unchanged_buffers(self.model), torch.no_grad():
            for batch in batches:
                if stop():
                    return None
                violations.append(self._start(batch))
        for interface in self.interfaces:
            interface.filled = True
        return torch.stack(violations).mean(0).tolist() if had_states else None

    def _start(self, batch: Batch) -> Tensor:
        """States of one batch by a forward pass, through the filters: what each stage will see is what it puts out."""
        self._begin(batch)
        x, _ = self.feed.batch(batch.ids)
        violations = []
        for k, interface in enumerate(self.interfaces):
            x = interface.down(self._forward(k, x).to(interface.device))
            violations.append(interface.start(batch.ids, x))
            x = interface.up(x)
        return _row(violations)

    def cosines(self, batch: Batch) -> list[float] | None:
        if not (self.interfaces and self.filled and isinstance(self.coupling, Coupling)):
            return None
        turns = [self.coupling.turn(batch.ids, batch.epoch, k) for k in range(len(self.stages))]
        samples = [batch.ids if turn is None else batch.ids[turn] for turn in turns]
        if not all(len(ids) for ids in samples):
            return None
        self.model.train()
        self._begin(batch)
        with unchanged_buffers(self.model):
            pairs = [interface.gather(batch.ids) for interface in self.interfaces]
            for k, turn in enumerate(turns):
                self._local_gradient(k, batch.ids, turn, pairs, torch.tensor(batch.beta), quick=False)
            own = [stage.take_gradients() for stage in self.stages]
            kinds = {tuple(ids.tolist()): ids for ids in samples}  # stages of the same turn compute the same samples
            true = {kind: self._true_gradients(ids) for kind, ids in kinds.items()}
        return cosines(own, [true[tuple(ids.tolist())][k] for k, ids in enumerate(samples)])

    def _true_gradients(self, ids: Tensor) -> list[Gradients]:
        """Of every stage, by backpropagation through the whole network."""
        x, targets = self.feed.batch(ids)
        for k in range(len(self.stages)):
            x = self._forward(k, x)
        self.loss(in_float32(x), targets).backward()  # type: ignore[no-untyped-call]
        return [stage.take_gradients() for stage in self.stages]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(x)
        return x

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], loss: Loss | None = None) -> dict[str, float]:
        self.model.eval()
        return evaluate(self.forward, loss or self.loss, batches)

    def drain(self) -> Totals:
        """Take the losses of all steps from the device, look at them, and add them up."""
        seen, self._seen = self._seen, []
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.arrived.synchronize()
            self._add(coming.steps, coming.rows)
        if seen:
            self._add(seen, torch.stack([row for _, row, _ in seen]))  # one copy takes them
        return self.totals

    def _add(self, steps: Steps, rows: Tensor) -> None:
        for (batch, _, losses), row in zip(steps, rows.tolist(), strict=True):
            raise_if_not_finite(batch, row[:losses], len(self.stages))
            if isinstance(batch, Batch):
                self.totals.add(len(batch.ids), row[:losses], row[losses:])
            else:
                self.totals.add_apart([len(b.ids) if b is not None else 0 for b in batch], row)

    def parts(self, with_states: bool) -> dict[str, dict[str, Tensor]]:
        parts = {f"stage-{k}": stage.tensors() for k, stage in enumerate(self.stages)}
        if with_states and self.filled:
            parts |= {f"interface-{k}": interface.tensors() for k, interface in enumerate(self.interfaces, 1)}
        if self._stream is not None:
            stations = {f"station-{k}": self._stream.part(k, with_states) for k in range(len(self.stages))}
            parts |= {name: part for name, part in stations.items() if part}
        return parts

    def load(self, parts: Mapping[str, dict[str, Tensor]]) -> None:
        kept = stage_tensors(parts)
        for stage in self.stages:
            stage.load(kept)
        states = [parts.get(f"interface-{k}") for k in range(1, len(self.interfaces) + 1)]
        same_cut = f"interface-{len(self.interfaces) + 1}" not in parts
        for interface, values in zip(self.interfaces, states, strict=True):
            interface.filled = same_cut and values is not None and interface.load(values)
        if self._stream is not None:
            self._stream.load(parts, self._say)

    def assemble(self) -> None:
        """The model holds them already."""

    @property
    def here(self) -> range:
        return range(len(self.stages))

    @property
    def filled(self) -> bool:
        return all(interface.filled for interface in self.interfaces)

    @property
    def learning_rate(self) -> float | None:
        return next((rate for stage in self.stages if (rate := stage.learning_rate) is not None), None)

    @property
    def auxiliary_bytes(self) -> int:
        return sum(interface.bytes for interface in self.interfaces) + (self._stream.bytes if self._stream else 0)

    def facts(self) -> dict[str, Any]:
        """A streaming method's signals are some steps late; those of stored states about an epoch."""
        if not isinstance(self.coupling, Streaming):
            return super().facts()
        return {**super().facts(), "staleness": self.coupling.staleness(len(self.stages))}

    def close(self) -> None:
        try:
            if self._windows is not None:
                self._windows.close()
        finally:
            for interface in self.interfaces:
                interface.close()

    def _clip(self, gradients: list[Tensor]) -> None:
        if self.clip is not None:
            clip_gradients(gradients, self.clip)


def _row(*columns: list[Tensor]) -> Tensor:
    """All numbers of a step in one tensor: one copy to the host takes them."""
    values = [value for column in columns for value in column]
    return torch.stack([value.float().to(values[0].device) for value in values])


def _always(inputs: Inputs) -> bool:  # noqa: ARG001
    return True
