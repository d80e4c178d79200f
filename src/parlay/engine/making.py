"""What an engine is made of: the links of this process with their stores, and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parlay import stores
from parlay.data.feed import Feed
from parlay.engine.options import Options
from parlay.engine.rows import owned
from parlay.engine.world import Processes, World
from parlay.lanes import Lanes
from parlay.link.link import Link, LinkEnd
from parlay.methods.method import Method
from parlay.partitioning import Partition
from parlay.stage.stage import Stage
from parlay.stage.worker import Place, Worker


@dataclass
class Making:
    partition: Partition
    method: Method
    feed: Feed
    world: World
    options: Options
    folder: Path
    lanes: Lanes
    on_this_host: int = 0
    """Bytes of stores that the processes of this host want together."""

    def _upper(self) -> list[int]:
        """The links whose memory is here."""
        stages = range(1, len(self.partition)) if self.options.parallel else range(0)
        return [k for k in stages if k in self.world.own]

    def _samples(self) -> int:
        world = self.world
        return len(self.feed) if world.replicas == 1 else owned(len(self.feed), world.replica, world.replicas)

    def needed(self) -> int:
        """Bytes of the stores of this process."""
        shapes = [self.options.filter.shape(self.partition.shapes[k - 1]) for k in self._upper()]
        dtype, keeps = stores.DTYPES[self.options.store_dtype], self.method.keeps
        return stores.store_bytes(self._samples(), shapes, dtype, multipliers=keeps > 1) if keeps else 0

    def links(self) -> list[Link]:
        """Those with an end in this process."""
        own, needed, kind = self.world.own, self.needed(), "device"
        if not self.options.parallel:
            return []
        for k in range(1, len(self.partition)):
            self.options.filter.shape(self.partition.shapes[k - 1])  # refused here where it cannot be downsampled
        if needed:
            kind = stores.place(
                self.options.store, needed, self.options.device, self.folder, together=self.on_this_host
            )
        ends = [k for k in range(1, len(self.partition)) if k in own or k - 1 in own]
        return [self.method.link(self._end(k, kind)) for k in ends]

    def _end(self, k: int, kind: str) -> LinkEnd:
        world, options = self.world, self.options
        shape, own = self.partition.shapes[k - 1], world.own
        dtype, replicas = stores.DTYPES[options.store_dtype], world.replicas
        of = f"-{world.replica}" if replicas > 1 else ""

        def store(what: str) -> stores.Store:
            path = self.folder / "stores" / f"{what}-{k}{of}.bin"
            return stores.make_store(
                kind,
                self._samples(),
                options.filter.shape(shape),
                dtype,
                options.device,
                path,
                self.lanes if self.lanes.captures else None,
            )

        return LinkEnd(
            k,
            len(self.partition),
            shape,
            options.filter,
            min(options.batch_size, len(self.feed)),
            options.device,
            lower=k - 1 in own,
            upper=k in own,
            store_dtype=dtype,
            store=store,
            pool=world.over_replicas if isinstance(world, Processes) and replicas > 1 else None,
            fixed=self.lanes.captures,
        )

    def workers(self, stages: dict[int, Stage], links: list[Link]) -> dict[int, Worker]:
        by_stage = {link.k: link for link in links}
        outputs, inputs = (self._output_shape(), self._input_shape()) if self.method.fresh_inputs else (None, None)
        found: dict[int, Worker] = {}
        for k, stage in stages.items():
            place = Place(
                stage,
                k,
                len(self.partition),
                by_stage.get(k),
                by_stage.get(k + 1),
                self.feed,
                self.options.loss,
                min(self.options.batch_size, len(self.feed)),
                outputs,
                inputs,
                self.options.optimizer,
                self.options.seed,
                self.lanes,
                self.lanes.captures,
            )
            found[k] = self.method.worker(place) if self.options.parallel else Worker(place)
        return found

    def _input_shape(self) -> tuple[int, ...] | None:
        """Of a sample; None where it is not floating-point numbers."""
        example = self.feed.batch(torch.zeros(1, dtype=torch.int64))[0]
        return tuple(example.shape[1:]) if example.is_floating_point() else None

    def _output_shape(self) -> tuple[int, ...] | None:
        """Of what the network puts out for a sample; None where that is not one tensor."""
        self.partition.model.eval()
        with torch.no_grad():
            x: Any = self.feed.batch(torch.zeros(1, dtype=torch.int64))[0]
            for module in self.partition.stages:
                x = module(x.to(next((w.device for w in module.parameters()), x.device)))
        return tuple(x.shape[1:]) if isinstance(x, torch.Tensor) else None
