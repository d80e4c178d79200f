"""DS and US: exact inverses on one side, adjoint up to the number of pixels, and sizes restored to the pixel."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.errors import InputError
from parlay.filters import Downsample, Identity, downsample

EVEN = [(3, 8, 8), (16, 4, 12)]
ODD = [(3, 7, 5), (2, 1, 1), (2, 1, 6), (3, 9, 10), (2, 5, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        yield


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("full", EVEN + ODD)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_down_after_up_is_the_identity_to_the_last_bit(
    factor: int, full: tuple[int, int, int], dtype: torch.dtype
) -> None:
    filt = downsample(factor)
    small = (100 * torch.randn(32, *filt.shape(full))).to(dtype)
    large = filt.up(small, full)
    assert large.shape == (32, *full)
    assert large.dtype == dtype
    assert torch.equal(filt.down(large), small)


@pytest.mark.parametrize("full", EVEN)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_up_and_down_are_adjoint_up_to_r_squared(factor: int, full: tuple[int, int, int]) -> None:
    filt = downsample(factor)
    a = torch.randn(5, *filt.shape(full), dtype=torch.float64)
    b = torch.randn(5, *full, dtype=torch.float64)
    torch.testing.assert_close(inner(filt.up(a, full), b), factor**2 * inner(a, filt.down(b)))


@pytest.mark.parametrize(("factor", "full"), [*((2, full) for full in ODD), (4, (3, 9, 5)), (4, (2, 6, 2))])
def test_at_odd_sides_they_are_adjoint_up_to_the_real_pixels_of_each_cell(
    factor: int, full: tuple[int, int, int]
) -> None:
    filt = downsample(factor)
    a = torch.randn(5, *filt.shape(full), dtype=torch.float64)
    b = torch.randn(5, *full, dtype=torch.float64)
    _, height, width = filt.shape(full)
    padded = F.pad(torch.ones(1, full[0], *full[1:]), (0, width * factor - full[2], 0, height * factor - full[1]))
    pixels = F.avg_pool2d(padded, factor) * factor**2
    torch.testing.assert_close(inner(filt.up(a, full), b), inner(a, pixels * filt.down(b)))


def test_up_is_the_kronecker_product_with_ones_and_down_is_the_mean() -> None:
    small = torch.arange(6.0).reshape(1, 1, 2, 3)
    assert torch.equal(downsample(2).up(small, (1, 4, 6))[0, 0], torch.kron(small[0, 0], torch.ones(2, 2)))
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert downsample(2).down(x).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert downsample(4).down(x).flatten().tolist() == [7.5]


def test_an_odd_map_is_averaged_over_its_real_pixels_and_cropped_back() -> None:
    x = torch.tensor([[1.0, 3.0, 5.0], [1.0, 3.0, 7.0], [2.0, 4.0, 9.0]]).reshape(1, 1, 3, 3)
    small = downsample(2).down(x)
    assert small[0, 0].tolist() == [[2.0, 6.0], [3.0, 9.0]]
    assert downsample(2).up(small, (1, 3, 3))[0, 0].tolist() == [[2.0, 2.0, 6.0], [2.0, 2.0, 6.0], [3.0, 3.0, 9.0]]


@pytest.mark.parametrize("full", [(3, 8, 8), (3, 7, 5)])
@pytest.mark.parametrize("factor", [2, 4])
def test_both_ways_are_differentiable(factor: int, full: tuple[int, int, int]) -> None:
    filt = downsample(factor)
    x = torch.randn(2, *full, dtype=torch.float64, requires_grad=True)
    a = torch.randn(2, *filt.shape(full), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(filt.down, (x,))
    assert torch.autograd.gradcheck(lambda small: filt.up(small, full), (a,))


@pytest.mark.parametrize("full", [(8, 6, 6), (8, 7, 5)])
def test_channels_last_tensors_stay_channels_last_with_the_same_values(full: tuple[int, int, int]) -> None:
    filt = downsample(2)
    x = torch.randn(4, *full)
    x_last = x.contiguous(memory_format=torch.channels_last)
    small = filt.down(x_last)
    large = filt.up(small, full)
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert large.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(small, filt.down(x))
    torch.testing.assert_close(large, filt.up(filt.down(x), full))


@pytest.mark.parametrize("full", [(8, 6, 6), (8, 7, 5)])
def test_contiguous_tensors_stay_contiguous_so_that_they_can_be_sent(full: tuple[int, int, int]) -> None:
    filt = downsample(2)
    small = filt.down(torch.randn(4, *full))
    assert small.is_contiguous()
    assert filt.up(small, full).is_contiguous()


def test_factor_one_takes_any_rank_and_copies_nothing() -> None:
    filt = downsample(1)
    x = torch.randn(4, 10)
    assert isinstance(filt, Identity)
    assert filt.shape((10,)) == (10,)
    assert filt.down(x) is x
    assert filt.up(x, (10,)) is x


@pytest.mark.parametrize("factor", [0, -2, 3, 8])
def test_other_factors_are_refused_with_those_that_exist(factor: int) -> None:
    with pytest.raises(InputError, match=f"by {factor}: write downsample 1, 2 or 4"):
        downsample(factor)


@pytest.mark.parametrize("full", [(10,), (4, 10), (1, 2, 3, 4)])
def test_only_feature_maps_can_be_downsampled(full: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="write downsample 1"):
        Downsample(2).shape(full)
    with pytest.raises(InputError, match="write downsample 1"):
        Downsample(2).down(torch.zeros(2, *full))


def test_a_small_tensor_of_another_map_is_refused() -> None:
    with pytest.raises(InputError, match=r"give samples of shape \(3, 4, 4\)"):
        downsample(2).up(torch.zeros(1, 3, 5, 4), (3, 8, 8))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [2, 4])
def test_on_a_gpu_down_after_up_is_the_identity_to_the_last_bit(factor: int, dtype: torch.dtype) -> None:
    filt = downsample(factor)
    for full in EVEN + ODD:
        small = (100 * torch.randn(32, *filt.shape(full), device="cuda")).to(dtype)
        assert torch.equal(filt.down(filt.up(small, full)), small)
