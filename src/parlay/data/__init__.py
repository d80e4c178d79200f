"""Data: files to tensors (`sources`, `fetch`), random changes of images (`augment`), and who is in a batch (`batches`).

In come names of data sets, or a user's own; out go tensors with one row per sample, and batches that carry sample ids.
"""

from parlay.data.augment import Augmentation, CropAndFlip, crop_and_flip, expand, normalise
from parlay.data.batches import batches, order, step_seed
from parlay.data.feed import Feed, Prepare
from parlay.data.fetch import check, fetch
from parlay.data.sources import NAMES, DataSet, Facts, Split, Synthetic, as_split, facts, load

__all__ = [
    "NAMES",
    "Augmentation",
    "CropAndFlip",
    "DataSet",
    "Facts",
    "Feed",
    "Prepare",
    "Split",
    "Synthetic",
    "as_split",
    "batches",
    "check",
    "crop_and_flip",
    "expand",
    "facts",
    "fetch",
    "load",
    "normalise",
    "order",
    "step_seed",
]
