"""Where the states and multipliers live: one tensor per training sample at one interface.

A store takes and gives batches by sample id: `gather(ids)` before a step, `scatter(ids, values)` after it. It holds the
small tensors that the filter makes, in the data type they are stored in; what they mean is the method's affair.
There are three kinds: on the device, in the host's memory, and in a file mapped into memory. `place` chooses the first
that fits, or says in one line what is missing; `make_store` makes it. All of them start filled with zeros.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from parlay.errors import InputError
from parlay.lanes import Lanes
from parlay.stores.base import DTYPES, Store, store_bytes
from parlay.stores.device import DeviceStore
from parlay.stores.file import FileStore
from parlay.stores.host import HostStore
from parlay.stores.placement import KINDS, Free, free_space, place

__all__ = [
    "DTYPES",
    "KINDS",
    "DeviceStore",
    "FileStore",
    "Free",
    "HostStore",
    "Store",
    "free_space",
    "make_store",
    "place",
    "store_bytes",
]


def make_store(
    kind: str,
    samples: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    path: Path,
    lanes: Lanes | None = None,
) -> Store:
    """A fresh store of one of `KINDS`. Only a file store uses `path`, as scratch space: `close` removes the file."""
    if kind == "device":
        return DeviceStore(samples, shape, dtype, device)
    if kind == "host":
        return HostStore(samples, shape, dtype, device, lanes)
    if kind == "file":
        return FileStore(path, samples, shape, dtype, device, lanes)
    raise InputError(f"no store on {kind!r}: write one of {', '.join(KINDS)}")
