"""DS and US: what is made of a tensor before it is stored and sent, and how it is turned back.

In come batches of states, outputs and adjoints at their full size; out go the small tensors that stores hold and that
cross a link, and the way back. A filter knows nothing of methods and stores: all it fixes is a linear pair
`down` (DS) and `up` (US) with DS(US(a)) = a, and the shape in between. Other filters (bilinear, projections of the
channels) come beside `Downsample` as further final classes.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.errors import InputError

Shape = tuple[int, ...]
FACTORS = (1, 2, 4)


class Filter(ABC):
    """A linear pair: `down` makes the small tensor, `up` brings it back to full size, and down(up(a)) = a."""

    @abstractmethod
    def shape(self, full: Shape) -> Shape:
        """The per-sample shape of the small tensor for samples of shape `full`."""

    @abstractmethod
    def down(self, x: Tensor) -> Tensor:
        """DS: (batch, *full) to (batch, *shape(full)), differentiable."""

    @abstractmethod
    def up(self, small: Tensor, full: Shape) -> Tensor:
        """US: (batch, *shape(full)) to (batch, *full), differentiable."""


@final
class Identity(Filter):
    """Nothing is left out: r = 1, for tensors of any rank. Both ways hand back the very tensor they were given."""

    def shape(self, full: Shape) -> Shape:
        return tuple(full)

    def down(self, x: Tensor) -> Tensor:
        return x

    def up(self, small: Tensor, full: Shape) -> Tensor:
        _check_small(small, self.shape(full), full)
        return small


@final
class Downsample(Filter):
    """DS is the mean over cells of r × r pixels, US repeats each element over its cell (Kronecker product with ones).

    Where r divides both sides, ⟨US(a), b⟩ = r² ⟨a, DS(b)⟩. Where it does not, the cells of the last row and column
    hold fewer real pixels. Padding them with their own mean, which is the mean over their real pixels alone, keeps
    DS(US(a)) = a, and the adjointness then reads ⟨US(a), b⟩ = ⟨a, n · DS(b)⟩ with n the number of real pixels of each
    cell (r² inside). Padding by replication has the first property too, but weighs the last pixel up to r times.

    The mean over 4 × 4 is taken as the mean of 2 × 2 means: sums of four equal floats are exact, sums of sixteen are
    not, and so DS(US(a)) = a holds to the last bit. One case pays for this: with r = 4 and a side of 4m + 3, the three
    pixels of the last cell weigh 1/4, 1/4, 1/2 along that side, and n · DS(b) above is no longer their plain sum.
    """

    def __init__(self, factor: int) -> None:
        if factor not in FACTORS[1:]:
            raise InputError(f"no downsampling by {factor}: write downsample 1, 2 or 4")
        self.factor = factor

    def __repr__(self) -> str:
        return f"Downsample({self.factor})"

    def shape(self, full: Shape) -> Shape:
        if len(full) != 3:
            raise InputError(
                f"only feature maps of shape (channels, height, width) can be downsampled, "
                f"not samples of shape {tuple(full)}: write downsample 1"
            )
        channels, height, width = full
        return channels, -(-height // self.factor), -(-width // self.factor)

    def down(self, x: Tensor) -> Tensor:
        self.shape(tuple(x.shape[1:]))
        cell = 1
        while cell < self.factor:
            # ceil_mode keeps the cells at the rim and divides each by the number of its real pixels.
            x = F.avg_pool2d(x, 2, ceil_mode=True)
            cell *= 2
        return x

    def up(self, small: Tensor, full: Shape) -> Tensor:
        _check_small(small, self.shape(full), full)
        _, height, width = full
        # One kernel, and unlike expand and reshape it keeps channels-last tensors channels last.
        x = F.interpolate(small, scale_factor=self.factor, mode="nearest")
        if x.shape[2:] == (height, width):
            return x
        # The crop is a view with gaps: close them, in the memory format that the tensor has.
        channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return x[..., :height, :width].contiguous(memory_format=memory_format)


def downsample(factor: int) -> Filter:
    """The filter of `--downsample FACTOR`."""
    if factor not in FACTORS:
        raise InputError(f"no downsampling by {factor}: write downsample 1, 2 or 4")
    return Identity() if factor == 1 else Downsample(factor)


def _check_small(small: Tensor, wanted: Shape, full: Shape) -> None:
    if tuple(small.shape[1:]) != wanted:
        raise InputError(
            f"samples of shape {tuple(small.shape[1:])} cannot be upsampled to {tuple(full)}: "
            f"give samples of shape {wanted}"
        )
