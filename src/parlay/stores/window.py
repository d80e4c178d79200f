"""One batch of a store at a fixed place on the device: what a recorded step reads and writes.

A recorded step cannot wait for the host, so it works on the window alone. Before it `bring` copies the batch in, after
it `carry` hands the new values to the store, which takes them to the host behind the step's back.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from parlay.stores.base import Store


@final
class Window(Store):
    """Holds one batch of `store`. Its content belongs to the ids of the last `bring`."""

    def __init__(self, store: Store, batch: int) -> None:
        rows = torch.zeros(batch, math.prod(store.shape), dtype=store.dtype, device=store.device)
        super().__init__(rows, store.shape, store.device)
        self.store = store
        self._new = rows.clone()

    def bring(self, ids: Tensor) -> None:
        self.tensor().copy_(self.store.gather(ids))

    def carry(self, ids: Tensor) -> None:
        """The store copies them before the next step can write over them."""
        self.store.scatter(ids, self._as_samples(self._new))

    def gather(self, ids: Tensor) -> Tensor:  # noqa: ARG002
        return self._as_samples(self._rows)

    def scatter(self, ids: Tensor, values: Tensor) -> None:  # noqa: ARG002
        self._new.copy_(self._as_rows(values))

    def prefetch(self, ids: Tensor) -> None:
        self.store.prefetch(ids)

    def _settle(self) -> None:
        pass
