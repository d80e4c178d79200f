"""Links: the penalty on what downsampling leaves out, s² at both ends, batches in slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parlay import Penalty
from parlay.batch import Pass
from parlay.link.filters import downsample
from parlay.link.link import LinkEnd
from parlay.link.queue import QueueLink, Slots
from parlay.link.states import Pair, StateLink
from parlay.stores import make_store
from problems import batch

CPU = torch.device("cpu")
SHAPE = (3, 4, 6)


def end(factor: int = 1, **options: Any) -> LinkEnd:
    reduce, shape = downsample(factor), options.pop("shape", SHAPE)

    def store(what: str) -> Any:
        return make_store("device", 5, reduce.shape(shape), torch.float32, CPU, what)  # type: ignore[arg-type]

    return LinkEnd(1, 2, shape, reduce, 5, CPU, store=store, **options)


def passed(number: int = 0, rows: int = 5) -> Pass:
    ids = torch.arange(rows)
    return Pass(batch(rows, step=number), number, ids, ids, whole=rows)


def local_loss(method: Any, factor: int, x: Tensor, state: Tensor) -> Tensor:
    link, p = StateLink(end(factor), method), passed()
    link.set_weight(2.0)
    link.s2.fill_(0.7)
    link.states.load(state)
    link.gather(p)
    return link.loss(p, x, link.put_output(p, x))


def test_with_the_detail_the_penalty_is_the_papers_between_the_upsampled_state_and_the_output() -> None:
    torch.manual_seed(0)
    x, small, full = torch.randn(5, *SHAPE), torch.randn(5, 3, 2, 3), torch.randn(5, *SHAPE)
    reduce = downsample(2)
    printed = 2.0 * (reduce.up(small, SHAPE) - x).square().flatten(1).mean(1).mean() / 0.7  # β ‖US(Λ) − x‖² / (D s²)
    torch.testing.assert_close(local_loss(Penalty(detail=1.0), 2, x, small), printed)
    smooth = reduce.up(reduce.down(x), SHAPE)  # without it only the small tensors are compared
    losses = [local_loss(Penalty(detail=0.0), 2, y, small) for y in (x, smooth)]
    torch.testing.assert_close(*losses)
    whole = [local_loss(Penalty(detail=weight), 1, x, full) for weight in (0.0, 1.0)]  # nothing is left out there
    assert torch.equal(*whole)


@pytest.mark.parametrize(("side", "weight"), [(16, 0.3), (15, 0.3), (14, 0.0), (4, 0.0)])
def test_small_maps_keep_their_detail_unless_told_otherwise(side: int, weight: float) -> None:
    links = [StateLink(end(2, shape=(3, side, 20)), Penalty(detail=given)) for given in (None, 0.5)]
    assert [link.detail for link in links] == [weight, 0.5]


def test_the_part_of_a_pair_at_some_positions_is_taken_and_replaced() -> None:
    pair, turn = Pair(torch.arange(4.0), torch.arange(4.0) + 10), torch.tensor([2, 0])
    assert pair.of(None) is pair
    assert [part.tolist() for part in pair.of(turn)] == [[2, 0], [12, 10]]
    other = pair.copy()
    other.put(turn, Pair(-pair.of(turn).state, pair.of(turn).multiplier))
    assert (other.state.tolist(), pair.state.tolist()) == ([0, 1, -2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("shape", [SHAPE, (7,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_in_slots_at_fixed_places_are_the_same_batches(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As captured steps need them; also incomplete ones, and from a checkpoint."""
    free, fixed = Slots(3, 5, fixed=False), Slots(3, 5, fixed=True)
    sent: list[Tensor] = []
    for number, rows in enumerate([5, 5, 2, 5, 5, 3]):
        x = torch.randn(rows, *shape).to(dtype)
        sent.append(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)
        for slots in (free, fixed):
            slots.put(passed(number, rows), sent[-1])
        for kept in (free, fixed):
            again = Slots(3, 5, fixed=kept is free)
            again.load("outputs", kept.tensors("outputs"), CPU)
            for slots in (kept, again):
                for back in range(min(number + 1, 3)):
                    found, own = slots.take(passed(number - back, len(sent[-1 - back]))), sent[-1 - back]
                    assert torch.equal(found, own)
                    assert found.stride() == own.stride()
    assert fixed.bytes == 3 * 5 * sent[0][0].numel() * dtype.itemsize


def test_an_adjoint_is_kept_per_sample_and_comes_back_as_a_mean() -> None:
    link, p, x = QueueLink(end(), lag=2), passed(), torch.randn(5, *SHAPE)
    link.put_adjoint(p, x / 5)
    torch.testing.assert_close(link.loss(p, x, x), x.square().sum() / 5)
    link.put_adjoint(p, None)  # nothing depends on the state
    assert not link.adjoint(p).any()
