"""What a run of K stages will take: a step and a schedule, from times of the stages and of a link, by the paper's
formulas; and the memory of a streaming method, as its stations tell it after a few small steps.

For `plan`, and for the projections of `reproduce`. On CPU cores the times are measured here, by processes as those of
the bench: the network on one core, its stages side by side, and a link.

Stages share caches and memory, and so each is slower beside the others than alone; measured side by side they are as
slow as they will be in training. What crosses the interfaces is copied by the same cores that compute, so the time of
a stage's messages adds to its own, however well they overlap. The stages of a streaming method are measured with their
messages, as they run in training.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from parlay import stores
from parlay.bench.gang import Gang, Make, Place, Worker
from parlay.bench.workers import Alone, Bench, Layers, Serial
from parlay.coupling import Streaming
from parlay.filters import downsample
from parlay.run.setup import Setup
from parlay.schedule import PARALLEL

MESSAGE = 8 << 20  # bytes: the states of ResNet-20 at batch 128
MESSAGES = 8
ROUNDS, STEPS = 4, 2
FEW, MORE = 2, 4  # samples of a batch, from which what is held with a full one follows


@dataclass(frozen=True)
class Measured:
    serial_ms: float
    stage_ms: list[float]
    bytes_per_second: float
    """One way between two processes."""
    with_messages: bool = False
    """Are those of the stages in `stage_ms`?"""


def measure(setup: Setup) -> Measured:
    """From a few interleaved rounds; the least counts, as for the costs of blocks: what disturbs only adds."""
    recipe, k, streaming = setup.recipe, setup.recipe.stages, isinstance(setup.method, Streaming)
    with ExitStack() as held:

        def gang(name: str, make: Make, size: int) -> Gang:
            found = Gang(name, make, size)
            held.callback(found.close)
            found.ready()
            found.time(1)
            return found

        serial = gang("serial", partial(Serial, recipe), 1)
        alone = gang("stages", partial(Layers if streaming else Alone, recipe), k) if k > 1 else serial
        link = gang("link", Postman, 2)
        speeds = []
        for _ in range(ROUNDS):
            serial.time(STEPS)
            if k > 1:
                alone.time(STEPS)
            speeds += [MESSAGES * MESSAGE / link.time(1) for _ in range(2)]
        return Measured(_processor_ms(serial)[0], _processor_ms(alone), max(speeds), streaming)


def _processor_ms(gang: Gang) -> list[float]:
    """Of a step of each process, the least of all orders but the first.

    Processor time, which is all the time of a process that waits for nobody; what other programs take is not in it.
    """
    orders = gang.measured[None][1:]
    return [1000 * min(order[rank].cpu / order[rank].steps for order in orders) for rank in range(len(orders[0]))]


def exchanged(setup: Setup) -> list[int]:
    """Bytes per step at every interface: states and multipliers one way, outputs the other, as they are stored.

    Of a streaming method: outputs one way, adjoints, where there are any, the other.
    """
    if setup.method is None:
        return []
    recipe, reduce = setup.recipe, downsample(setup.recipe.downsample)
    if setup.coupling is None:
        tensors = 1 if recipe.method == "local" else 2
    else:
        tensors = 3 if setup.coupling.keeps_multipliers else 2
    each = recipe.batch_size * stores.DTYPES[recipe.store_dtype].itemsize * tensors
    return [each * math.prod(reduce.shape(shape)) for shape in setup.partition.shapes]


def step_ms(measured: Measured, crossing: Sequence[int]) -> float:
    """Of the slowest stage, with its messages to and from both neighbours."""
    if measured.with_messages:
        return max(measured.stage_ms)
    messages = message_ms(crossing, measured.bytes_per_second)
    return max(own + sent for own, sent in zip(measured.stage_ms, messages, strict=True))


def message_ms(crossing: Sequence[int], bytes_per_second: float) -> list[float]:
    """Of every stage, with both neighbours."""
    return [1000 * (a + b) / bytes_per_second for a, b in pairwise([0, *crossing, 0])]


def hybrid_speedup(ratio: float, phases: str, share: float = 1.0) -> float:
    """ρ_H, eq. (11), for K devices: serial epochs take as long as ever, parallel ones 1/ρ_K of that.

    `share`: of the samples of a parallel epoch, the part that a stage trains on. What is left out is no work done.
    """
    parallel = phases.count(PARALLEL)
    serial = len(phases) - parallel
    return (share * parallel + serial) / (parallel / ratio + serial)


def stream_bytes(setup: Setup) -> int:
    """What the stations of a streaming method will hold: queues, activations, networks beside the stages.

    Only they know, so they are asked. Part of it grows with the samples of a batch, the rest does not: batches of two
    sizes tell one from the other.
    """
    few, more = _held(setup, FEW), _held(setup, MORE)
    rows = min(setup.recipe.batch_size, setup.facts.train_size)
    return few + (rows - FEW) * (more - few) // (MORE - FEW)


def _held(setup: Setup, rows: int) -> int:
    """With batches of so many samples, once all queues are full and all optimisers have made an update."""
    recipe = replace(setup.recipe, engine="in-process", capture="off", compile="off", batch_size=rows)
    bench = Bench.of(recipe)
    feed = bench.feed.placed(bench.trainer.devices[0], bench.trainer.devices[-1])
    engine = bench.trainer.engine(feed, Path(tempfile.gettempdir()))
    for step in range(2 * recipe.stages + 1):  # there and back
        engine.parallel_step(bench.batch(step))
    engine.drain()
    engine.close()
    return engine.auxiliary_bytes


@final
class Postman(Worker):
    """Sends, or receives, a batch of messages."""

    def __init__(self, place: Place) -> None:
        place.join()
        self.rank = place.rank
        self.message = torch.zeros(MESSAGE, dtype=torch.uint8)

    def step(self, option: Any) -> None:  # noqa: ARG002
        post: Callable[..., Any] = dist.send if self.rank == 0 else dist.recv
        for _ in range(MESSAGES):
            post(self.message, 1 - self.rank)
