"""All stages in one process, on any mix of devices: the reference that other engines are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

from parlay.coupling import Pair
from parlay.engines.base import Batch, Engine, Totals
from parlay.errors import Diverged, InputError
from parlay.evaluate import Loss, evaluate, unchanged_buffers
from parlay.feed import Feed
from parlay.interface import Interface
from parlay.partitioning import Partition
from parlay.stage import Stage

LOOK_EVERY = 32  # steps between two looks at the losses on a GPU, which wait for it; on the CPU every step is looked at


@final
class InProcess(Engine):
    """Stages and interfaces side by side. Interface k joins stages k-1 and k, so there are K-1 of them."""

    def __init__(
        self,
        partition: Partition,
        stages: list[Stage],
        interfaces: list[Interface],
        loss: Loss,
        feed: Feed,
        *,
        clip: float | None = None,
        adjoints_at_start: bool = False,
    ) -> None:
        self.model = partition.model
        self.stages = stages
        self.interfaces = interfaces
        self.loss = loss
        self.feed = feed
        self.clip = clip
        self.adjoints_at_start = adjoints_at_start
        self.totals = Totals()
        self._seen: list[_Step] = []
        self._look_every = 1 if all(stage.device.type == "cpu" for stage in stages) else LOOK_EVERY

    def parallel_step(self, batch: Batch) -> None:
        self.model.train()
        ids, n = batch.ids, len(batch.ids)
        inputs, targets = self.feed.batch(ids)
        pairs = [interface.gather(ids) for interface in self.interfaces]
        if batch.following is not None:
            for interface in self.interfaces:
                interface.prefetch(batch.following)
        beta = torch.tensor(batch.beta)

        # 1. every stage at once: its state through its blocks, its own loss, its own gradient
        losses, outputs, adjoints = [], [], []
        for k, stage in enumerate(self.stages):
            torch.manual_seed(batch.random(k))
            state = pairs[k - 1].state.requires_grad_() if k > 0 else None
            x = stage.forward(inputs if state is None else self.interfaces[k - 1].up(state))
            if k < len(self.interfaces):
                loss = self.interfaces[k].local_loss(x, pairs[k], beta)
            else:
                loss = self.loss(x, targets)
            loss.backward()
            losses.append(loss.detach())
            outputs.append(x)
            if state is not None and state.grad is not None:
                adjoints.append(state.grad * n)  # the loss is a mean, the adjoint is per sample
        self._stop_if_not_finite(batch, losses)
        for stage in self.stages:
            self._clip(stage.gradients())
            stage.apply(batch.rate)

        # 2. every interface: new states and multipliers
        violations = []
        for interface, pair, x, p in zip(self.interfaces, pairs, outputs[:-1], adjoints, strict=True):
            pair = Pair(pair.state.detach(), pair.multiplier)
            violations.append(interface.update(ids, pair, x.detach(), p, beta))
        self._record(batch, losses, violations)

    def serial_step(self, batch: Batch) -> None:
        self.model.train()
        x, targets = self.feed.batch(batch.ids, batch.generator())
        for k, stage in enumerate(self.stages):
            torch.manual_seed(batch.random(k))
            x = stage.forward(x)
        loss = self.loss(x, targets)
        loss.backward()
        self._stop_if_not_finite(batch, [loss.detach()])
        self._clip([g for stage in self.stages for g in stage.gradients()])
        for stage in self.stages:
            stage.apply(batch.rate)
        self._record(batch, [loss.detach()], [])

    def refresh(self, batches: Iterable[Batch], stop: Callable[[], bool]) -> list[float] | None:
        had_states = self.filled
        violations: list[list[Tensor]] = []
        for interface in self.interfaces:
            interface.filled = False
            interface.forget_moments()
        self.model.train()
        with unchanged_buffers(self.model):
            for batch in batches:
                if stop():
                    return None
                violations.append(self._start(batch))
        for interface in self.interfaces:
            interface.filled = True
        if not had_states:
            return None
        return [float(torch.stack(column).mean()) for column in zip(*violations, strict=True)]

    def _start(self, batch: Batch) -> list[Tensor]:
        """States, and adjoints where they are asked for, of one batch by plain backpropagation through the filters."""
        x, targets = self.feed.batch(batch.ids)
        smalls: list[Tensor] = []
        with torch.set_grad_enabled(self.adjoints_at_start):
            for k, stage in enumerate(self.stages):
                if k > 0:
                    smalls.append(self.interfaces[k - 1].down(x.to(stage.device)))
                    x = self.interfaces[k - 1].up(smalls[-1])
                torch.manual_seed(batch.random(k))
                x = stage.forward(x)
            adjoints: Iterable[Tensor | None] = [None] * len(smalls)
            if self.adjoints_at_start and smalls:
                adjoints = torch.autograd.grad(self.loss(x, targets) * len(batch.ids), smalls)
        beta = torch.tensor(batch.beta)
        joined = zip(self.interfaces, smalls, adjoints, strict=True)
        return [interface.start(batch.ids, x.detach(), p, beta) for interface, x, p in joined]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(x)
        return x

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], loss: Loss | None = None) -> dict[str, float]:
        self.model.eval()
        return evaluate(self.forward, loss or self.loss, batches)

    def drain(self) -> Totals:
        """Take the losses of the last steps from the devices, look at them, and add them up."""
        seen, self._seen = self._seen, []
        if not seen:
            return self.totals
        losses = [_to_host(column) for column in zip(*(step.losses for step in seen), strict=True)]
        for step, row in zip(seen, zip(*losses, strict=True), strict=True):
            _raise_if_not_finite(step.batch, row, len(self.stages))
        violations = [_to_host(column) for column in zip(*(step.violations for step in seen), strict=True)]
        weights = [len(step.batch.ids) for step in seen]
        self.totals.samples += sum(weights)
        self.totals.loss = _add(self.totals.loss, losses, weights)
        self.totals.violation = _add(self.totals.violation, violations, weights)
        return self.totals

    def parts(self, with_states: bool) -> dict[str, dict[str, Tensor]]:
        parts = {f"stage-{k}": stage.tensors() for k, stage in enumerate(self.stages)}
        if with_states and self.filled:
            parts |= {f"interface-{k}": interface.tensors() for k, interface in enumerate(self.interfaces, 1)}
        return parts

    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        kept = {name: value for part, values in parts.items() if part.startswith("stage-") for name, value in values.items()}
        for stage in self.stages:
            stage.load(kept)
        states = [parts.get(f"interface-{k}") for k in range(1, len(self.stages))]
        same_cut = f"interface-{len(self.stages)}" not in parts
        for interface, values in zip(self.interfaces, states, strict=True):
            interface.filled = same_cut and values is not None and interface.load(values)

    @property
    def filled(self) -> bool:
        return all(interface.filled for interface in self.interfaces)

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

    def _stop_if_not_finite(self, batch: Batch, losses: list[Tensor]) -> None:
        """On the CPU a look costs nothing: stop before the update. On a GPU `drain` looks later."""
        if self._look_every == 1:
            _raise_if_not_finite(batch, [float(loss) for loss in losses], len(self.stages))

    def _record(self, batch: Batch, losses: list[Tensor], violations: list[Tensor]) -> None:
        self._seen.append(_Step(batch, losses, violations))
        if len(self._seen) >= self._look_every:
            self.drain()


@final
class _Step:
    """The losses and violations of a step, still on their devices."""

    def __init__(self, batch: Batch, losses: list[Tensor], violations: list[Tensor]) -> None:
        self.batch, self.losses, self.violations = batch, losses, violations


def _to_host(column: Iterable[Tensor]) -> list[float]:
    return [float(v) for v in torch.stack(list(column)).tolist()]


def _add(sums: list[float], columns: list[list[float]], weights: list[int]) -> list[float]:
    new = [sum(v * w for v, w in zip(column, weights, strict=True)) for column in columns]
    return [a + b for a, b in zip(sums, new, strict=True)] if sums else new


def _raise_if_not_finite(batch: Batch, losses: Iterable[float], stages: int) -> None:
    for k, loss in enumerate(losses):
        if not math.isfinite(loss):
            who = f"stage {k} of {stages}"
            ids = ", ".join(map(str, batch.ids[:4].tolist())) + (", ..." if len(batch.ids) > 4 else "")
            raise Diverged(f"the loss of {who} is {loss} in epoch {batch.epoch}, step {batch.step} (samples {ids})")


def check_batch_norm(error: ValueError) -> InputError:
    """torch's complaint about a batch norm over a single value, in words that help."""
    return InputError(f"batch normalisation over a single value ({error}): take another batch size, or larger images")
