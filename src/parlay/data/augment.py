"""Random changes of images, on whole batches and on the device where the images are.

The random numbers come from a generator on the CPU and are then moved, so that every device makes the same images.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.data.batches import mixed_seed
from parlay.data.split import Split
from parlay.errors import InputError

Changes = Mapping[str, Tensor]
CHUNK = 4096  # images augmented at a time by `expand`: bounds the padded copies, 80 MB of uint8 for CIFAR


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (N, C, H, W) to float32 with about zero mean and unit variance in each channel."""
    _check_images(images)
    if images.dtype != torch.uint8:
        raise InputError(f"normalise takes images as uint8, not {images.dtype}: leave it out for images in float")
    if not images.shape[1] == len(mean) == len(std):
        raise InputError(
            f"{images.shape[1]} channels, {len(mean)} means and {len(std)} deviations: write one of each per channel"
        )
    scale, shift = _affine(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32).mul_(scale).add_(shift)


@lru_cache(maxsize=64)  # else each batch would wait for two copies of a few bytes to the device
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(x/255 - mean)/std as scale * x + shift."""
    m, s = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    scale, shift = 1 / (255 * s), -m / s
    return scale.float().view(-1, 1, 1).to(device), shift.float().view(-1, 1, 1).to(device)


class Augmentation(ABC):
    """A random change of images in two halves: the numbers are drawn on the CPU, the images changed on their device.

    The halves are apart because a step recorded as a CUDA graph can do the second only.
    """

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Changes:
        """The random numbers for so many images."""

    @abstractmethod
    def apply(self, images: Tensor, changes: Changes) -> Tensor:
        """The images, changed; their shape stays."""


@final
@dataclass(frozen=True)
class CropAndFlip(Augmentation):
    """Each image shifted by up to `pad` pixels either way, zeros coming in, and mirrored with probability one half."""

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise InputError(f"pad {self.pad}: write 0 or more pixels")

    def draw(self, count: int, generator: torch.Generator) -> Changes:
        shifts = torch.randint(2 * self.pad + 1, (2, count), generator=generator)
        mirror = torch.randint(2, (1, count), generator=generator)
        return {"shifts-and-mirror": torch.cat([shifts, mirror])}

    def apply(self, images: Tensor, changes: Changes) -> Tensor:
        _check_images(images)
        n, _, height, width = images.shape
        down, right, mirrored = changes["shifts-and-mirror"].to(images.device)
        if self.flip:  # before the crop: a shift drawn evenly from both sides is its own mirror image
            images = torch.where(mirrored.bool().view(n, 1, 1, 1), images.flip(3), images)
        # All windows of the padded images as a view (N, C, 2 pad + 1, 2 pad + 1, H, W); only the drawn ones are copied.
        pad = self.pad
        windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(n, device=images.device), :, down, right]


def crop_and_flip(images: Tensor, generator: torch.Generator, pad: int = 4, flip: bool = True) -> Tensor:
    """`CropAndFlip` in one go."""
    change = CropAndFlip(pad, flip)
    _check_images(images)
    return change.apply(images, change.draw(len(images), generator))


def expand(split: Split, ratio: int, seed: int) -> Split:
    """The finite augmentation of the paper: the originals, then `ratio` fixed augmented copies of each image.

    Every copy is a sample of its own, so it has its own states: copy j = 1..ratio of sample i has the id j N + i.
    """
    if ratio < 0:
        raise InputError(f"augmentation ratio {ratio}: write 0 (the originals alone) or more")
    if ratio == 0:
        return split
    _check_images(split.inputs)
    n = len(split)
    inputs = split.inputs.new_empty((1 + ratio) * n, *split.inputs.shape[1:])
    inputs[:n] = split.inputs
    for copy in range(1, 1 + ratio):
        generator = torch.Generator().manual_seed(mixed_seed("expand", seed, copy))
        for start in range(0, n, CHUNK):
            chunk = split.inputs[start : start + CHUNK]
            first = copy * n + start
            inputs[first : first + len(chunk)] = crop_and_flip(chunk, generator)
    return Split(inputs, torch.cat([split.targets] * (1 + ratio)))


def _check_images(images: Tensor) -> None:
    if images.dim() != 4:
        raise InputError(f"images of shape {tuple(images.shape)}: pass a batch of shape (N, C, H, W)")
