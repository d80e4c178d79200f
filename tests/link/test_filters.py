"""DS and US: exact inverses on one side, adjoint up to the number of pixels, and sizes restored to the pixel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.errors import InputError
from parlay.link.filters import Downsample, Identity, downsample

EVEN = [(3, 8, 8), (16, 4, 12)]
ODD = [(3, 7, 5), (2, 1, 1), (2, 1, 6), (3, 9, 10), (2, 5, 8)]
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_down_after_up_is_the_identity_to_the_last_bit(dtype: torch.dtype, device: str) -> None:
    for reduce in map(downsample, (1, 2, 4)):
        for full in EVEN + ODD:
            small = (100 * random(32, *reduce.shape(full))).to(device, dtype)
            large = reduce.up(small, full)
            assert (large.shape, large.dtype) == ((32, *full), dtype)
            assert torch.equal(reduce.down(large), small)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_up_and_down_are_adjoint_up_to_the_real_pixels_of_each_cell(factor: int) -> None:
    """r², but at the rim of maps whose side r does not divide."""
    for full in [*EVEN, *(ODD if factor < 4 else [(3, 9, 5)])]:
        reduce = downsample(factor)
        a, b = random(5, *reduce.shape(full)), random(5, *full)
        _, height, width = reduce.shape(full)
        padded = F.pad(torch.ones(1, *full), (0, width * factor - full[2], 0, height * factor - full[1]))
        pixels = F.avg_pool2d(padded, factor) * factor**2
        assert full not in EVEN or bool((pixels == factor**2).all())
        up, down = (reduce.up(a, full) * b).sum(), (a * pixels * reduce.down(b)).sum()
        torch.testing.assert_close(up, down)


def test_up_repeats_down_is_the_mean_over_real_pixels_and_what_was_padded_is_cropped() -> None:
    small = torch.arange(6.0).reshape(1, 1, 2, 3)
    assert torch.equal(downsample(2).up(small, (1, 4, 6))[0, 0], torch.kron(small[0, 0], torch.ones(2, 2)))
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert downsample(2).down(x).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert downsample(4).down(x).flatten().tolist() == [7.5]
    small = downsample(2).down(torch.tensor([[1.0, 3.0, 5.0], [1.0, 3.0, 7.0], [2.0, 4.0, 9.0]]).reshape(1, 1, 3, 3))
    assert small[0, 0].tolist() == [[2.0, 6.0], [3.0, 9.0]]
    assert downsample(2).up(small, (1, 3, 3))[0, 0].tolist() == [[2.0, 2.0, 6.0], [2.0, 2.0, 6.0], [3.0, 3.0, 9.0]]


@pytest.mark.parametrize(("factor", "full"), [(2, (3, 7, 5)), (4, (3, 8, 8))])
def test_both_ways_are_differentiable(factor: int, full: tuple[int, int, int]) -> None:
    reduce = downsample(factor)
    x, a = random(2, *full).requires_grad_(), random(2, *reduce.shape(full)).requires_grad_()
    assert torch.autograd.gradcheck(reduce.down, (x,))
    assert torch.autograd.gradcheck(lambda small: reduce.up(small, full), (a,))


@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("full", [(8, 6, 6), (8, 7, 5)])
def test_tensors_keep_their_layout_without_gaps(full: tuple[int, int, int], form: torch.memory_format) -> None:
    reduce, x = downsample(2), random(4, *full)
    small = reduce.down(x.contiguous(memory_format=form))
    large = reduce.up(small, full)
    assert small.is_contiguous(memory_format=form)
    assert large.is_contiguous(memory_format=form)
    torch.testing.assert_close(large, reduce.up(reduce.down(x), full))


def test_factor_one_takes_any_rank_and_copies_nothing_and_what_cannot_be_is_refused() -> None:
    reduce, x = downsample(1), torch.randn(4, 10)
    assert isinstance(reduce, Identity)
    assert reduce.shape((10,)) == (10,)
    assert reduce.down(x) is reduce.up(x, (10,)) is x
    for factor in (0, -2, 3, 8):
        with pytest.raises(InputError, match=f"by {factor}: write downsample 1, 2 or 4"):
            downsample(factor)
    for full in [(10,), (4, 10), (1, 2, 3, 4)]:
        with pytest.raises(InputError, match="write downsample 1"):
            Downsample(2).down(torch.zeros(2, *full))
    with pytest.raises(InputError, match=r"give samples of shape \(3, 4, 4\)"):
        downsample(2).up(torch.zeros(1, 3, 5, 4), (3, 8, 8))
