"""Which batch is where, which samples a process computes, and how a batch is divided."""

from __future__ import annotations

import pytest
import torch

from parlay import AugmentedLagrangian, Method, Penalty
from parlay.data import batches
from parlay.engine.clock import Clock, Turn
from parlay.engine.rows import Rows, divided, owned
from parlay.engine.world import World
from problems import batch

A, B, C = batch(6, step=0), batch(5, step=1), batch(6, step=2)


def names(turns: list[Turn]) -> list[str]:
    """Of every stage: the batch that goes forward and the one that goes back."""
    return ["".join("-" if b is None else "abc"[b.step] for b in (turn.forward, turn.backward)) for turn in turns]


@pytest.mark.parametrize(
    ("timing", "table"),
    [
        (
            [(0, 4), (1, 2), (2, 0)],  # replay
            ["a- -- --", "b- a- --", "c- b- aa", "-- ca bb", "-a -b cc", "-b -c --", "-c -- --"],
        ),
        ([(0, 0), (1, 0), (2, 0)], ["aa -- --", "bb aa --", "cc bb aa", "-- cc bb", "-- -- cc"]),  # local
        ([(2, 0), (1, 2), (0, 2)], ["-- -- a-", "-- a- b-", "aa b- ca", "bb ca -b", "cc -b -c", "-- -c --"]),
        ([(0, 0), (0, 0)], ["aa aa", "bb bb", "cc cc"]),  # stored methods
    ],
)
def test_the_way_of_three_batches(timing: list[tuple[int, int]], table: list[str]) -> None:
    """Also twice, and from a checkpoint at every step."""
    clock = Clock(timing)
    for _ in range(2):
        for entering, row in zip([A, B, C, *[None] * 9], table, strict=False):
            resumed = Clock(timing)
            resumed.load(clock.tensors())
            turns, again = clock.enter(entering), resumed.enter(entering)
            assert names(turns) == names(again) == row.split()
            for turn, same in zip(turns, again, strict=True):
                assert (turn.number, turn.number_back) == (same.number, same.number - same.lag)
                assert turn.backward is None or torch.equal(turn.backward.ids, same.backward.ids)  # type: ignore[union-attr]
        assert clock.empty


@pytest.mark.parametrize("method", [AugmentedLagrangian(), Penalty()])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_replicas_of_a_stage_divide_every_batch_and_keep_their_samples(method: Method, replicas: int) -> None:
    kept: list[set[int]] = [set() for _ in range(replicas)]
    rows = [Rows(method, 37, 3, replica, replicas) for replica in range(replicas)]
    for epoch in (0, 1):
        for ids in batches(37, 16, seed=0, epoch=epoch):
            shares = [own.of(ids, epoch, 1) for own in rows]
            computed = [s.ids if s.positions is None else s.ids[s.positions] for s in shares]
            everybody = method.share(ids, epoch, 1)
            wanted = ids if everybody is None else ids[everybody]
            assert sorted(torch.cat([share.ids for share in shares]).tolist()) == sorted(ids.tolist())
            assert sorted(torch.cat(computed).tolist()) == sorted(wanted.tolist())
            assert {share.whole for share in shares} == {len(wanted)}
            for share, own in zip(shares, kept, strict=True):
                own.update(share.ids.tolist())
    assert [len(own) for own in kept] == [owned(37, r, replicas) for r in range(replicas)]
    assert sum(map(len, kept)) == 37  # nobody ever has a sample of another
    for own in rows:  # a row of the store for each of them
        places = own.of(torch.arange(37), 0, 0).places
        assert places.tolist() == list(range(len(places)))


def test_samples_that_take_turns_leave_no_replica_idle_and_a_single_stage_computes_all() -> None:
    ids = torch.arange(64)
    shares = [Rows(Penalty(), 64, 2, replica, 2).of(ids, 0, 1).positions for replica in (0, 1)]
    assert [len(positions) for positions in shares if positions is not None] == [16, 16]
    assert Rows(Penalty(), 64, 1, 0, 1).of(ids, 0, 0).positions is None
    assert Rows(Penalty(), 64, 3, 0, 1).all(ids).positions is None


def test_a_batch_is_divided_into_equal_parts_near_to_what_was_asked_for() -> None:
    """1F1B takes no fewer than there are stages. A prime goes as a whole; parts of one sample only on demand."""
    for samples, asked, stages, parts in (
        *((128, 0, 2, 4), (128, 0, 3, 4), (128, 8, 3, 8), (128, 3, 2, 2), (128, 2, 4, 4), (128, 4, 1, 1)),
        *((80, 0, 3, 5), (79, 0, 2, 1), (2, 0, 2, 1), (2, 2, 2, 2)),
    ):
        assert divided(samples, asked, stages) == parts


def test_a_process_alone_leads() -> None:
    world = World(3)
    assert (world.leads, world.own, world.by_leader(lambda: 3), world.gather(lambda: 3)) == (True, range(3), 3, [3])
