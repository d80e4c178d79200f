"""A process per stage, or several: the same steps as in one process, with what crosses an interface on the way.

Stage k owns the store of interface k. In a parallel phase two things cross it, filtered and in the store's type:

    states and multipliers of the next batch   from stage k to stage k-1, while this batch is computed: the batches of
                                               an epoch are disjoint, so they are final. Only the first batch waits.
    outputs of this batch                      from stage k-1 to stage k, behind its forward pass; the interface is
                                               renewed when they are there, up to LAG steps later (exchange.py)

So a stage waits for a neighbour only when that one is slower by more than a step. Nobody sends indices: all draw the
same batches from the seed. Both sides of a cut follow its mean square s² from the same outputs. With a store below
float32 the outputs are rounded before they cross: states come out as in one process wherever they are the
outputs themselves, s² and the recorded violation differ in the type's last digits.

Whether to stop, and whether a loss is not finite, is agreed by a tiny reduction per step: posted when the loss is known
and read before the update, which nobody makes then. That is a backward pass later: read two steps late instead, a step
took 297 in place of 301 ms and 221 in place of 218 (two cores, ResNet-56 at 64 and ResNet-20 at 128). GPUs must not be
waited for: where each process has one, the flag that holds back all updates is reduced between the GPUs (guard.py), and
the host reads up to LAG steps late, at the same step everywhere, what there is to say.

The messages of a streaming method, whose states are not stored, are those of `relay.py`.

Replicas of a stage divide every batch by the sample's id, and each keeps the states of its own samples alone.
Their gradients are averaged with the exact weights of their shares, and batch norm runs over all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from parlay import faults, signs
from parlay.coupling import Coupling, Method, Pair, Streaming
from parlay.coupling.streaming import Station
from parlay.data.feed import Feed
from parlay.engines.base import Batch, Engine, Totals, clip_gradients, stage_tensors
from parlay.engines.chain import Chain
from parlay.engines.exchange import LAG, Ahead, Exchange
from parlay.engines.guard import Guard
from parlay.engines.ledger import Ledger, Trained
from parlay.engines.norms import JointNorms
from parlay.engines.relay import Relay
from parlay.engines.shares import Share, Shares, divided
from parlay.engines.world import World
from parlay.evaluate import Loss, evaluate, in_float32, unchanged_buffers
from parlay.interface import Cut, Interface
from parlay.lanes import Cuda
from parlay.stage import Stage
from parlay.timeline import Recorder, Span

if TYPE_CHECKING:
    from parlay.engines.pipelined import Pipeline

REPLICA = 1 << 12  # between the streams of random numbers of two replicas; those of the stages are their indices
NOTHING = torch.empty(0)


@final
class Distributed(Engine):
    """One stage, with the interface before it (its own) and the cut behind it."""

    def __init__(
        self,
        model: nn.Module,
        modules: list[nn.Sequential],
        world: World,
        stage: Stage,
        interface: Interface | None,
        cut: Cut | None,
        coupling: Method,
        loss: Loss,
        feed: Feed,
        *,
        station: Station | None = None,
        shapes: tuple[tuple[int, ...], ...],
        store_dtype: torch.dtype,
        auxiliary_bytes: int,
        clip: float | None = None,
        pipelined: bool = False,
        micro_batches: int = 0,
        timeline: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        """`station` is the stage at work, for a streaming method; there are neither interface nor cut then."""
        self.model, self.modules = model, modules
        self.coupling = coupling
        self.crew = self.world = world
        self.stage, self.interface, self.cut = stage, interface, cut
        stage.module.train()
        self.loss, self.feed, self.clip = loss, feed, clip
        self.k, self.first, self.last = world.stage, world.stage == 0, world.stage == world.stages - 1
        self.totals = Totals()
        self.recorder = Recorder(world.rank, timeline > 0)
        self._before, self._behind = before, behind = world.neighbours(stage.device)
        with_multipliers = isinstance(coupling, Coupling) and coupling.keeps_multipliers
        rounds = world.rounds() if isinstance(coupling, Coupling) else None
        self._shares = Shares(coupling, len(feed), self.k, world.stages, world.replica, world.replicas)
        with signs.blocked():
            self._exchange = Exchange(
                interface, cut, before, behind, store_dtype, with_multipliers, self.recorder, rounds
            )
        self._chain = Chain(before, behind, () if self.first else shapes[self.k - 1], self.recorder)
        self._ledger = Ledger(world)
        self._relay: Relay | None = None
        if isinstance(coupling, Streaming):
            assert station is not None
            self._relay = Relay(coupling, station, before, behind, feed, world, self.recorder)
        self._say = say
        on_device = world.own_gpu and stage.can_be_recorded
        trained = station.parts() if station is not None else [stage]
        self._guard = Guard(Cuda(stage.device) if on_device else None, stage.device, trained, world.agreed)
        self._norms = JointNorms(stage.module, world) if world.replicas > 1 else None
        # gloo carries a pipeline for CPUs only
        self._pipelined = pipelined and (stage.device.type == "cpu" or world.own_gpu)
        self._micro_batches = micro_batches
        self._pipelines: dict[int, Pipeline] = {}
        self._auxiliary_bytes = auxiliary_bytes
        self._timeline = timeline
        self._step = -1
        """Of those that this process has begun, for the spans."""
        self._unread: deque[tuple[Trained, Tensor]] = deque()
        self._filled = interface is None and cut is None
        self._wants_to_stop = False
        self._learning_rate: float | None = None

    # Parallel phases

    def parallel_step(self, batch: Batch) -> None:
        if self._relay is not None:
            self._relay_step(self._relay, batch)
            return
        beta, share = self._without_waiting(torch.tensor(batch.beta)), self._begin(batch, parallel=True)
        following = None
        if batch.following is not None:
            following = self._shares.of(batch.following, batch.epoch, parallel=True)
        ahead = self._exchange.begin(share, following, self._step)
        faults.reach(None, self.here, "exchange")

        pair = ahead.own.float() if ahead.own is not None else None
        state = pair.of(share.turn).state.detach().requires_grad_() if pair is not None else NOTHING
        loss, sent = self._local_loss(share, ahead, state, beta)
        self._note(batch, loss.detach())
        if loss.requires_grad:  # not where a first stage has nothing to train
            with self.recorder.span("backward", self._step):
                loss.backward()  # type: ignore[no-untyped-call]
        self._hold()
        with self.recorder.span("update", self._step):
            self._sum_gradients(share)
            if not self._ledger.spoiled:
                self._clip(self.stage.gradients())
                self.stage.apply()
        if self.cut is not None and share.whole > 0:
            self.cut.follow(sent)
        if pair is not None:
            # the loss is a mean over the samples, the adjoint per sample
            p = state.grad.mul_(share.whole) if state.grad is not None else torch.zeros_like(state)
            self._ledger.violations(self._exchange.finish(share, pair, p, beta, self._step))
        self._ledger.read(LAG)

    def _without_waiting(self, value: Tensor) -> Tensor:
        """On the device of the stage, by a copy that the host does not wait for."""
        device = self.stage.device
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value

    def _relay_step(self, relay: Relay, batch: Batch | None) -> None:
        """A step of a streaming method; no batch enters while the last ones of a phase run out."""
        self._step += 1
        self.recorder.on = batch is not None and batch.step < self._timeline
        self._train_mode()
        trained, loss = relay.step(batch, self._step)
        self._note(trained, loss)
        self._hold()
        with self.recorder.span("update", self._step):
            if not self._ledger.spoiled:
                relay.update(self._clip)
        self._ledger.read(LAG)

    def finish(self) -> None:
        relay = self._relay
        if relay is None:
            return
        while not relay.empty:
            signs.beat()
            self._relay_step(relay, None)
        if not self._ledger.spoiled:
            relay.station.settle(self._clip)
        self.drain()

    def _local_loss(self, share: Share, ahead: Ahead, state: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of this stage's own problem, and the outputs as they were sent to the stage behind."""
        ids, step = share.taken, self._step
        target = self._exchange.target(ahead, step) if self.cut is not None else Pair(NOTHING, None)
        if share.whole == 0:  # a last batch of one sample, in which another stage has its turn
            return torch.zeros((), device=self.stage.device), NOTHING
        with self.recorder.span("forward", step):
            inputs = self.feed.batch(ids)[0] if self.interface is None else self.interface.up(self.stage.lowered(state))
            x = self.stage.forward(inputs)
            small = self.cut.down(x) if self.cut is not None else NOTHING
        sent = self._exchange.send(small, step) if self.cut is not None else NOTHING
        if len(ids) == 0:  # the other replicas have all of it
            loss = _nothing(x)
        elif self.cut is not None:
            loss = self.cut.local_loss(x, target, beta, small)
        else:
            loss = self.loss(in_float32(x), self.feed.targets(ids))
        return self._weighted(faults.spoil(self.k, loss), share), sent

    def _begin(self, batch: Batch, parallel: bool) -> Share:
        """Random numbers inside the network depend on the step, the stage and the replica alone."""
        self._step += 1
        self.recorder.on = batch.step < self._timeline
        self._train_mode()
        self.stage.set_rate(batch.rate)
        self._seed(batch)
        return self._shares.of(batch.ids, batch.epoch, parallel)

    def _train_mode(self) -> None:
        """Asking all modules of a deep stage takes as long as some of its kernels."""
        if not self.stage.module.training:
            self.stage.module.train()

    def _seed(self, batch: Batch) -> None:
        torch.manual_seed(batch.random(self.k + REPLICA * self.world.replica))

    def _weighted(self, loss: Tensor, share: Share) -> Tensor:
        """This share's part of the loss: the parts of all replicas add up to the mean over the batch."""
        return loss if self.world.replicas == 1 else loss * share.weight

    def _sum_gradients(self, share: Share) -> None:
        """Over the replicas of this stage."""
        self.stage.gradients()  # those of low precision copies are the weights' now
        weights = [w for w in self.stage.parameters.values() if w.requires_grad]
        if self.world.replicas == 1 or share.whole == 0 or not weights:
            return
        lacking = self._ledger.spoiled  # the others go on for some steps, and need a number
        grads = [torch.zeros_like(w) if w.grad is None or lacking else w.grad for w in weights]
        flat = self.world.summed(torch.cat([grad.reshape(-1) for grad in grads]), self.world.peers())
        for w, whole in zip(weights, torch.split(flat, [w.numel() for w in weights]), strict=True):
            w.grad = torch.empty_like(w).copy_(whole.view(w.shape))

    def _note(self, trained: Trained, loss: Tensor) -> None:
        """The loss of this step is known: all processes are to hear whether it is finite."""
        self._unread.append((trained, loss))
        if self._guard.on_device:
            self._guard.seen(loss)
            self._guard.look()
        self._read_losses(keep=1 if self._guard.on_device else 0)

    def _hold(self) -> None:
        """What comes next is done only where the losses of all processes are finite."""
        self._guard.hold()
        if not self._guard.on_device:
            self._ledger.read(0)

    def _read_losses(self, keep: int) -> None:
        """A GPU is asked for the loss of the step before: this one's it has not computed yet."""
        while len(self._unread) > keep:
            batch, loss = self._unread.popleft()
            self._ledger.note(batch, float(loss), self._wants_to_stop)

    def agreed(self, stop: bool) -> bool:
        self._wants_to_stop = stop
        return self._ledger.stopped

    # Serial phases

    def serial_step(self, batch: Batch) -> None:
        share = self._begin(batch, parallel=False)
        parts = 1
        if self._pipelined:  # a last, smaller batch that does not divide goes through the stages as a whole
            parts = divided(len(batch.ids), self._micro_batches, self.world.stages)
        loss = self._piped(batch, parts) if parts > 1 else self._chained(batch, share)
        if self.last:
            self._ledger.note(batch, loss, self._wants_to_stop, serial=True)
        self._ledger.read(0)
        with self.recorder.span("update", self._step):
            self._sum_gradients(share)
            self._clip_over_stages()
            self.stage.apply()

    def _chained(self, batch: Batch, share: Share) -> float:
        """Forward and backward along the stages, one after the other: as in one process, to rounding."""
        inputs, targets = self._augmented(batch)
        x = inputs if self.first else self._chain.receive(len(share.ids), self._step)
        if not self.first:
            x.requires_grad_(x.is_floating_point())
        with self.recorder.span("forward", self._step):
            y = self.stage.forward(x)
        if self.last:
            loss = self.loss(in_float32(y), targets) if len(share.ids) else _nothing(y)
            loss = self._weighted(faults.spoil(self.k, loss), share)
        else:
            loss = NOTHING
            self._chain.send(y, self._step)
            self._ledger.note(batch, 0.0, self._wants_to_stop, serial=True)
            gradient = self._chain.receive_back(y, self._step)
        with self.recorder.span("backward", self._step):
            if self.last:
                loss.backward()  # type: ignore[no-untyped-call]
            elif y.requires_grad:
                y.backward(gradient)  # type: ignore[no-untyped-call]
        if not self.first:
            self._chain.send_back(x.grad if x.grad is not None else torch.zeros_like(x))
        return float(loss.detach()) if self.last else 0.0

    def _piped(self, batch: Batch, parts: int) -> float:
        if len(batch.ids) not in self._pipelines:
            self._pipelines[len(batch.ids)] = self._pipeline(len(batch.ids), parts)
            self._seed(batch)
        if not self.last:
            self._ledger.note(batch, 0.0, self._wants_to_stop, serial=True)
        # one span for all: the schedule is the pipeline's own
        with self.recorder.span("forward", self._step), self.world.naming_the_lost(), signs.blocked():
            loss = self._pipelines[len(batch.ids)].step(*self._augmented(batch))
        return float(loss) if loss is not None else 0.0

    def _pipeline(self, samples: int, parts: int) -> Pipeline:
        """The shapes and types between the stages are those of the first samples, sent along them once."""
        from parlay.engines.pipelined import Pipeline  # torch's part of it takes its time to load

        example = self.feed.batch(torch.arange(samples // parts))[0]
        with unchanged_buffers(self.stage.module):
            given = self.forward(example)
        if not self.first:
            example = torch.zeros(samples // parts, *self._chain.shape, dtype=self._chain.dtype)

        def loss(output: Any, targets: Tensor) -> Tensor:
            return faults.spoil(self.k, self.loss(in_float32(output), targets))

        group = self.world.column()
        return Pipeline(self.stage, self.k, self.world.stages, group, parts, loss, example, given)

    def _augmented(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs on the first stage and targets on the last, of this replica; the changes are drawn for the batch."""
        changes = self.feed.draw(len(batch.ids), batch.generator())
        inputs = self.feed.batch(batch.ids, changes)[0] if self.first else NOTHING
        targets = self.feed.targets(batch.ids, changes) if self.last else NOTHING
        return self._shares.mine(batch.ids, inputs), self._shares.mine(batch.ids, targets)

    def _clip_over_stages(self) -> None:
        if self.clip is None:
            return
        gradients = self.stage.gradients()
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.stage.device)
        clip_gradients(gradients, self.clip, self.world.summed(norm.square(), self.world.column()).sqrt())

    def _clip(self, gradients: list[Tensor]) -> None:
        if self.clip is not None:
            clip_gradients(gradients, self.clip)

    # States, evaluation

    def refresh(self, batches: Iterable[Batch], stop: Callable[[], bool]) -> list[float] | None:
        if self.world.stages == 1 or self._relay is not None:
            return None
        had_states = self.filled
        violations: list[Tensor] = []
        self._set_filled(False)
        for cut in (self.interface.cut if self.interface else None, self.cut):
            if cut is not None:
                cut.mean_square.zero_()
        with unchanged_buffers(self.stage.module), torch.no_grad():
            for batch in batches:
                signs.beat()
                self._ledger.pass_by(batch, stop())
                violations.extend(self._start(batch))
                if self._ledger.read(LAG):
                    break
        if self._ledger.read(0):
            return None
        self._set_filled(True)
        found = self.world.gathered(lambda: torch.stack(violations).mean(0).item() if violations else None)
        seen = [value for value in found[:: self.world.replicas] if value is not None]
        return seen if had_states else None

    def _start(self, batch: Batch) -> list[Tensor]:
        """States of one batch by a forward pass along the stages, through the filters, in full precision."""
        share, violations = self._begin(batch, parallel=False), []
        before, behind = self._before, self._behind
        if self.interface is not None and before is not None:
            small = before.up.receive((len(share.ids), *self.interface.cut.small), torch.float32).wait()
            violations.append(self.interface.start(share.rows, small))
            x = self.interface.up(small)
        else:
            x = self.feed.batch(share.ids)[0]
        if self.cut is not None and behind is not None:
            small = self.cut.down(self.stage.forward(x))
            behind.up.send(small)
            self.cut.follow(small)
        return violations

    def _set_filled(self, filled: bool) -> None:
        self._filled = filled
        if self.interface is not None:
            self.interface.filled = filled

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        """Along the stages. The result is that of the network on the last stage, of the own stage elsewhere."""
        signs.beat()
        with self._norms_apart():
            y = self.stage.forward(x if self.first else self._chain.receive(len(x), self._step))
        if not self.last:
            self._chain.send(y, self._step)
        return y

    @contextmanager
    def _norms_apart(self) -> Iterator[None]:
        """Where every replica sees all samples, statistics need not be joined."""
        if self._norms is None:
            yield
            return
        self._norms.on = False
        try:
            yield
        finally:
            self._norms.on = True

    def probe(self, x: Tensor) -> Any:
        for module in self.modules:
            x = module(x.to(next((w.device for w in module.parameters()), x.device)))
        return x

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], loss: Loss | None = None) -> dict[str, float]:
        self.recorder.on = False
        self.stage.module.eval()
        found: dict[str, float] = {}
        if self.last:
            found = evaluate(self.forward, loss or self.loss, batches)
        else:
            for inputs, _ in batches:
                self.forward(inputs)
        return self.world.told(found, self.world.rank_of(self.world.stages - 1, 0))

    def drain(self) -> Totals:
        """All that is on its way arrives, all agreements are read, and the losses of all stages are added up."""
        if self._relay is not None:
            self._relay.collect(self._step)
        self._ledger.violations(self._exchange.flush())
        for neighbour in filter(None, (self._before, self._behind)):
            neighbour.settle()
        self._read_losses(keep=0)
        self._ledger.read(0)
        self._ledger.close_epoch(self.totals)
        kept = self._relay.station.bytes if self._relay is not None else 0
        found = self.world.gathered(lambda: (self.stage.learning_rate, kept))
        self._learning_rate = next((rate for rate, _ in found if rate is not None), None)
        if self._relay is not None:
            self._auxiliary_bytes = sum(size for _, size in found)
        return self.totals

    # Checkpoints

    def parts(self, with_states: bool) -> dict[str, dict[str, Tensor]]:
        """Those of this process; a stage with replicas is kept by the first of them."""
        parts = {f"stage-{self.k}": self.stage.tensors()} if self.world.replica == 0 else {}
        if with_states and self.filled and self.interface is not None:
            parts[self._interface_part()] = self.interface.tensors()
        if self._relay is not None:
            parts |= self._relay.part(with_states)
        return parts

    def _interface_part(self) -> str:
        of = f"-replica-{self.world.replica}-of-{self.world.replicas}" if self.world.replicas > 1 else ""
        return f"interface-{self.k}{of}"

    def load(self, parts: Mapping[str, dict[str, Tensor]]) -> None:
        self.stage.load(stage_tensors(parts))
        fits, mine = True, self._interface_part()
        if self.interface is not None:
            kept = [name for name in parts if name.startswith("interface-")]
            as_many = len(kept) == (self.world.stages - 1) * self.world.replicas
            fits = as_many and mine in kept and self.interface.load(parts[mine])
        self._set_filled(all(self.world.gathered(lambda: fits)))
        if self._filled:
            self._share_mean_square()
        if self._relay is not None:
            self._relay.load(parts, self._say)

    def _share_mean_square(self) -> None:
        """Both sides of a cut go on with that of the interface, which a checkpoint keeps."""
        before, behind = self._before, self._behind
        if self.interface is not None and before is not None:
            before.down.send(self.interface.mean_square.reshape(1).clone())
        if self.cut is not None and behind is not None:
            self.cut.mean_square.copy_(behind.down.receive((1,), torch.float32).wait().squeeze(0))

    def assemble(self) -> None:
        for k, module in enumerate(self.modules):
            self.world.spread(list(module.state_dict().values()), self.world.rank_of(k, 0))

    def spans(self) -> list[Span]:
        return [span for spans in self.world.gathered(lambda: list(self.recorder.spans)) for span in spans]

    def facts(self) -> dict[str, Any]:
        found = {"engine": "distributed", "processes": self.world.size, "replicas": self.world.replicas}
        if not isinstance(self.coupling, Streaming):
            return found
        return {**found, "staleness": self.coupling.staleness(self.world.stages)}

    def waits(self) -> list[float]:
        return self.world.gathered(lambda: round(self.waited, 3))

    @property
    def here(self) -> range:
        return range(self.k, self.k + 1)

    @property
    def filled(self) -> bool:
        return self._filled

    @property
    def learning_rate(self) -> float | None:
        return self._learning_rate

    @property
    def auxiliary_bytes(self) -> int:
        return self._auxiliary_bytes

    @property
    def waited(self) -> float:
        return self.world.waits.seconds

    def close(self) -> None:
        if self.interface is not None:
            self.interface.close()
        if self._norms is not None:
            self._norms.close()


def _nothing(output: Any) -> Tensor:
    """The loss of no samples: zero, with a gradient."""
    parts = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([part.float().sum() * 0 for part in parts]).sum()
