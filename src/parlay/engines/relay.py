"""One stage of a streaming method in a process of its own: its station, and the messages from and to its neighbours.

    step t of stage k      features, sent by stage k-1 in step t-1 ─► forward ─► output, to stage k+1
                           adjoint,  sent by stage k+1 in step t-1 ─► answer  ─► adjoint, to stage k-1; then the update

The halves of a step are two calls of the station. What the first one makes travels during the second, and what the
second one needs has the time of the first to arrive. So a stage waits for a neighbour only when that one is slower.
Where batches enter at the last stage (`upwards`), features come with the answer and adjoints with the batch.

All processes follow the same `Way`: both ends of a link know which messages there are and how many samples they hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from parlay import faults
from parlay.coupling.streaming import Clip, Sent, Station, Streaming, Visit
from parlay.data.feed import Feed
from parlay.engines.base import Batch
from parlay.engines.chain import DTYPES
from parlay.engines.links import Arrival, Link, Neighbour
from parlay.engines.stream import OTHER_NETWORKS, OTHER_QUEUES, Stop, Way, station_part
from parlay.engines.world import World
from parlay.timeline import Recorder


class Due(NamedTuple):
    """Samples of the messages that a stage needs in a step; 0: there is none."""

    features: int
    adjoint: int


@final
class Inlet:
    """Where the messages of one neighbour arrive, one at a time."""

    def __init__(
        self, link: Link | None, shape: tuple[int, ...], dtype: torch.dtype | None, recorder: Recorder
    ) -> None:
        """`shape` is that of a sample; the type is told by the sender, before its first message, where it is None."""
        self._link, self._shape, self._dtype, self._recorder = link, shape, dtype, recorder
        self._rows = 0
        self._arrival: Arrival | None = None
        self._message: Tensor | None = None

    def expect(self, rows: int) -> None:
        """Make ready for the next message."""
        self._rows, self._arrival, self._message = rows, None, None
        if self._dtype is not None:
            self._post(self._dtype)

    def wait(self, step: int) -> Tensor | None:
        """The message, once it is there. It stays until the next one is expected."""
        if self._rows and self._message is None:
            with self._recorder.span("wait", step):
                if self._dtype is None:
                    assert self._link is not None
                    self._dtype = DTYPES[int(self._link.receive((1,), torch.int64).wait())]
                    self._post(self._dtype)
                assert self._arrival is not None
                self._message = self._arrival.wait()
        return self._message

    def put(self, message: Tensor | None, rows: int) -> None:
        """A message that has arrived before, from a checkpoint."""
        if message is not None and rows:
            self._rows, self._message = rows, message[:rows]
            if message.dim() == 4:  # as links bring them
                self._message = self._message.contiguous(memory_format=torch.channels_last)

    def _post(self, dtype: torch.dtype) -> None:
        if self._rows:
            assert self._link is not None
            self._arrival = self._link.receive((self._rows, *self._shape), dtype)


@final
class Relay:
    """The station of this process and its links."""

    def __init__(
        self,
        method: Streaming,
        station: Station,
        before: Neighbour | None,
        behind: Neighbour | None,
        feed: Feed,
        world: World,
        recorder: Recorder,
    ) -> None:
        self.method, self.station, self.feed, self.world = method, station, feed, world
        site = station.site
        self.k, self.stages = site.k, site.stages
        self.way = Way([method.lag(k, self.stages) for k in range(self.stages)], method.upwards)
        self._before, self._behind, self._recorder = before, behind, recorder
        # what a stage puts out has the type of its precision; adjoints are always in full precision
        shapes = [cut.small if cut is not None else () for cut in (site.before, site.after)]
        shapes[1] = method.returned(shapes[1])
        self._features = Inlet(before.up if before is not None else None, shapes[0], None, recorder)
        self._adjoints = Inlet(behind.down if behind is not None else None, shapes[1], torch.float32, recorder)
        self._introduced = False
        self._rate = 1.0
        self._trained = False
        self._passed: float | None = None
        station.stage.module.register_forward_hook(self._note_pass)

    @property
    def empty(self) -> bool:
        """Is there no batch on its way?"""
        return not self.way.batches

    def step(self, batch: Batch | None, step: int) -> tuple[list[Batch | None], Tensor]:
        """One batch enters, or none. Gives what each stage trains on in this step, and the loss of this one."""
        if batch is not None:
            self._rate = batch.rate * self.method.pace(self.k, self.stages, batch.time)
        stops = self.way.enter(batch)
        mine, device = stops[self.k], self.station.stage.device
        self.station.begin(self._rate)

        images, forth = self._forth(mine)
        back = self._visit(mine.back, mine.take) if mine.back is not None else None

        # 1. what is done with features
        features = self._taken(self._features, step)
        faults.reach(None, range(self.k, self.k + 1), "exchange")
        visits = (None, back) if self.method.upwards else (forth, None)
        first = self._half(step, visits, images if self.k == 0 else features, None)

        # 2. what is done with an adjoint
        adjoint = self._taken(self._adjoints, step)
        visits = (forth, None) if self.method.upwards else (None, back)
        second = self._half(step, visits, images if self.k == 0 else None, adjoint)
        self._send_nothing(first, second, step)
        self._trained = first.trained or second.trained

        trained = [stop.forth if self.method.upwards else stop.trained(lag) for stop, lag in self._with_lags(stops)]
        losses = [sent.loss for sent in (first, second) if sent.loss is not None]
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        return trained, loss if trained[self.k] is None else faults.spoil(self.k, loss)

    def update(self, clip: Clip) -> None:
        """Apply the gradients of the last step, where it has made some."""
        if self._trained:
            self.station.update(clip)

    def collect(self, step: int) -> None:
        """Until all that was sent to this stage has arrived."""
        self._features.wait(step)
        self._adjoints.wait(step)

    def part(self, with_queues: bool) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps; all messages have been collected."""
        features, adjoint = self._features.wait(0), self._adjoints.wait(0)
        kept = station_part(self.station, self.way, features, adjoint, with_queues)
        return {f"station-{self.k}": kept} if kept else {}

    def load(self, parts: Mapping[str, dict[str, Tensor]], say: Callable[[str], None]) -> None:
        """Take what any engine has kept; batches on their way only where those of all stages fit."""
        kept = parts.get(f"station-{self.k}", {})
        same_cut = f"station-{self.stages}" not in parts
        learned, fits = self.station.load_learned(kept), same_cut and self.station.fits(kept)
        everybody = self.world.gathered(lambda: (learned, fits))
        if not all(learned for learned, _ in everybody):
            say(OTHER_NETWORKS)
        if not all(fits for _, fits in everybody):
            if any("way/step" in part for part in parts.values()):
                say(OTHER_QUEUES)
            return
        self.way.load(kept)
        self.station.load_queued(kept)
        due, device = self._due(self.k), self.station.stage.device
        for inlet, name, rows in (
            (self._features, "arrived/features", due.features),
            (self._adjoints, "arrived/adjoint", due.adjoint),
        ):
            inlet.put(kept[name].to(device, copy=True) if name in kept else None, rows)

    def _forth(self, stop: Stop) -> tuple[Tensor | None, Visit | None]:
        """The batch that goes forward, and what the network itself takes of it, for a stage that needs that."""
        batch, site, feed = stop.forth, self.station.site, self.feed
        if batch is None:
            return None, None
        changes = feed.draw(len(batch.ids), batch.generator())
        images = targets = None
        if self.k == 0 or self.station.needs_inputs:
            images = feed.batch(batch.ids, changes)[0].to(site.stage.device)
        if site.last or self.station.needs_targets:
            targets = feed.targets(batch.ids, changes).to(site.stage.device)
        return images, self._visit(batch, stop.put, targets, images)

    def _visit(self, batch: Batch, slot: int, targets: Tensor | None = None, images: Tensor | None = None) -> Visit:
        place = torch.tensor([slot], device=self.station.stage.device)
        return Visit(len(batch.ids), place, batch.random(self.k), targets, images)

    def _half(
        self, step: int, visits: tuple[Visit | None, Visit | None], features: Tensor | None, adjoint: Tensor | None
    ) -> Sent:
        """One of the two calls of the station; what it makes is sent at once."""
        forth, back = visits
        if forth is None and back is None:
            return Sent()
        begin, self._passed = time.perf_counter(), None
        sent = self.station.step(forth, features, back, adjoint)
        end = time.perf_counter()
        turn = end if not sent.trained else self._passed or begin
        if turn > begin:
            self._recorder.add("forward", step, begin, turn)
        if end > turn:
            self._recorder.add("backward", step, turn, end)
        self._send(sent, step)
        return sent

    def _note_pass(self, *_: Any) -> None:
        """When the last forward pass of a half was over."""
        self._passed = time.perf_counter()

    def _taken(self, inlet: Inlet, step: int) -> Tensor | None:
        """This step's message; the inlet is made ready for that of the next."""
        message, due = inlet.wait(step), self._due(self.k)
        inlet.expect(due.features if inlet is self._features else due.adjoint)
        return message

    def _send(self, sent: Sent, step: int) -> None:
        """What neighbours need in the next step."""
        if sent.output is not None and self._behind is not None and self._due(self.k + 1).features:
            with self._recorder.span("send", step):
                if not self._introduced:
                    self._introduced = True
                    word = torch.tensor([DTYPES.index(sent.output.dtype)], device=sent.output.device)
                    self._behind.up.send(word)
                self._behind.up.send(sent.output)
        if sent.adjoint is not None and self._before is not None and self._due(self.k - 1).adjoint:
            with self._recorder.span("send", step):
                self._before.down.send(sent.adjoint.float())

    def _send_nothing(self, first: Sent, second: Sent, step: int) -> None:
        """Where nothing depends on what has arrived there is no adjoint, and the stage before waits for one: zeros."""
        rows, site = self._due(self.k - 1).adjoint, self.station.site
        if rows and site.before is not None and first.adjoint is None and second.adjoint is None:
            shape = self.method.returned(site.before.small)
            self._send(Sent(adjoint=torch.zeros(rows, *shape, device=site.stage.device)), step)

    def _due(self, k: int) -> Due:
        """What stage k needs in the next step."""
        if not 0 <= k < self.stages:
            return Due(0, 0)
        stop = self.way.coming()[k]
        features, adjoint = (stop.back, stop.forth) if self.method.upwards else (stop.forth, stop.back)
        return Due(_rows(features) if k > 0 else 0, _rows(adjoint) if k < self.stages - 1 else 0)

    def _with_lags(self, stops: list[Stop]) -> list[tuple[Stop, int]]:
        return list(zip(stops, self.way.lags, strict=True))


def _rows(batch: Batch | None) -> int:
    return len(batch.ids) if batch is not None else 0
