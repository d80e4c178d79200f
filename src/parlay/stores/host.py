"""The store in the host's memory, and what it shares with the one in a mapped file."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parlay.lanes import Lanes, lanes_of
from parlay.stores.base import Store, zeros
from parlay.stores.courier import Courier


class HostMemory(Store):
    """Rows in the host's address space, be it memory of its own or a mapped file.

    For a CUDA device a `Courier` carries the batches; for the CPU they are at hand.
    """

    def __init__(self, rows: Tensor, shape: Sequence[int], device: torch.device, lanes: Lanes | None = None) -> None:
        super().__init__(rows, shape, device)
        self.lanes = lanes or lanes_of(device)
        """Of the device, where it works in its own time."""
        self._courier = self._carrier = Courier([rows], self.lanes) if self.lanes.captures else None

    @property
    def rows(self) -> Tensor:
        """The content as a courier takes it: without waiting for what is on its way."""
        return self._rows

    def carried_by(self, courier: Courier | None) -> None:
        """From now on: it may be one for several stores. The one before ends first what it has begun."""
        if self._carrier is not courier:
            self._settle()
            self._carrier = courier

    def gather(self, ids: Tensor) -> Tensor:
        if self._courier is None:
            return self._as_samples(self._rows.index_select(0, ids))
        self.carried_by(self._courier)
        return self._as_samples(self._courier.fetch(ids).view(self.dtype).view(len(ids), -1))

    def scatter(self, ids: Tensor, values: Tensor) -> None:
        rows = self._as_rows(values)
        if self._courier is None:
            self._rows.index_copy_(0, ids, rows)
            return
        self.carried_by(self._courier)
        # A copy, because the caller may overwrite its values (a CUDA graph does) before they are on the host.
        self._courier.bring(ids, rows.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(-1))

    def prefetch(self, ids: Tensor) -> None:
        if self._courier is not None:
            self.carried_by(self._courier)
            self._courier.prepare(ids)

    def close(self) -> None:
        super().close()
        try:
            self._settle()
        finally:
            courier, self._courier, self._carrier = self._courier, None, None
            if courier:
                courier.close()

    def _settle(self) -> None:
        if self._carrier:
            self._carrier.settle()


@final
class HostStore(HostMemory):
    """The host's memory. Only the batches on their way are pinned, not the content.

    A batch is picked row by row into a pinned buffer anyway, and PyTorch rounds pinned memory up to a power of two:
    91.55 GiB of states would take 128.
    """

    def __init__(
        self,
        samples: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        lanes: Lanes | None = None,
    ) -> None:
        super().__init__(zeros(samples, shape, dtype, torch.device("cpu")), shape, device, lanes)
