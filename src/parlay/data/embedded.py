"""The data sets that need no download: scikit-learn's digits, and synthetic images of any shape."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.data.batches import mixed_seed
from parlay.data.split import Split
from parlay.errors import InputError

CHUNK = 1024  # synthetic images made at a time, so that only these exist as floats


def digits() -> tuple[Split, Split]:
    """The 1797 digits, 1437 to train on and 360 to test on, each class split alike."""
    from sklearn.datasets import load_digits  # a second of import that the other data sets do not pay

    found = load_digits()
    images = torch.from_numpy(found.images * 15).to(torch.uint8).unsqueeze(1)  # 0..16 to 0..240: exact and reversible
    targets = torch.from_numpy(found.target).long()
    # Shuffled, then sorted by class: every fifth sample is a fifth of each class. RandomState's numbers never change.
    shuffled = np.random.RandomState(0).permutation(len(targets))
    by_class = shuffled[np.argsort(targets.numpy()[shuffled], kind="stable")]
    is_test = np.zeros(len(targets), dtype=bool)
    is_test[by_class[::5]] = True
    test, train = (torch.from_numpy(np.flatnonzero(mask)) for mask in (is_test, ~is_test))
    return Split(images[train], targets[train]), Split(images[test], targets[test])


@dataclass(frozen=True)
class Synthetic:
    """Images that can be learnt: each class is a coarse random pattern, each sample that pattern and noise."""

    shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 10
    train_size: int = 2048
    test_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise InputError(f"synthetic shape {self.shape}: write channels, height and width, each from 1 up")
        for word in ("classes", "train_size", "test_size"):
            if getattr(self, word) < 1:
                raise InputError(f"synthetic {word} {getattr(self, word)}: write a whole number from 1 up")

    def make(self) -> tuple[Split, Split]:
        """The training and the test set, from streams of their own: neither changes with the size of the other."""
        return self._split("train", self.train_size), self._split("test", self.test_size)

    def _split(self, word: str, size: int) -> Split:
        generator = torch.Generator().manual_seed(mixed_seed(f"synthetic {word}", self.seed))
        patterns = self._patterns()
        targets = (torch.arange(size) % self.classes)[torch.randperm(size, generator=generator)]
        images = torch.empty(size, *self.shape, dtype=torch.uint8)
        for start in range(0, size, CHUNK):
            pattern = patterns[targets[start : start + CHUNK]]
            noise = torch.randn(pattern.shape, generator=generator)
            images[start : start + CHUNK] = (pattern + 48 * noise).round().clamp(0, 255)
        return Split(images, targets)

    def _patterns(self) -> Tensor:
        """One image per class, even over patches of 4 x 4 so that convolutions and pooling keep what tells it apart."""
        channels, height, width = self.shape
        generator = torch.Generator().manual_seed(mixed_seed("synthetic patterns", self.seed))
        coarse = torch.randn(self.classes, channels, -(-height // 4), -(-width // 4), generator=generator)
        fine = coarse.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        return 127.5 + 40 * fine[:, :, :height, :width]
