"""MNIST: IDX files, plain or compressed, to tensors."""

import gzip
import struct
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from parlay.errors import InputError

UNSIGNED_BYTE = 0x08
CHUNK = 1 << 20
LARGEST = 1 << 28  # bytes of a file, or of what is in it; the largest published one has 155 MB


def read_mnist(paths: Sequence[Path], shape: tuple[int, int, int], classes: int) -> tuple[Tensor, Tensor]:
    """The images and labels of a file of each: uint8 (N, 1, 28, 28) and int64 (N,)."""
    images_at, labels_at = paths
    images, labels = read_idx(images_at, 3), read_idx(labels_at, 1)
    if len(images) != len(labels):
        raise InputError(f"{images_at}: {len(images)} images, but {len(labels)} labels in {labels_at.name}")
    if images.shape[1:] != shape[1:]:
        raise InputError(f"{images_at}: images of {images.shape[1]} x {images.shape[2]}, not {shape[1]} x {shape[2]}")
    if int(labels.max()) >= classes:
        raise InputError(f"{labels_at}: label {int(labels.max())} is out of range 0..{classes - 1}")
    return images.unsqueeze(1), labels.long()


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 tensor of an IDX file that must have so many dimensions and at least one sample."""
    with _opened(path) as file:
        try:
            shape = _header(file, path, dimensions)
            content = _up_to(file, prod(shape) + 1)  # one more, to see that nothing is left over
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: not a whole gzip file ({error})") from None
    if len(content) != prod(shape):
        wrong = "bytes left over" if len(content) > prod(shape) else f"cut short, {len(content)} bytes"
        raise InputError(f"{path}: {wrong} where its header says {prod(shape)} bytes ({_times(shape)})")
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _header(file: BinaryIO, path: Path, dimensions: int) -> tuple[int, ...]:
    size = 4 + 4 * dimensions
    head = file.read(size)
    if head[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)):
        raise InputError(f"{path}: not an IDX file of bytes in {dimensions} dimensions (it begins {head[:4].hex(' ')})")
    if len(head) != size:
        raise InputError(f"{path}: cut short in its header")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    if prod(shape) == 0:
        raise InputError(f"{path}: holds no samples ({_times(shape)})")
    if prod(shape) > LARGEST:  # a compressed file of a few bytes may hold as much
        raise InputError(f"{path}: its header says {prod(shape):,} bytes ({_times(shape)}), more than {LARGEST:,}")
    return shape


def _up_to(file: BinaryIO, size: int) -> bytearray:
    """At most `size` bytes, in pieces: a forged header cannot make us allocate more than there is in the file."""
    content = bytearray()
    while len(content) < size and (piece := file.read(min(CHUNK, size - len(content)))):
        content += piece
    return content


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
