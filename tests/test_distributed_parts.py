"""The parts of the distributed engine that need no second process: shares and micro-batches."""

import pytest
import torch

from parlay import AugmentedLagrangian, Coupling, Penalty
from parlay.data import batches
from parlay.engines.crew import Alone
from parlay.engines.pipelined import from_memory, in_memory
from parlay.engines.shares import Shares, divided, owned

METHODS = [AugmentedLagrangian(), Penalty(), Penalty(order="joint")]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: getattr(m, "order", type(m).__name__))


@methods
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("samples", [40, 37])
def test_the_replicas_of_a_stage_divide_every_batch_and_keep_their_samples(
    method: Coupling, replicas: int, samples: int
) -> None:
    kept: list[set[int]] = [set() for _ in range(replicas)]
    for epoch in (0, 1):
        for ids in batches(samples, 16, seed=0, epoch=epoch):
            shares = [Shares(method, samples, 1, 3, r, replicas).of(ids, epoch, parallel=True) for r in range(replicas)]
            assert sorted(i for share in shares for i in share.ids.tolist()) == sorted(ids.tolist())
            turn = method.turn(ids, epoch, 1)
            taken = sorted((ids if turn is None else ids[turn]).tolist())
            assert sorted(i for share in shares for i in share.taken.tolist()) == taken
            assert {share.whole for share in shares} == {len(taken)}
            assert sum(share.weight for share in shares) == pytest.approx(1.0)
            for share, own in zip(shares, kept, strict=True):
                own.update(share.ids.tolist())
                assert share.count(share.turn_before) == len(share.ids) - (0 if turn is None else len(share.taken))
    assert sum(map(len, kept)) == samples  # nobody ever has a sample of another
    assert [len(own) for own in kept] == [owned(samples, r, replicas) for r in range(replicas)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_replica_has_a_row_for_each_of_its_samples(replicas: int) -> None:
    for replica in range(replicas):
        share = Shares(AugmentedLagrangian(), 37, 0, 2, replica, replicas).of(torch.arange(37), 0, parallel=True)
        assert share.rows.tolist() == list(range(owned(37, replica, replicas)))


def test_samples_that_take_turns_leave_no_replica_idle() -> None:
    for epoch in (0, 1):
        for replica in (0, 1):
            share = Shares(Penalty(), 64, 1, 2, replica, 2).of(torch.arange(64), epoch, parallel=True)
            assert len(share.taken) == 16


def test_in_a_serial_step_and_of_a_single_stage_everything_is_computed() -> None:
    for stages, parallel in ((3, False), (1, True)):
        share = Shares(Penalty(), 8, 0, stages, 0, 1).of(torch.arange(8), 0, parallel)
        assert share.turn is None
        assert share.whole == 8


@pytest.mark.parametrize(
    ("samples", "asked", "stages", "parts"),
    [
        (128, 0, 2, 4),
        (128, 0, 3, 4),
        (128, 8, 2, 8),
        (128, 8, 3, 8),
        (128, 3, 2, 2),
        (128, 2, 4, 4),  # 1F1B takes no fewer than there are stages
        (80, 0, 3, 5),
        (81, 0, 2, 3),
        (79, 0, 2, 1),  # a prime: as a whole
        (3, 0, 2, 1),
        (2, 0, 2, 1),  # no parts of one sample, unless they are asked for
        (2, 2, 2, 2),
        (128, 4, 1, 1),
    ],
)
def test_a_batch_is_divided_into_equal_parts_near_to_what_was_asked_for(
    samples: int, asked: int, stages: int, parts: int
) -> None:
    assert divided(samples, asked, stages) == parts


def test_feature_maps_go_through_a_pipeline_as_they_lie_in_memory() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert in_memory(x).data_ptr() == x.data_ptr()
    assert in_memory(x).is_contiguous()
    assert torch.equal(from_memory(in_memory(x)), x)
    assert torch.equal(in_memory(torch.ones(2, 3)), torch.ones(2, 3))


def test_a_process_alone_leads() -> None:
    assert Alone().leads
    assert Alone().led(lambda: 3) == 3
    assert Alone().gathered(lambda: 3) == [3]
