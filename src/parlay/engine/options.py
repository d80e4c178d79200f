"""What an engine is told beside the stages, the method and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from parlay import stores
from parlay.errors import InputError
from parlay.link.filters import Filter
from parlay.link.filters import downsample as make_filter
from parlay.stage.optimiser import MakeOptimizer
from parlay.stage.precision import autocast_dtype
from parlay.stage.worker import Loss


@dataclass(frozen=True)
class Options:
    loss: Loss
    optimizer: MakeOptimizer
    filter: Filter
    device: torch.device
    autocast: torch.dtype | None = None
    clip: float | None = None
    store: str = "auto"
    store_dtype: str = "float32"
    batch_size: int = 128
    seed: int = 0
    capture: bool = True
    compile: bool | None = None
    """None: where it pays."""
    pipelined: bool = True
    timeline: int = 0
    parallel: bool = True
    """Are there parallel phases? Else no states are kept."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch-size is {self.batch_size}: write a number of at least 1")
        if self.store_dtype not in stores.DTYPES:
            raise InputError(f"unknown store-dtype '{self.store_dtype}': write one of {', '.join(stores.DTYPES)}")

    @classmethod
    def of(cls, *, device: torch.device, downsample: int, precision: str, **others: Any) -> Options:
        """From the words of a recipe."""
        return cls(filter=make_filter(downsample), device=device, autocast=autocast_dtype(precision, device), **others)
