"""All stages in one process, on any mix of devices: the reference that other engines are compared with.

A step is one function from tensors to a row of losses and violations. On a GPU it is recorded once as a CUDA graph;
everywhere else, and for last incomplete batches, the same function runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

from parlay.coupling import Coupling, Pair
from parlay.data.feed import Feed
from parlay.engines.base import Batch, Engine, Totals
from parlay.engines.graphs import Graphed, Inputs
from parlay.errors import Diverged
from parlay.evaluate import Loss, evaluate, in_float32, unchanged_buffers
from parlay.interface import Interface
from parlay.stage import Stage

NOTHING = torch.empty(0)
LOOK_EVERY = 32  # steps between two looks at the losses on a GPU, which wait for it; on the CPU every step is looked at


@final
class InProcess(Engine):
    """Stages and interfaces side by side. `interfaces[k]` joins stages k and k+1; there is one fewer than stages."""

    def __init__(
        self,
        model: torch.nn.Module,
        stages: list[Stage],
        interfaces: list[Interface],
        coupling: Coupling,
        loss: Loss,
        feed: Feed,
        *,
        clip: float | None = None,
        capture: bool = False,
    ) -> None:
        self.model = model
        self.stages = stages
        self.interfaces = interfaces
        self.coupling = coupling
        self.loss = loss
        self.feed = feed
        self.clip = clip
        self.totals = Totals()
        self._seen: list[tuple[Batch, Tensor, int]] = []
        self._on_cpu = all(stage.device.type == "cpu" for stage in stages)
        self._captured = capture
        self._seeds: list[int] = []
        self._following: Tensor | None = None
        device = stages[0].device
        self._parallel = Graphed(self._parallel_step, device) if capture else self._parallel_step
        self._serial = Graphed(self._serial_step, device) if capture else self._serial_step

    def parallel_step(self, batch: Batch) -> None:
        inputs = {"ids": batch.ids, "beta": torch.tensor(batch.beta)}
        for k in range(len(self.stages)):
            # a single stage has no neighbour to take turns with: it is serial training
            turn = self.coupling.turn(batch.ids, batch.epoch, k) if self.interfaces else None
            if turn is not None:
                inputs[f"turn-{k}"] = turn
        self._following = batch.following
        self._step(self._parallel, batch, inputs, losses=len(self.stages))

    def serial_step(self, batch: Batch) -> None:
        changes = self.feed.draw(len(batch.ids), batch.generator())
        self._step(self._serial, batch, {"ids": batch.ids, **changes}, losses=1)

    def _step(self, step: Callable[[Inputs], Tensor], batch: Batch, inputs: Inputs, losses: int) -> None:
        self.model.train()
        self._begin(batch)
        for stage in self.stages:
            stage.set_rate(batch.rate)
        if self._captured:  # a recorded step finds its inputs on the device
            inputs = {name: value.to(self.stages[0].device, non_blocking=True) for name, value in inputs.items()}
        row = step(inputs)
        self._seen.append((batch, row, losses))
        if len(self._seen) >= (1 if self._on_cpu else LOOK_EVERY):
            self.drain()

    def _begin(self, batch: Batch) -> None:
        """Random numbers inside the network depend on the step and the stage alone."""
        self._seeds = [batch.random(k) for k in range(len(self.stages))]
        torch.manual_seed(self._seeds[0])

    def _forward(self, k: int, x: Tensor) -> Tensor:
        if not self._captured:  # a recorded step has one stream of random numbers, seeded before it
            torch.manual_seed(self._seeds[k])
        return self.stages[k].forward(x)

    def _parallel_step(self, inputs: Inputs) -> Tensor:
        ids, beta = inputs["ids"], inputs["beta"]
        turns = [inputs.get(f"turn-{k}") for k in range(len(self.stages))]
        pairs = [interface.gather(ids) for interface in self.interfaces]
        if self._following is not None:  # on its way while this batch is computed
            for interface in self.interfaces:
                interface.prefetch(self._following)

        # 1. every stage at once: its state through its blocks, its own loss, its own gradient
        losses, outputs, adjoints = [], [], []
        for k in range(len(self.stages)):
            x, loss, p = self._local_gradient(k, ids, turns[k], pairs, beta)
            losses.append(loss)
            outputs.append(x)
            adjoints.append(p)
        if self._on_cpu and not all(math.isfinite(float(loss)) for loss in losses):
            return _row(losses)  # before any update; `drain` names the stage
        for stage in self.stages:
            self._clip(stage.gradients())
            stage.apply()

        # 2. every interface: new states and multipliers
        violations = [
            interface.update(ids, pairs[k], outputs[k], turns[k], adjoints[k + 1], turns[k + 1], beta)
            for k, interface in enumerate(self.interfaces)
        ]
        return _row(losses, violations)

    def _local_gradient(
        self, k: int, ids: Tensor, turn: Tensor | None, pairs: list[Pair], beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stage k on its own problem: its output, its loss, and the adjoint of its state; the ends lack one of them."""
        if turn is not None:
            ids = ids[turn.to(ids.device)]
        if len(ids) == 0:  # a last batch of one sample, in which another stage has its turn
            return NOTHING, torch.zeros((), device=self.stages[k].device), NOTHING
        first, last = k == 0, k == len(self.interfaces)
        inputs, targets = self.feed.batch(ids) if first or last else (NOTHING, NOTHING)
        state = NOTHING
        if not first:
            state = pairs[k - 1].of(turn).state.detach().requires_grad_()
            inputs = self.interfaces[k - 1].up(state)
        x = self._forward(k, inputs)
        joined = None if last else self.interfaces[k]
        loss = joined.local_loss(x, pairs[k].of(turn), beta) if joined else self.loss(in_float32(x), targets)
        if loss.requires_grad:  # not where a first stage has nothing to train
            loss.backward()  # type: ignore[no-untyped-call]
        p = state.grad * len(ids) if state.grad is not None else NOTHING  # the loss is a mean, the adjoint per sample
        return NOTHING if last else x.detach(), loss.detach(), p

    def _serial_step(self, inputs: Inputs) -> Tensor:
        x, targets = self.feed.batch(inputs["ids"], inputs)
        for k in range(len(self.stages)):
            x = self._forward(k, x)
        loss = self.loss(in_float32(x), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._on_cpu or math.isfinite(float(loss.detach())):
            self._clip([g for stage in self.stages for g in stage.gradients()])
            for stage in self.stages:
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

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(x)
        return x

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], loss: Loss | None = None) -> dict[str, float]:
        self.model.eval()
        return evaluate(self.forward, loss or self.loss, batches)

    def drain(self) -> Totals:
        """Take the losses of the last steps from the device, look at them, and add them up."""
        seen, self._seen = self._seen, []
        rows = _host([row for _, row, _ in seen])
        for (batch, _, losses), row in zip(seen, rows, strict=True):
            _raise_if_not_finite(batch, row[:losses], len(self.stages))
            self.totals.add(len(batch.ids), row[:losses], row[losses:])
        return self.totals

    def parts(self, with_states: bool) -> dict[str, dict[str, Tensor]]:
        parts = {f"stage-{k}": stage.tensors() for k, stage in enumerate(self.stages)}
        if with_states and self.filled:
            parts |= {f"interface-{k}": interface.tensors() for k, interface in enumerate(self.interfaces, 1)}
        return parts

    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        kept = {
            name: value for part, values in parts.items() if part.startswith("stage-") for name, value in values.items()
        }
        for stage in self.stages:
            stage.load(kept)
        states = [parts.get(f"interface-{k}") for k in range(1, len(self.interfaces) + 1)]
        same_cut = f"interface-{len(self.interfaces) + 1}" not in parts
        for interface, values in zip(self.interfaces, states, strict=True):
            interface.filled = same_cut and values is not None and interface.load(values)

    @property
    def filled(self) -> bool:
        return all(interface.filled for interface in self.interfaces)

    @property
    def learning_rate(self) -> float | None:
        return next((rate for stage in self.stages if (rate := stage.learning_rate) is not None), None)

    @property
    def auxiliary_bytes(self) -> int:
        return sum(interface.bytes for interface in self.interfaces)

    def close(self) -> None:
        for interface in self.interfaces:
            interface.close()

    def _clip(self, gradients: list[Tensor]) -> None:
        if self.clip is not None and gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            scale = (self.clip / (norm + 1e-6)).clamp_max(1.0)
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.device))


def _row(*columns: list[Tensor]) -> Tensor:
    """All numbers of a step in one tensor: one copy to the host takes them."""
    values = [value for column in columns for value in column]
    return torch.stack([value.float().to(values[0].device) for value in values])


def _host(rows: list[Tensor]) -> list[list[float]]:
    """The rows of several steps, in one copy."""
    return [[float(v) for v in row] for row in torch.stack(rows).tolist()] if rows else []


def _raise_if_not_finite(batch: Batch, losses: list[float], stages: int) -> None:
    for k, loss in enumerate(losses):
        if not math.isfinite(loss):
            whose = f"stage {k} of {stages}" if len(losses) == stages else "the network"  # a serial step has one loss
            ids = ", ".join(map(str, batch.ids[:4].tolist())) + (", ..." if len(batch.ids) > 4 else "")
            raise Diverged(f"the loss of {whose} is {loss} in epoch {batch.epoch}, step {batch.step} (samples {ids})")
