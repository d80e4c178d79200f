"""The store in a file that is mapped into memory, and the header by which the file is known again."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from parlay.errors import InputError
from parlay.stores.base import DTYPES, check_possible, store_bytes
from parlay.stores.host import HostMemory
from parlay.stores.placement import disk_free, size

FOLDER = "stores"  # of scratch files in a run's folder: it goes with the last of them
MAGIC = b"PARLAY store\n"
VERSION = 1
HEADER = 4096  # a page, so that the rows start aligned


@final
class FileStore(HostMemory):
    """A file mapped into memory, for states that fit nowhere else. Made by `create`, or found again by `open`.

    The file is a header of `HEADER` bytes and then the elements as they are in memory (bfloat16 as its bits). The
    header says what the file is: samples, shape, dtype, and a `tag` that names the run. The kernel writes pages back
    when it likes, so the file outlives the process but not a power cut; checkpoints are what lasts.
    """

    def __init__(self, path: Path, header: "_Header", device: torch.device, scratch: bool) -> None:
        super().__init__(_map(path, header), header.shape, device)
        self._path = path
        self._scratch = scratch

    @classmethod
    def create(
        cls,
        path: Path,
        samples: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        tag: str = "",
        scratch: bool = False,
    ) -> "FileStore":
        """A fresh store at `path`, in the place of an older store; any other file there is refused.

        A scratch file is removed by `close`, and so is a folder `stores` that it leaves empty.
        """
        header = _Header.of(samples, shape, dtype, tag)
        _make_file(path, header)
        return cls(path, header, device, scratch)

    @classmethod
    def open(
        cls, path: Path, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tag: str = ""
    ) -> "FileStore":
        """The store that is at `path`, refused when it is cut short or of another run, shape or dtype."""
        header = _Header.of(samples, shape, dtype, tag)
        _check_file(path, header)
        return cls(path, header, device, scratch=False)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._scratch:
                self._scratch = False  # closed again, it leaves alone what a later run has put there
                self._path.unlink(missing_ok=True)
                if self._path.parent.name == FOLDER:
                    with contextlib.suppress(OSError):  # not empty
                        self._path.parent.rmdir()


@dataclass(frozen=True)
class _Header:
    """What a store's file says of itself, as a line of JSON behind the magic bytes."""

    samples: int
    shape: tuple[int, ...]
    dtype: str
    tag: str
    version: int = VERSION

    @classmethod
    def of(cls, samples: int, shape: Sequence[int], dtype: torch.dtype, tag: str) -> "_Header":
        check_possible(samples, dtype)
        names = {value: name for name, value in DTYPES.items()}
        return cls(samples, tuple(shape), names[dtype], tag)

    @property
    def file_bytes(self) -> int:
        return HEADER + store_bytes(self.samples, [self.shape], DTYPES[self.dtype], multipliers=False)

    def encode(self) -> bytes:
        raw = MAGIC + json.dumps(vars(self)).encode() + b"\n"
        if len(raw) > HEADER:
            raise InputError(f"a tag of {len(self.tag)} characters does not fit into a store's header: write a shorter")
        return raw.ljust(HEADER, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> "_Header":
        """Raises ValueError (with its reason) when the bytes are not a header."""
        if not raw.startswith(MAGIC):
            raise ValueError("is not a store of Parlay")
        try:
            fields: dict[str, Any] = json.loads(raw[len(MAGIC) :].rstrip(b"\0"))
            return cls(**{**fields, "shape": tuple(fields["shape"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("has a damaged header") from error

    def difference(self, found: "_Header") -> str | None:
        """The first thing that is not as wanted, in words."""
        for name, wanted in vars(self).items():
            if getattr(found, name) != wanted:
                return f"has {name} {getattr(found, name)!r}, not {wanted!r}"
        return None


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER)


def _make_file(path: Path, header: _Header) -> None:
    raw = header.encode()
    if path.exists() and not (path.is_file() and _read_header(path).startswith(MAGIC)):
        raise InputError(f"{path} is not a store of Parlay and is left alone: write another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The old content is given up in any case, and the disk may not hold both.
    path.unlink(missing_ok=True)
    try:
        _allocate(path, raw, header.file_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise InputError(
            f"the store {path} needs {size(header.file_bytes)} and the disk has {size(disk_free(path))} free: "
            "make room, or write another folder, --store-dtype bfloat16 or --downsample 2"
        ) from error


def _allocate(path: Path, raw: bytes, total: int) -> None:
    """The whole file or none. A mapped file with holes dies of SIGBUS when the disk is full, this says ENOSPC."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, total)
            file.write(raw)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _check_file(path: Path, wanted: _Header) -> None:
    """Before mapping: a map in mode r+ silently extends a file that was cut short."""
    refusal = "start the states anew, or write the folder of the run that made it"
    if not path.is_file():
        raise InputError(f"there is no store {path}: {refusal}")
    try:
        difference = wanted.difference(_Header.decode(_read_header(path)))
    except ValueError as error:
        raise InputError(f"the store {path} {error}: {refusal}") from error
    if difference is None and path.stat().st_size != wanted.file_bytes:
        difference = f"has {path.stat().st_size:,} bytes, not {wanted.file_bytes:,}"
    if difference is not None:
        raise InputError(f"the store {path} {difference}: {refusal}")


def _map(path: Path, header: _Header) -> Tensor:
    dtype = DTYPES[header.dtype]
    # As integers of the same width: numpy has no bfloat16.
    bits = np.dtype(f"<i{dtype.itemsize}")
    content = np.memmap(path, bits, mode="r+", offset=HEADER, shape=(header.samples, math.prod(header.shape)))
    return torch.from_numpy(content).view(dtype)
