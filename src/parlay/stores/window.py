"""One batch of every store at fixed places on the device: what a recorded step reads and writes.

A recorded step cannot wait for the host, so it works on the windows alone. Before it `bring` copies the batch in, after
it `carry` hands the new values to the stores, which take them to the host behind the step's back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parlay.stores.base import Store
from parlay.stores.courier import Courier, parcel_bytes, parts
from parlay.stores.host import HostMemory


@final
class Window(Store):
    """Holds one batch of `store`: `rows` as they were brought, `new` as they will be carried away."""

    def __init__(self, store: Store, rows: Tensor, new: Tensor) -> None:
        super().__init__(rows, store.shape, store.device)
        self.store = store
        self._new = new

    def gather(self, ids: Tensor) -> Tensor:  # noqa: ARG002
        return self._as_samples(self._rows)

    def scatter(self, ids: Tensor, values: Tensor) -> None:  # noqa: ARG002
        self._new.copy_(self._as_rows(values))

    def prefetch(self, ids: Tensor) -> None:
        pass

    def new(self) -> Tensor:
        return self._as_samples(self._new)

    def _settle(self) -> None:
        pass


@final
class Windows:
    """Those of all stores of an engine. Their content belongs to the ids of the last `bring`.

    They lie in one piece on the device. For a GPU one courier carries the batches of all stores as one parcel.
    """

    def __init__(self, stores: Sequence[HostMemory], batch: int) -> None:
        device, contents = stores[0].device, [store.rows for store in stores]
        self._stores = list(stores)
        self._batch = batch
        lanes = stores[0].lanes
        with lanes.main:
            self._brought = torch.zeros(parcel_bytes(contents, batch), dtype=torch.uint8, device=device)
            self._new = self._brought.clone()
        self._courier = Courier(contents, lanes) if lanes.captures else None
        pairs = zip(parts(self._brought, contents, batch), parts(self._new, contents, batch), strict=True)
        self._windows = [Window(store, *pair) for store, pair in zip(stores, pairs, strict=True)]

    def of(self, store: Store) -> Window:
        return next(window for window in self._windows if window.store is store)

    def bring(self, ids: Tensor) -> None:
        if self._courier is not None:
            self._take_over()
            self._brought.copy_(self._courier.fetch(ids))
            return
        for window in self._windows:
            window.tensor().copy_(window.store.gather(ids))

    def prefetch(self, ids: Tensor) -> None:
        """A last incomplete batch does not go through windows."""
        if self._courier is not None and len(ids) == self._batch:
            self._courier.prepare(ids)

    def carry(self, ids: Tensor) -> None:
        """They are copied before the next step can write over them."""
        if self._courier is not None:
            self._take_over()
            self._courier.bring(ids, self._new.clone())
            return
        for window in self._windows:
            window.store.scatter(ids, window.new())

    def close(self) -> None:
        courier, self._courier = self._courier, None
        if courier is not None:
            courier.close()

    def _take_over(self) -> None:
        for store in self._stores:
            store.carried_by(self._courier)
