"""Set all states by a pass over the training set: what each stage will see is what the stage before puts out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from parlay import signs
from parlay.batch import Batch, Pass
from parlay.engine.chain import Chain
from parlay.engine.evaluate import unchanged_buffers
from parlay.engine.losses import LATE, SharedLosses
from parlay.engine.own import Own
from parlay.engine.transport import Side
from parlay.link.link import Link


@torch.no_grad()
def refresh(
    own: Own, chain: Chain, losses: SharedLosses | None, batches: Iterable[Batch], stop: Callable[[], bool]
) -> list[float] | None:
    """States of all links, and multipliers; the violation of those that stood there before.

    In full precision and training mode, through the filters; buffers stay as they were. None where there were no states
    before, or where `stop` has ended it: the links then count as not filled.
    """
    had_states = all(own.world.gather(lambda: all(link.filled for link in own.links)))
    for link in own.links:
        link.reset()
    own.train_mode()
    found: list[Tensor] = []
    with unchanged_buffers(*(stage.module for stage in own.stages)):
        for batch in batches:
            signs.beat()
            if losses is None and stop():
                return None
            if losses is not None:
                losses.pass_by(stop())
            found += _start(own, chain, batch)
            if losses is not None and losses.read(LATE):
                break
    if losses is not None and losses.read(0):
        return None
    for link in own.links:
        link.filled = True
    upper = sum(link.end.upper for link in own.links)
    means = torch.stack(found).view(-1, upper).mean(0).tolist() if found else []
    everybody = own.world.gather(lambda: means)[:: own.world.replicas]
    return [value for values in everybody for value in values] if had_states else None


def _start(own: Own, chain: Chain, batch: Batch) -> list[Tensor]:
    """The violations of the links that have their memory here."""
    share = own.rows.all(batch.ids)
    p = Pass(batch, 0, share.ids, share.places, None, share.whole)
    before: dict[int, Link] = {link.k: link for link in own.links if link.end.upper}
    after: dict[int, Link] = {link.k - 1: link for link in own.links if link.end.lower}
    found: list[Tensor] = []
    small = torch.empty(0)
    for k, worker in own.workers.items():
        worker.seed(batch, None, own.world.replica)
        if k == 0:
            x = own.feed.batch(share.ids)[0]
        else:
            link = before[k]
            if not link.end.lower:
                small = chain.receive_tensor(Side.BEFORE, (len(share.ids), *link.small), torch.float32)
            violation = link.start(p, small)
            assert violation is not None
            found.append(violation)
            x = link.up(small.double() if worker.stage.precision is torch.float64 else small)
        if k not in after:
            break
        with worker.sources[0]:
            small = after[k].down(worker.stage.forward(x).float())
        if not after[k].end.upper:
            chain.send_tensor(Side.AFTER, small)
            after[k].start(p, small)
    return found
