"""The interface: what crosses it, and the penalty on what downsampling leaves out."""

from pathlib import Path

import pytest
import torch

from parlay import AugmentedLagrangian, InputError, Penalty
from parlay.coupling import Pair
from parlay.filters import downsample
from parlay.interface import Cut, Interface
from parlay.stores import make_store

SHAPE = (3, 4, 6)
BETA = torch.tensor(2.0)


def interface(method: Penalty | AugmentedLagrangian, factor: int, folder: Path) -> Interface:
    reduce = downsample(factor)
    store = make_store("device", 5, reduce.shape(SHAPE), torch.float32, torch.device("cpu"), folder / "states")
    joined = Interface(SHAPE, reduce, method, store, None)
    joined.mean_square.fill_(0.7)
    return joined


def test_with_the_detail_the_penalty_is_the_papers_between_the_upsampled_state_and_the_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    joined = interface(Penalty(detail=1.0), 2, tmp_path)
    x, state = torch.randn(5, *SHAPE), torch.randn(5, 3, 2, 3)
    printed = BETA * (joined.up(state) - x).square().flatten(1).mean(1).mean() / 0.7  # β ‖US(Λ) − x‖² / (D s²)
    torch.testing.assert_close(joined.local_loss(x, Pair(state, None), BETA), printed)


def test_without_it_only_the_small_tensors_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(5, *SHAPE), torch.randn(5, 3, 2, 3)
    joined = interface(Penalty(detail=0.0), 2, tmp_path)
    rough = x - joined.up(joined.down(x))
    loss, smoother = (joined.local_loss(y, Pair(state, None), BETA) for y in (x, x - rough))
    torch.testing.assert_close(loss, smoother)


def test_without_downsampling_there_is_no_detail_to_weigh(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(5, *SHAPE), torch.randn(5, *SHAPE)
    losses = [interface(Penalty(detail=w), 1, tmp_path).local_loss(x, Pair(state, None), BETA) for w in (0.0, 1.0)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(("side", "weight"), [(16, 0.3), (15, 0.3), (14, 0.0), (4, 0.0)])
def test_small_maps_keep_their_detail_unless_told_otherwise(side: int, weight: float) -> None:
    shape = (3, side, 20)
    cuts = [Cut(shape, downsample(2), Penalty(detail=w), torch.device("cpu")) for w in (None, 0.5)]
    assert [cut.detail for cut in cuts] == [weight, 0.5]


@pytest.mark.parametrize("shrink", [1.0, 0.25])
def test_an_adjoint_crosses_the_interface_shrunk_by_the_factor(shrink: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids, x, p = torch.arange(5), torch.randn(5, *SHAPE), torch.randn(5, *SHAPE)
    cpu, method = torch.device("cpu"), AugmentedLagrangian(shrink=shrink)
    states, multipliers = (make_store("device", 5, SHAPE, torch.float32, cpu, tmp_path / n) for n in ("s", "m"))
    joined = Interface(SHAPE, downsample(1), method, states, multipliers)
    joined.start(ids, x)
    joined.update(ids, joined.gather(ids), x, None, p, None, BETA)
    torch.testing.assert_close(multipliers.tensor(), shrink * p)


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_a_wrong_detail_is_named(wrong: float) -> None:
    with pytest.raises(InputError, match="detail"):
        AugmentedLagrangian(detail=wrong)
