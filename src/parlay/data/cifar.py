"""CIFAR-10 and CIFAR-100, from the published Python pickles or the published binary files, to tensors.

Both hold an image as a row of 3072 bytes: the planes red, green and blue, 32 x 32 each.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parlay.data.pickles import read_pickle
from parlay.errors import InputError

COARSE_CLASSES = 20  # of CIFAR-100; its binary records have the coarse label before the fine one

Array = np.ndarray[Any, Any]


def read_python(paths: Sequence[Path], shape: tuple[int, int, int], classes: int) -> tuple[Tensor, Tensor]:
    """The samples of the pickles, one file after the other."""
    key = "labels" if classes == 10 else "fine_labels"
    return _joined([_python_file(path, key, prod(shape), classes) for path in paths], shape)


def read_binary(paths: Sequence[Path], shape: tuple[int, int, int], classes: int) -> tuple[Tensor, Tensor]:
    """The samples of the binary files, one file after the other."""
    return _joined([_binary_file(path, prod(shape), classes) for path in paths], shape)


def _python_file(path: Path, key: str, row: int, classes: int) -> tuple[Array, Array]:
    content = read_pickle(path)
    for wanted in ("data", key):
        if wanted not in content:
            found = ", ".join(repr(key)[:30] for key in sorted(content)[:8]) or "nothing"
            raise InputError(f"{path}: has no {wanted!r} (it has {found})")
    rows, labels = content["data"], _integers(content[key], path, key)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != row:
        raise InputError(f"{path}: 'data' is not an array of bytes with rows of {row}")
    if len(rows) != len(labels):
        raise InputError(f"{path}: {len(rows)} images but {len(labels)} labels")
    if len(rows) == 0:
        raise InputError(f"{path}: holds no samples")
    _check_range(labels, classes, path)
    return rows, labels


def _integers(labels: object, path: Path, key: str) -> Array:
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        return labels
    # bool is an int in Python, but no label; numbers beyond 64 bits would not fit the array
    if isinstance(labels, list) and all(type(label) is int and abs(label) < 2**63 for label in labels):
        return np.array(labels, dtype=np.int64)
    raise InputError(f"{path}: {key!r} is not a list of whole numbers")


def _binary_file(path: Path, row: int, classes: int) -> tuple[Array, Array]:
    label_bytes = 1 if classes == 10 else 2
    content = np.fromfile(path, dtype=np.uint8)
    record = label_bytes + row
    if len(content) == 0 or len(content) % record:
        raise InputError(
            f"{path}: {len(content)} bytes are no whole number of records of {record}: cut short, or no CIFAR"
        )
    records = content.reshape(-1, record)
    if label_bytes == 2:
        _check_range(records[:, 0], COARSE_CLASSES, path)
    labels = records[:, label_bytes - 1]
    _check_range(labels, classes, path)
    return records[:, label_bytes:], labels


def _check_range(labels: Array, classes: int, path: Path) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        i = int(wrong[0])
        raise InputError(f"{path}: label {int(labels[i])} of sample {i} is out of range 0..{classes - 1}")


def _joined(parts: list[tuple[Array, Array]], shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    rows = np.concatenate([rows for rows, _ in parts])  # a copy, so the tensor owns memory that it may write
    labels = np.concatenate([labels.astype(np.int64) for _, labels in parts])
    return torch.from_numpy(rows).view(-1, *shape), torch.from_numpy(labels)
