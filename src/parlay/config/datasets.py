"""The named data sets: shapes, classes, sizes and the statistics of their pixels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What is known of a data set with no file on disk."""

    shape: tuple[int, int, int]
    """channels, height, width"""
    classes: int
    train_size: int
    test_size: int
    mean: tuple[float, ...]
    """of each channel over the training images, black being 0 and white 1"""
    std: tuple[float, ...]
    augment: bool
    """Do shifted and mirrored images still show the same thing? Of photographs yes, of figures no."""


def synthetic(shape: tuple[int, int, int], classes: int, train_size: int, test_size: int) -> Facts:
    """Of synthetic images of this shape: mean and deviation are those by construction."""
    channels = shape[0]
    return Facts(shape, classes, train_size, test_size, (0.5,) * channels, (0.25,) * channels, augment=False)


# Means and deviations are those of all pixels of the training images. For CIFAR-10 one often meets 0.2023, 0.1994,
# 0.2010 as deviations: these are means over the images of each image's own deviation.
FACTS = {
    "digits": Facts((1, 8, 8), 10, 1437, 360, (0.2874,), (0.3538,), augment=False),
    "mnist": Facts((1, 28, 28), 10, 60_000, 10_000, (0.1307,), (0.3081,), augment=False),
    "cifar10": Facts((3, 32, 32), 10, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), augment=True),
    "cifar100": Facts(
        (3, 32, 32), 100, 50_000, 10_000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), augment=True
    ),
    "synthetic": synthetic((3, 32, 32), 10, 2048, 512),
}
DATASETS = tuple(FACTS)
