"""Where the files of a published data set may lie under the data folder, and who reads them there."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from parlay.data.cifar import read_binary, read_python
from parlay.data.idx import read_mnist

Reader = Callable[[Sequence[Path], tuple[int, int, int], int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layout:
    """One published arrangement of files; `suffixes` are the forms in which each may be there."""

    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Reader
    suffixes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Found:
    """A layout whose files are all there."""

    folder: Path
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    read: Reader


def _cifar10(folder: str, suffix: str, read: Reader) -> Layout:
    train = tuple(f"data_batch_{i}{suffix}" for i in range(1, 6))
    return Layout((folder, "."), train, (f"test_batch{suffix}",), read)


LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "mnist": (
        Layout(
            ("MNIST/raw", "mnist", "."),
            ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
            read_mnist,
            suffixes=("", ".gz"),
        ),
    ),
    "cifar10": (
        _cifar10("cifar-10-batches-py", "", read_python),
        _cifar10("cifar-10-batches-bin", ".bin", read_binary),
    ),
    "cifar100": (
        Layout(("cifar-100-python", "."), ("train",), ("test",), read_python),
        Layout(("cifar-100-binary", "."), ("train.bin",), ("test.bin",), read_binary),
    ),
}


def find(name: str, data_dir: Path) -> Found | None:
    """The first layout of the data set that is complete under the data folder."""
    for layout in LAYOUTS[name]:
        for folder in layout.folders:
            train, test = (_present(layout, data_dir / folder, files) for files in (layout.train, layout.test))
            if len(train) == len(layout.train) and len(test) == len(layout.test):
                return Found(data_dir / folder, train, test, layout.read)
    return None


def first_missing(name: str, data_dir: Path) -> Path | None:
    """The first file missing from a layout of which a part is there, for a message that helps more than "not found"."""
    for layout in LAYOUTS[name]:
        files = layout.train + layout.test
        for folder in (data_dir / folder for folder in layout.folders):
            there = {path.name for path in _present(layout, folder, files)}
            missing = [file for file in files if there.isdisjoint(file + suffix for suffix in layout.suffixes)]
            if there and missing:
                return folder / missing[0]
    return None


def _present(layout: Layout, folder: Path, files: tuple[str, ...]) -> tuple[Path, ...]:
    """For each file the first form of it that is there, if any. A folder that may not be entered counts as empty."""
    forms = ([folder / (file + suffix) for suffix in layout.suffixes] for file in files)
    firsts = (next((path for path in paths if os.path.isfile(path)), None) for paths in forms)
    return tuple(path for path in firsts if path is not None)
