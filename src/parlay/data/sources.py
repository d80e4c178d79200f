"""The data sets by name: what is known of each without any file, and the files to tensors.

In goes a name and a data folder; out come uint8 images and int64 labels on the CPU, exactly as published. Whatever is
wrong with a file is said in one line that names it.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from parlay.config.datasets import DATASETS, FACTS, Facts
from parlay.config.datasets import synthetic as of_synthetic
from parlay.data.embedded import Synthetic, digits
from parlay.data.idx import LARGEST
from parlay.data.layouts import Found, find, first_missing
from parlay.data.split import Split, as_split
from parlay.errors import InputError

__all__ = ["NAMES", "DataSet", "Facts", "Split", "Synthetic", "as_split", "facts", "load"]

NAMES = DATASETS


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in memory: inputs uint8 (N, C, H, W) and targets int64 (N,), on the CPU."""

    name: str
    facts: Facts
    train: Split
    test: Split


def facts(name: str, synthetic: Synthetic = Synthetic()) -> Facts:  # noqa: B008 (frozen)
    """What is known of the data set with this name, without reading anything."""
    if name not in NAMES:
        raise InputError(f"unknown data set {name!r}: write one of {', '.join(NAMES)}")
    if name != "synthetic":
        return FACTS[name]
    return of_synthetic(synthetic.shape, synthetic.classes, synthetic.train_size, synthetic.test_size)


def load(
    name: str,
    data_dir: str | Path = "data",
    synthetic: Synthetic = Synthetic(),  # noqa: B008 (frozen)
) -> DataSet:
    """The data set with this name. Its facts hold the sizes that were found."""
    known = facts(name, synthetic)
    if name == "digits":
        train, test = digits()
    elif name == "synthetic":
        train, test = synthetic.make()
    else:
        train, test = _read(name, known, Path(data_dir))
    return DataSet(name, replace(known, train_size=len(train), test_size=len(test)), train, test)


def _read(name: str, known: Facts, data_dir: Path) -> tuple[Split, Split]:
    again = f"`parlay data fetch {name} --data-dir {data_dir}`"
    found = _found(name, data_dir, again)
    try:
        for path in (*found.train, *found.test):
            if (size := path.stat().st_size) > LARGEST:
                raise InputError(f"{path}: has {size:,} bytes, more than {LARGEST:,}")
        train, test = (Split(*found.read(files, known.shape, known.classes)) for files in (found.train, found.test))
    except OSError as error:
        raise InputError(f"{error.filename or found.folder}: cannot be read ({error.strerror or error})") from None
    except InputError as error:
        raise InputError(f"{error}; delete the file and get it again with {again}") from None
    return train, test


def _found(name: str, data_dir: Path, again: str) -> Found:
    found = find(name, data_dir)
    if found is not None:
        return found
    missing = first_missing(name, data_dir)
    if missing is not None:
        raise InputError(f"{missing} is missing beside the other files of {name}: get them with {again}")
    raise InputError(f"no files of {name} in the folder {data_dir}: get them with {again}")
