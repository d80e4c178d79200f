"""What stages on CPU cores take beside each other, and what their messages take: measured, for a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from parlay import stores
from parlay.batch import Batch, Pass
from parlay.bench import workers
from parlay.bench.processes import BenchWorker, Pool, Seat
from parlay.link.filters import downsample
from parlay.link.link import Direction, LinkEnd
from parlay.run.setup import Setup

ROUNDS, STEPS = 4, 2


def measured(setup: Setup, crossing: Sequence[int]) -> dict[str, Any]:
    """From the stages side by side, a core each, and a link between two processes.

    In a few interleaved rounds, of which the least counts, as for the costs of blocks: what disturbs only adds. Stages
    of stored methods are measured isolated, and their messages come on top; others run with them, as in training.
    """
    recipe, k, isolated = setup.recipe, setup.recipe.stages, setup.method is not None and setup.method.keeps > 0
    with ExitStack() as held:

        def started(name: str, make: Callable[[Seat], BenchWorker], size: int) -> Pool:
            pool = Pool(name, make, size)
            held.callback(pool.close)
            pool.ready()
            pool.time(1)
            return pool

        serial = stages = started("serial", partial(workers.WholeNetwork, recipe), 1)
        if k > 1:
            stages = started("stages", partial(workers.IsolatedStage if isolated else workers.LayerParallel, recipe), k)
        link = started("link", workers.LinkTest, 2)
        speeds = []
        for _ in range(ROUNDS):
            for pool in dict.fromkeys((serial, stages)):
                pool.time(STEPS)
            speeds += [workers.MESSAGES * workers.MESSAGE / link.time(1) for _ in range(2)]
        stage_ms, speed = _processor_ms(stages), max(speeds)
        return {
            "measured": "side by side",
            "serial_ms": _processor_ms(serial)[0],
            "stage_ms": stage_ms,
            "link_gib_per_second": speed / (1 << 30),
            "step_ms": step_ms(stage_ms, crossing, speed) if isolated else max(stage_ms),
        }


def _processor_ms(pool: Pool) -> list[float]:
    """Of a step of each process, the least of all orders but the first.

    Processor time is all the time of a process that waits for nobody; what other programs take is not in it.
    """
    return [1000 * min(one.cpu / one.steps for one in own) for own in zip(*pool.measured[None][1:], strict=True)]


def exchanged(setup: Setup) -> list[int]:
    """Bytes at every link for a batch of which all samples are computed, both ways."""
    recipe, cut, found = setup.recipe, setup.partition, list[int]()
    ids, dtype = torch.arange(recipe.batch_size), stores.DTYPES[recipe.store_dtype]
    p = Pass(Batch(ids, 0, 0, 1.0, 0), 0, ids, ids)
    for k, shape in enumerate(cut.shapes, 1):
        assert setup.method is not None  # serial training is not cut
        end = LinkEnd(k, len(cut), shape, downsample(recipe.downsample), len(ids), ids.device, True, False, dtype)
        link = setup.method.link(end)
        messages = [message for way in Direction for message in link.incoming(way, p)]
        found.append(sum(math.prod(message.shape) * message.dtype.itemsize for message in messages))
    return found


def message_ms(crossing: Sequence[int], bytes_per_second: float) -> list[float]:
    """Of every stage, with both neighbours."""
    return [1000 * (a + b) / bytes_per_second for a, b in pairwise([0, *crossing, 0])]


def step_ms(stage_ms: Sequence[float], crossing: Sequence[int], bytes_per_second: float) -> float:
    """Of the slowest stage with its messages: the cores that compute copy them, so their time adds to a stage's."""
    return max(map(sum, zip(stage_ms, message_ms(crossing, bytes_per_second), strict=True)))
