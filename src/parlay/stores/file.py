"""The store in a file that is mapped into memory."""

import contextlib
import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from parlay.errors import InputError
from parlay.lanes import Lanes
from parlay.stores.base import check_possible, store_bytes
from parlay.stores.host import HostMemory
from parlay.stores.placement import disk_free, size

FOLDER = "stores"  # of scratch files in a run's folder: it goes with the last of them
MAGIC = b"PARLAY store\n"
HEADER = 4096  # a page, so that the rows start aligned


@final
class FileStore(HostMemory):
    """A file mapped into memory, for states that fit nowhere else: scratch space, which `close` removes.

    It is a header of `HEADER` bytes, which says whose the file is, and then the elements as they are in memory
    (bfloat16 as its bits). The kernel writes pages back when it likes; checkpoints are what lasts.
    """

    def __init__(
        self,
        path: Path,
        samples: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        lanes: Lanes | None = None,
    ) -> None:
        """In the place of an older store; any other file there is refused."""
        check_possible(samples, dtype)
        _make_file(path, store_bytes(samples, [tuple(shape)], dtype, multipliers=False))
        super().__init__(_map(path, samples, math.prod(shape), dtype), shape, device, lanes)
        self._path = path
        self._open = True

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._open:
                self._open = False  # closed again, it leaves alone what a later run has put there
                self._path.unlink(missing_ok=True)
                if self._path.parent.name == FOLDER:
                    with contextlib.suppress(OSError):  # not empty
                        self._path.parent.rmdir()


def _make_file(path: Path, rows: int) -> None:
    if path.exists() and not (path.is_file() and _is_store(path)):
        raise InputError(f"{path} is not a store of Parlay and is left alone: write another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The old content is given up in any case, and the disk may not hold both.
    path.unlink(missing_ok=True)
    try:
        _allocate(path, HEADER + rows)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise InputError(
            f"the store {path} needs {size(HEADER + rows)} and the disk has {size(disk_free(path))} free: "
            "make room, or write another folder, --store-dtype bfloat16 or --downsample 2"
        ) from error


def _is_store(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _allocate(path: Path, total: int) -> None:
    """The whole file or none. A mapped file with holes dies of SIGBUS when the disk is full, this says ENOSPC."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, total)
            file.write(MAGIC)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _map(path: Path, samples: int, elements: int, dtype: torch.dtype) -> Tensor:
    # As integers of the same width: numpy has no bfloat16.
    bits = np.dtype(f"<i{dtype.itemsize}")
    content = np.memmap(path, bits, mode="r+", offset=HEADER, shape=(samples, elements))
    return torch.from_numpy(content).view(dtype)
