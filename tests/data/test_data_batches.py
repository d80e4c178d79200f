"""Batches are a function of the seed and the epoch alone, and each sample is in exactly one of them."""

import subprocess
import sys

import pytest
import torch

from parlay.data import batches, order, step_seed
from parlay.data.batches import drawn, half
from parlay.errors import InputError


@pytest.mark.parametrize(("samples", "batch_size"), [(10, 3), (12, 4), (1, 1), (5, 128), (129, 128)])
def test_the_batches_of_an_epoch_hold_every_sample_once(samples: int, batch_size: int) -> None:
    ids = torch.cat(batches(samples, batch_size, seed=1, epoch=2))
    assert ids.dtype == torch.int64
    assert ids.sort().values.tolist() == list(range(samples))


def test_the_last_incomplete_batch_is_included() -> None:
    assert [len(batch) for batch in batches(10, 4, seed=0, epoch=0)] == [4, 4, 2]
    assert [len(batch) for batch in batches(129, 128, seed=0, epoch=0)] == [128, 1]


def test_the_order_is_the_same_whatever_was_drawn_before() -> None:
    first = order(100, seed=3, epoch=7)
    torch.manual_seed(5)
    torch.rand(10)
    order(50, seed=3, epoch=6)
    assert torch.equal(order(100, seed=3, epoch=7), first)


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(order(100, seed, epoch).tolist()) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36


@pytest.mark.parametrize(("samples", "batch_size"), [(96, 32), (97, 32), (1437, 128), (7, 4), (2, 2)])
def test_every_batch_has_as_many_samples_of_either_half(samples: int, batch_size: int) -> None:
    for batch in batches(samples, batch_size, seed=0, epoch=1):
        assert abs(2 * int(half(batch).sum()) - len(batch)) <= len(batch) % 2


@pytest.mark.parametrize("period", [2, 3, 4, 8, 10, 12])
def test_kinds_that_stand_in_turn_are_in_both_halves_and_among_those_drawn(period: int) -> None:
    """Two sources in turn, as in MNIST; labels that count, as in the digits."""
    kinds, of = torch.arange(60_000) % period, half(torch.arange(60_000))
    for ids in ((of == 0).nonzero(), (of == 1).nonzero(), drawn(60_000, 5_000, seed=0)):
        shares = kinds[ids].flatten().bincount(minlength=period) / len(ids)
        assert all(abs(share - 1 / period) < 0.15 / period for share in shares.tolist())


def test_what_is_drawn_is_drawn_once_and_all_where_there_are_fewer() -> None:
    first = drawn(100, 20, seed=3)
    assert len(set(first.tolist())) == 20
    assert torch.equal(first, drawn(100, 20, seed=3))
    assert not torch.equal(first, drawn(100, 20, seed=4))
    assert drawn(7, 20, seed=0).sort().values.tolist() == list(range(7))


def test_step_seeds_are_63_bits_and_all_different() -> None:
    seeds = [step_seed(a, b, c, d) for a in range(-2, 4) for b in range(6) for c in range(6) for d in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_another_process_draws_the_same_numbers() -> None:
    program = "from parlay.data import order, step_seed; print(step_seed(1, 2, 3), order(8, 1, 2).tolist())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert said == f"{step_seed(1, 2, 3)} {order(8, 1, 2).tolist()}"


@pytest.mark.parametrize(("samples", "batch_size"), [(0, 4), (4, 0), (4, -1)])
def test_no_samples_or_no_batch_size_is_refused(samples: int, batch_size: int) -> None:
    with pytest.raises(InputError):
        batches(samples, batch_size, seed=0, epoch=0)
