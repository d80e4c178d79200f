"""A parallel step of the stages that this process owns.

    [1] clock.enter(batch)           which batch goes forward and backward at each stage
    [2] each own stage   forward     the link before ─► blocks ─► the link after
        round UP                     outputs travel while the backward passes run
    [3] each own stage   loss        from the link after; the network's own, for the last stage
        agree                        no update anywhere once a loss is not finite
    [4] each own stage   backward    gradients into the weights, the adjoint into the link before
        round DOWN                   adjoints, or signals of a later step, travel while the next forward passes run
    [5] each own stage   update      clip, optimiser
    [6] each own link    renew       both stages are done: new states and signals

A stage of a method that guesses goes back with the batch of its forward pass, and first learns from an earlier one.
In one process there are no rounds, and a stage makes [2] to [4] before the next one begins. `run` is what a CUDA graph
holds: it takes whatever changes from step to step as tensors. Stored methods leave one round under way: then a stage
waits for a neighbour only when that one is slower by more than a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from parlay import faults
from parlay.batch import Batch, Pass
from parlay.engine.captured import Captured, Inputs
from parlay.engine.clock import Clock, Turn
from parlay.engine.guard import Guard
from parlay.engine.losses import LATE, SharedLosses, Trained
from parlay.engine.own import Own
from parlay.engine.rounds import Rounds
from parlay.link.link import Direction, Link
from parlay.timeline import Recorder


@final
class ParallelStep:
    def __init__(
        self,
        own: Own,
        guard: Guard,
        recorder: Recorder,
        rounds: Rounds | None = None,
        shared: SharedLosses | None = None,
    ) -> None:
        """`rounds` and `shared`: among several processes."""
        self.own, self.guard, self.recorder, self.rounds, self.shared = own, guard, recorder, rounds, shared
        method, stages = own.method, own.world.stages
        self.clock = Clock([(method.entry(k, stages), method.lag(k, stages)) for k in range(stages)])
        self.number = -1
        """Of this step, for the spans."""
        self._concerned: list[int] = sorted({*own.range, *(k for link in own.links for k in (link.k - 1, link.k))})
        counts = [*(link.slot_counts for link in own.links), *(worker.slot_counts for worker in own.workers.values())]
        self._moduli = sorted({n for each in counts for n in each}) if own.lanes.captures else []
        self._groups = [own.range] if rounds else [range(k, k + 1) for k in own.range]
        self._rate = 1.0
        self._turns: list[Turn] = []
        self._whole: dict[int, int] = {}
        self._signalled = False
        """Have the signals of the first steps of this epoch been sent?"""
        self._captured: Captured | None = None

    def capture(self, captured: Captured) -> None:
        """From now on steps go through this."""
        self._captured = captured

    def __call__(self, batch: Batch | None) -> tuple[Trained, Tensor]:
        """Gives the batches that the stages have trained on, and the losses and violations of the own ones."""
        own = self.own
        self.number += 1
        own.train_mode()
        self._turns = turns = self.clock.enter(batch)
        if batch is not None:
            self._rate = batch.rate
            for link in own.links:
                link.set_weight(batch.weight)
        for k, worker in own.workers.items():
            worker.seed(turns[k].forward, turns[k].backward, own.world.replica)
        inputs = self._inputs(turns)
        trained = self._trained()
        if self._captured is None:
            return trained, self.run(inputs)
        full = own.method.can_be_captured and all(
            its is not None and its.rows == own.batch_size for turn in turns for its in (turn.forward, turn.backward)
        )
        return trained, self._captured(inputs, full)

    def _trained(self) -> Trained:
        return [turn.forward if self.own.method.guesses else turn.backward for turn in self._turns]

    # What a step takes

    def _inputs(self, turns: list[Turn]) -> Inputs:
        """A batch that several stages have in this step stands there once."""
        own = self.own
        inputs = {"rate": torch.tensor(self._rate, dtype=torch.float64)}
        for k in self._concerned:
            batch = turns[k].forward
            if batch is None:
                continue
            share = own.rows.of(batch.ids, batch.epoch, k)
            self._whole[k] = share.whole
            inputs[f"ids-{self._first(k)}"] = share.ids
            if share.places is not share.ids:
                inputs[f"places-{self._first(k)}"] = share.places
            if share.positions is not None:
                inputs[f"positions-{k}"] = share.positions
            if own.method.fresh_inputs and k in own.range and self._sees_inputs(k):
                drawn = own.feed.draw(batch.rows, batch.generator())
                inputs |= {f"changes-{k}/{name}": value for name, value in drawn.items()}
        if self._moduli:
            numbers = [n for turn in turns for n in (turn.number, turn.number_back)]
            inputs["slots"] = torch.tensor([[n % count for count in self._moduli] for n in numbers])
        return inputs

    def _first(self, k: int) -> int:
        """The first stage that has the same batch as stage k."""
        own = self._turns[k].forward
        return min(j for j in self._concerned if self._turns[j].forward is own)

    def _sees_inputs(self, k: int) -> bool:
        last = k == self.own.world.stages - 1
        return k == 0 or self.own.workers[k].wants_inputs or (last and self.own.feed.reconstruct)

    def _passes(self, inputs: Inputs, compiled: bool) -> dict[int, tuple[Pass | None, Pass | None]]:
        found: dict[int, tuple[Pass | None, Pass | None]] = {}
        for k in self._concerned:
            turn = self._turns[k]
            forward = backward = None
            if turn.forward is not None:
                ids = inputs[f"ids-{self._first(k)}"]
                before = f"changes-{k}/"
                changes = {n.removeprefix(before): value for n, value in inputs.items() if n.startswith(before)}
                forward = Pass(
                    turn.forward,
                    turn.number,
                    ids,
                    inputs.get(f"places-{self._first(k)}", ids),
                    inputs.get(f"positions-{k}"),
                    self._whole[k],
                    self._slots(inputs, 2 * k),
                    changes if self.own.method.fresh_inputs else None,
                    compiled,
                )
            if turn.lag == 0:
                backward = forward
            elif turn.backward is not None:
                ids, slots = turn.backward.ids, self._slots(inputs, 2 * k + 1)
                backward = Pass(turn.backward, turn.number_back, ids, ids, None, len(ids), slots, None, compiled)
            found[k] = forward, backward
        return found

    def _slots(self, inputs: Inputs, row: int) -> dict[int, Tensor]:
        return {count: inputs["slots"][row, n : n + 1] for n, count in enumerate(self._moduli)}

    # What a step does

    def run(self, inputs: Inputs, compiled: bool = False) -> Tensor:
        own, guard, workers = self.own, self.guard, self.own.workers
        passes = self._passes(inputs, compiled)
        forward = {k: p for k, (p, _) in passes.items()}
        answered = {k: p for k, (_, p) in passes.items()}
        backward = forward if own.method.guesses else answered
        active = {k: p for k, p in backward.items() if k in workers and p is not None and p.whole}
        losses: dict[int, Tensor] = {}
        self._receive()
        with own.side_by_side():
            for k, worker in workers.items():
                with own.lane(k):
                    worker.begin(inputs["rate"])
                    before = answered[k] if own.method.guesses else None
                    if before is not None:
                        worker.learn(before)
            gathered = [link.k for link in own.links if self._gathered(link, forward[link.k])]
            for group in self._groups:
                for k in group:
                    p = forward[k]
                    if p is not None and p.whole:
                        with own.lane(k), self.recorder.span("forward", self.number):
                            workers[k].forward(p)
                self._send_up(forward)
                for k in group:
                    with own.lane(k):
                        if k in active:
                            losses[k] = faults.spoil(k, workers[k].loss(active[k]))
                        else:
                            losses[k] = torch.zeros((), device=own.device)
                        guard.see(losses[k])
                self._agree(losses)
                for k in group:
                    if k in active:
                        with own.lane(k), self.recorder.span("backward", self.number):
                            workers[k].backward(active[k])
            self._send_down(backward)
            may_update = self._may_update()
            if not may_update and self.shared is None:
                return _row(losses.values())  # the stage is named when the losses are read
            for k, worker in workers.items():
                with own.lane(k), self.recorder.span("update", self.number):
                    guard.hold()
                    if self.shared is not None and k in active:
                        self.shared.average(worker.stage)
                    if may_update:
                        worker.update(own.clip)
            violations: list[list[Tensor]] = []
            for link in own.links:
                if link.k in gathered and link.end.lower:
                    own.after(link.k, link.k - 1)
                with own.lane(link.k if link.end.upper else link.k - 1):
                    violations.append(link.renew(backward[link.k - 1], backward[link.k]))
        if self.shared is not None:
            self.shared.violations([met for link, met in zip(own.links, violations, strict=True) if link.end.upper])
            self.shared.read(LATE)
        return _row([*losses.values(), *(value for met in violations for value in met)])

    def _gathered(self, link: Link, p: Pass | None) -> bool:
        """Stage k-1 waits for what the link has read in the lane of stage k."""
        if p is None or not link.end.upper:
            return False
        with self.own.lane(link.k):
            found = link.gather(p)
            if p.batch.following and self.rounds is None and not p.compiled:
                link.prefetch(p.batch.following[0])  # on its way while this batch is computed
        if found and link.end.lower:
            self.own.after(link.k - 1, link.k)
        return found

    # Among several processes

    def _receive(self) -> None:
        """The outputs that the forward passes need; and the signals of an epoch's first steps are sent."""
        if self.rounds is None:
            return
        slack, batch = self.own.method.slack, self._turns[0].forward
        if slack and batch is not None and not self._signalled:
            self._signalled = True
            for n in range(slack + 1):
                self.rounds.begin(Direction.DOWN, self._signals(batch, n), self.number)
        self.rounds.wait(Direction.UP, slack, self.number)
        if self.own.method.guesses:
            self.rounds.wait(Direction.DOWN, slack, self.number)

    def _send_up(self, forward: dict[int, Pass | None]) -> None:
        """Then the signals that the losses need are waited for."""
        if self.rounds is not None:
            faults.reach(None, self.own.range, "exchange")
            self.rounds.begin(Direction.UP, {link.k: forward[link.k - 1] for link in self.rounds.links}, self.number)
            self.rounds.wait(Direction.DOWN, self.own.method.slack, self.number)

    def _send_down(self, backward: dict[int, Pass | None]) -> None:
        if self.rounds is None:
            return
        slack, batch = self.own.method.slack, self._turns[0].forward
        if slack == 0:
            passes = {link.k: backward[link.k] for link in self.rounds.links}
        else:
            passes = self._signals(batch, slack + 1) if batch is not None else {}
        self.rounds.begin(Direction.DOWN, passes, self.number)

    def _signals(self, batch: Batch, n: int) -> dict[int, Pass | None]:
        """Stages before a link need those of the batch n steps on. Batches of an epoch are disjoint: they are final."""
        assert self.rounds is not None
        if n > len(batch.following):
            return {}
        coming = replace(batch, ids=batch.following[n - 1], step=batch.step + n, following=()) if n else batch
        shares = {link.k: self.own.rows.of(coming.ids, coming.epoch, link.k - 1) for link in self.rounds.links}
        return {k: Pass(coming, 0, *share) for k, share in shares.items()}

    def _agree(self, losses: dict[int, Tensor]) -> None:
        """Posted here, the word travels during the backward passes."""
        if self.shared is not None:
            self.shared.note(self._trained(), _row(losses.values()), self.guard.on_device)
            if self.guard.on_device:
                self.guard.may_update()

    def _may_update(self) -> bool:
        if self.shared is None:
            return self.guard.may_update()
        if not self.guard.on_device:
            self.guard.clear()
            self.shared.read(0)
        return not self.shared.spoiled

    def flush(self) -> list[list[Tensor]]:
        """All that is on its way arrives, and the links are up to date. Gives the violations met meanwhile."""
        if self.rounds is None:
            return []
        self._signalled = False
        self.rounds.flush(self.number)
        return [link.settle() for link in self.own.links if link.end.upper]


def _row(values: Iterable[Tensor]) -> Tensor:
    """All numbers of a step in one tensor: one copy to the host takes them."""
    return torch.stack([value.float() for value in values])
