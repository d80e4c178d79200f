"""Streaming methods inside one process: which batch is where, and the messages between the stations.

In: the batch of a step, or none while the last ones run out. Out: the losses of the batches that the stages have
trained on in that step, which entered some steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from parlay import faults
from parlay.coupling.streaming import Clip, Sent, Station, Streaming, Visit
from parlay.data.feed import Feed
from parlay.engines.base import Batch
from parlay.engines.branches import Branches
from parlay.engines.graphs import Inputs
from parlay.engines.guard import Guard

OTHER_NETWORKS = "the checkpoint has no such networks beside these stages: they begin anew"
OTHER_QUEUES = "the checkpoint's batches on their way are of another cut or method: they are left out"


class Stop(NamedTuple):
    """What one stage does at a step, and where its queues keep the batches."""

    forth: Batch | None
    put: int
    back: Batch | None
    take: int

    def trained(self, lag: int) -> Batch | None:
        """The batch whose loss the stage has at this step."""
        return self.back if lag else self.forth


@final
class Way:
    """Which batch is at which stage. For three stages of features replay, lags 4, 2, 0:

        step       0   1   2   3   4   5   6   7
        stage 0    0   1   2   3   4   5   6   7      forward
                                   0   1   2   3      answer
        stage 1        0   1   2   3   4   5   6
                               0   1   2   3   4
        stage 2            0   1   2   3   4   5      both at once

    No stage trains before an answer has come, which is a true adjoint at the weights that the stage still has: queues
    are full before the first update. When a phase ends, steps without a new batch let the last ones run out. So every
    stage trains on every batch once.

    Upwards, for three stages whose states are generated, lags 0, 2, 2: what comes back are features.

        stage 0            0   1   2   3   4   5      no answer
        stage 1        0   1   2   3   4   5   6
                               0   1   2   3   4      answer
        stage 2    0   1   2   3   4   5   6   7
                           0   1   2   3   4   5
    """

    def __init__(self, lags: Sequence[int], upwards: bool = False) -> None:
        """`upwards`: batches enter at the last stage."""
        self.lags = list(lags)
        self.entries = list(reversed(range(len(lags)))) if upwards else list(range(len(lags)))
        self.depth = max(entry + lag for entry, lag in zip(self.entries, lags, strict=True))
        self.step = 0
        self.batches: dict[int, Batch] = {}

    def enter(self, batch: Batch | None) -> list[Stop]:
        """One step; what every stage has to do in it."""
        if batch is not None:
            self.batches[self.step] = batch
        stops = [self._stop(self.step - entry, lag) for entry, lag in zip(self.entries, self.lags, strict=True)]
        self.step += 1
        self.batches = {n: kept for n, kept in self.batches.items() if self.step - n <= self.depth}
        if not self.batches:  # all have run out
            self.step = 0
        return stops

    def coming(self) -> list[Stop]:
        """The next step, but for a batch that may enter in it: which messages the stages will need then."""
        return [self._stop(self.step - entry, lag) for entry, lag in zip(self.entries, self.lags, strict=True)]

    def _stop(self, number: int, lag: int) -> Stop:
        answered = number - lag
        back = self.batches.get(answered) if lag else None
        return Stop(self.batches.get(number), number % (lag + 1), back, answered % (lag + 1))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        kept = list(self.batches.items())
        return {
            "way/step": torch.tensor(self.step),
            "way/batches": torch.tensor([[n, b.epoch, b.step, b.seed, len(b.ids)] for n, b in kept]).view(-1, 5),
            "way/ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(b.ids for _, b in kept)]),
        }

    def load(self, kept: Mapping[str, Tensor]) -> None:
        self.step = int(kept["way/step"])
        rows = kept["way/batches"].tolist()
        ids = torch.split(kept["way/ids"], [row[4] for row in rows])
        self.batches = {
            n: Batch(own.clone(), epoch, step, 1.0, 0.0, seed)
            for (n, epoch, step, seed, _), own in zip(rows, ids, strict=True)
        }


@final
class Mail:
    """The last message on one way between two stages."""

    def __init__(self, rows: int, fixed: bool) -> None:
        """`fixed`: in the same memory at every step, as recorded ones need it."""
        self.rows, self.fixed = rows, fixed
        self.kept: Tensor | None = None

    def put(self, message: Tensor | None) -> None:
        if message is None:
            return
        if message.dim() == 4:  # as stages put them out; of a checkpoint they come otherwise, and sums round otherwise
            message = message.contiguous(memory_format=torch.channels_last)
        if not self.fixed:
            self.kept = message
            return
        if self.kept is None:
            kept = message.new_empty(self.rows, *message.shape[1:])
            self.kept = kept.contiguous(memory_format=torch.channels_last) if kept.dim() == 4 else kept
        self.kept[: len(message)].copy_(message)

    def take(self, batch: Batch | None) -> Tensor | None:
        return None if batch is None or self.kept is None else self.kept[: len(batch.ids)]


@final
class Stream:
    """The stations of all stages, side by side, and what is on its way between them."""

    def __init__(
        self,
        method: Streaming,
        stations: list[Station],
        feed: Feed,
        branches: Branches,
        guard: Guard,
        clip: Clip,
        *,
        recorded: bool,
    ) -> None:
        """`recorded`: steps become CUDA graphs."""
        self.method, self.stations, self.feed = method, stations, feed
        self.branches, self.guard, self.clip = branches, guard, clip
        self.recorded = recorded
        count = len(stations)
        self.way = Way([method.lag(k, count) for k in range(count)], method.upwards)
        rows = stations[0].site.rows
        self.features = [Mail(rows, recorded) for _ in stations]
        """To every stage from the one before; the first has none."""
        self.adjoints = [Mail(rows, recorded) for _ in stations]
        """To every stage from the one after; the last has none."""
        self.rates = [1.0] * count
        self._stops: list[Stop] = []

    @property
    def empty(self) -> bool:
        """Is there no batch on its way?"""
        return not self.way.batches

    def enter(self, batch: Batch | None) -> tuple[list[Batch | None], Inputs]:
        """A step's inputs as tensors, and the batch that each stage trains on in it."""
        count = len(self.stations)
        if batch is not None:
            self.rates = [batch.rate * self.method.pace(k, count, batch.time) for k in range(count)]
        self._stops = self.way.enter(batch)
        inputs = {"rates": torch.tensor(self.rates, dtype=torch.float64)}
        for k, stop in enumerate(self._stops):
            # ids of no batch are an empty tensor: such a step has other shapes than a full one, and is not recorded
            inputs[f"forth-{k}"] = _ids(stop.forth)
            inputs[f"back-{k}"] = _ids(stop.back)
            inputs[f"put-{k}"] = torch.tensor([stop.put])
            inputs[f"take-{k}"] = torch.tensor([stop.take])
            if stop.forth is not None and self._sees_inputs(k):
                drawn = self.feed.draw(len(stop.forth.ids), stop.forth.generator())
                inputs |= {f"changes-{k}/{name}": value for name, value in drawn.items()}
        if self.method.upwards:
            return [stop.forth for stop in self._stops], inputs
        return [stop.trained(lag) for stop, lag in zip(self._stops, self.way.lags, strict=True)], inputs

    def _sees_inputs(self, k: int) -> bool:
        last = k == len(self.stations) - 1
        return k == 0 or self.stations[k].needs_inputs or (last and self.feed.reconstruct)

    @property
    def steady(self) -> bool:
        """Has every stage a full batch, both ways? Such steps are all alike."""
        rows = self.stations[0].site.rows
        lags = self.way.lags
        return all(
            len(_ids(stop.forth)) == rows and (lag == 0 or len(_ids(stop.back)) == rows)
            for stop, lag in zip(self._stops, lags, strict=True)
        )

    def step(self, inputs: Inputs, quick: bool = False) -> Tensor:
        """One step of every station, each in its lane; then the messages move."""
        count, branches = len(self.stations), self.branches
        with branches.side_by_side():
            sent: list[Sent] = []
            losses: list[Tensor] = []
            for k, station in enumerate(self.stations):
                with branches.lane(k):
                    station.begin(inputs["rates"][k], quick)
                    sent.append(self._station_step(k, station, inputs))
                    loss = sent[k].loss
                    loss = loss if loss is not None else torch.zeros((), device=station.stage.device)
                    losses.append(faults.spoil(k, loss))
                    self.guard.seen(losses[k])
            if not self.guard.look():
                return _row(losses)  # before any update; the engine names the stage
            for k, station in enumerate(self.stations):
                with branches.lane(k):
                    self.guard.hold()
                    if sent[k].trained:
                        station.update(self.clip)
        for k in range(count - 1):
            self.features[k + 1].put(sent[k].output)
            self.adjoints[k].put(sent[k + 1].adjoint)
        return _row(losses)

    def _station_step(self, k: int, station: Station, inputs: Inputs) -> Sent:
        stop, ids = self._stops[k], inputs[f"forth-{k}"]
        downwards, upwards = (stop.back, stop.forth) if self.method.upwards else (stop.forth, stop.back)
        images = None
        if stop.forth is not None and (k == 0 or station.needs_inputs):
            images = self.feed.batch(ids, _of(k, inputs))[0]
        features = images if k == 0 else self.features[k].take(downwards)
        forth = self._visit(k, stop.forth, inputs[f"put-{k}"], self._targets(k, station, ids, inputs), images)
        back = self._visit(k, stop.back, inputs[f"take-{k}"])
        return station.step(forth, features, back, self.adjoints[k].take(upwards))

    def _targets(self, k: int, station: Station, ids: Tensor, inputs: Inputs) -> Tensor | None:
        last = k == len(self.stations) - 1
        if len(ids) == 0 or not (last or station.needs_targets):
            return None
        return self.feed.targets(ids, _of(k, inputs)).to(station.stage.device)

    def _visit(
        self, k: int, batch: Batch | None, slot: Tensor, targets: Tensor | None = None, inputs: Tensor | None = None
    ) -> Visit | None:
        if batch is None:
            return None
        slot = slot.to(self.stations[k].stage.device)
        return Visit(len(batch.ids), slot, None if self.recorded else batch.random(k), targets, inputs)

    def settle(self) -> None:
        """No batch is on its way: what was added up is applied."""
        for station in self.stations:
            station.settle(self.clip)

    def part(self, k: int, with_queues: bool) -> dict[str, Tensor]:
        """What a checkpoint keeps of a station. Queues too: a run must not depend on when it was saved."""
        return station_part(self.stations[k], self.way, self.features[k].kept, self.adjoints[k].kept, with_queues)

    def load(self, parts: Mapping[str, dict[str, Tensor]], say: Callable[[str], None]) -> None:
        """Take what `part` gave for every station; queues only where all of them fit."""
        found = [parts.get(f"station-{k}", {}) for k in range(len(self.stations))]
        fits = [station.load_learned(kept) for station, kept in zip(self.stations, found, strict=True)]
        if not all(fits):
            say(OTHER_NETWORKS)
        same_cut = f"station-{len(self.stations)}" not in parts
        if not (same_cut and all(s.fits(kept) for s, kept in zip(self.stations, found, strict=True))):
            if any("way/step" in part for part in parts.values()):
                say(OTHER_QUEUES)
            return
        self.way.load(found[0])
        for k, kept in enumerate(found):
            self.stations[k].load_queued(kept)
            for mail, name in ((self.features[k], "arrived/features"), (self.adjoints[k], "arrived/adjoint")):
                mail.put(kept[name].to(self.stations[k].stage.device, copy=True) if name in kept else None)

    @property
    def bytes(self) -> int:
        return sum(station.bytes for station in self.stations)


def station_part(
    station: Station, way: Way, features: Tensor | None, adjoint: Tensor | None, with_queues: bool
) -> dict[str, Tensor]:
    """What a checkpoint keeps of a station, with the messages that have arrived for its next step."""
    kept = station.learned()
    if not with_queues or not (way.batches or station.pending):
        return kept
    messages = {"arrived/features": features, "arrived/adjoint": adjoint}
    arrived = {name: value for name, value in messages.items() if value is not None}
    return kept | station.queued() | arrived | way.tensors()


def _row(losses: list[Tensor]) -> Tensor:
    """All in one tensor, once the lanes are back: one copy to the host takes them."""
    return torch.stack([loss.float().to(losses[0].device) for loss in losses])


def _of(k: int, inputs: Inputs) -> Inputs:
    """The random changes of the batch at stage k."""
    before = f"changes-{k}/"
    return {name.removeprefix(before): value for name, value in inputs.items() if name.startswith(before)}


def _ids(batch: Batch | None) -> Tensor:
    return batch.ids if batch is not None else torch.zeros(0, dtype=torch.int64)
