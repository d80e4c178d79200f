"""Writes small data sets as they are published, for the tests of the readers."""

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

RNG = np.random.default_rng(0)
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def images(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(values: np.ndarray) -> bytes:
    values = np.asarray(values, dtype=np.uint8)
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_mnist(folder: Path, n: int = 6, compressed: bool = False) -> dict[str, np.ndarray]:
    """The four files; n samples to train on and 4 to test on."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "train-images-idx3-ubyte": images(n, 28, 28),
        "train-labels-idx1-ubyte": np.arange(n) % 10,
        "t10k-images-idx3-ubyte": images(4, 28, 28),
        "t10k-labels-idx1-ubyte": np.arange(4),
    }
    for name, values in content.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return content


class Python2Pickler(pickle._Pickler):
    """Pickles as the published sets were: strings of Python 2, and numpy's module under its old name."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, content: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(content)

    dispatch[bytes] = save_bytes

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch[type(pickle.dumps)] = save_global
    dispatch[type(write_mnist)] = save_global
    dispatch[type] = save_global


def dump_python2(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)


def write_cifar10_python(folder: Path, n: int = 3) -> tuple[np.ndarray, list[int]]:
    """Five batches of n and a test batch of n; returns rows and labels of the training set in its order."""
    rows, labels = images(6 * n, 3072), [i % 10 for i in range(6 * n)]
    for i, name in enumerate((*BATCHES, "test_batch")):
        part = slice(i * n, (i + 1) * n)
        dump_python2(folder / name, {b"batch_label": b"some", b"labels": labels[part], b"data": rows[part]})
    return rows[: 5 * n], labels[: 5 * n]


def write_cifar10_binary(folder: Path, n: int = 3) -> tuple[np.ndarray, list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    rows, labels = images(6 * n, 3072), [i % 10 for i in range(6 * n)]
    records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], rows], axis=1)
    for i, name in enumerate((*BATCHES, "test_batch")):
        (folder / f"{name}.bin").write_bytes(records[i * n : (i + 1) * n].tobytes())
    return rows[: 5 * n], labels[: 5 * n]


def write_cifar100_python(folder: Path, n: int = 7) -> tuple[np.ndarray, list[int]]:
    rows, labels = images(n, 3072), [(i * 37) % 100 for i in range(n)]
    for name in ("train", "test"):
        dump_python2(
            folder / name, {b"data": rows, b"fine_labels": labels, b"coarse_labels": [i % 20 for i in range(n)]}
        )
    return rows, labels


def write_cifar100_binary(folder: Path, n: int = 7) -> tuple[np.ndarray, list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    rows, labels = images(n, 3072), [(i * 37) % 100 for i in range(n)]
    heads = np.array([[i % 20, label] for i, label in enumerate(labels)], dtype=np.uint8)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(np.concatenate([heads, rows], axis=1).tobytes())
    return rows, labels
