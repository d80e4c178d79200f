"""The store in the host's memory, and what it shares with the one in a mapped file."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parlay.stores.base import Store, zeros
from parlay.stores.courier import Courier


class HostMemory(Store):
    """Rows in the host's address space, be it memory of its own or a mapped file.

    For a CUDA device a `Courier` carries the batches; for the CPU they are at hand.
    """

    def __init__(self, rows: Tensor, shape: Sequence[int], device: torch.device) -> None:
        super().__init__(rows, shape, device)
        self._courier = Courier(rows, device) if device.type == "cuda" else None

    def gather(self, ids: Tensor) -> Tensor:
        rows = self._courier.fetch(ids) if self._courier else self._rows.index_select(0, ids)
        return self._as_samples(rows)

    def scatter(self, ids: Tensor, values: Tensor) -> None:
        rows = self._as_rows(values)
        if self._courier:
            # A copy, because the caller may overwrite its values (a CUDA graph does) before they are on the host.
            self._courier.bring(ids, rows.clone())
        else:
            self._rows.index_copy_(0, ids, rows)

    def prefetch(self, ids: Tensor) -> None:
        if self._courier:
            self._courier.prepare(ids)

    def close(self) -> None:
        super().close()
        courier, self._courier = self._courier, None
        if courier:
            courier.close()

    def _settle(self) -> None:
        if self._courier:
            self._courier.settle()


@final
class HostStore(HostMemory):
    """The host's memory. Only the batches on their way are pinned, not the content.

    A batch is picked row by row into a pinned buffer anyway, and PyTorch rounds pinned memory up to a power of two:
    91.55 GiB of states would take 128.
    """

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(zeros(samples, shape, dtype, torch.device("cpu")), shape, device)
