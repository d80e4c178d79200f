"""The store on the device that trains: the fastest, where it fits."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parlay.stores.base import Store, zeros


@final
class DeviceStore(Store):
    """A tensor on the device. With ids on the device nothing waits, so a CUDA graph can hold gather and scatter."""

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(zeros(samples, shape, dtype, device), shape, device)

    def gather(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.device, non_blocking=True)
        return self._as_samples(self._rows.index_select(0, ids))

    def scatter(self, ids: Tensor, values: Tensor) -> None:
        ids = ids.to(self.device, non_blocking=True)
        self._rows.index_copy_(0, ids, self._as_rows(values))

    def prefetch(self, ids: Tensor) -> None:
        pass

    def _settle(self) -> None:
        pass
