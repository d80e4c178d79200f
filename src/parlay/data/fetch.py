"""The published files, from where they are published to the data folder; and a check of what is there.

Under a name there is always a whole file whose checksum is right, whatever happens on the way. Archives are looked
through before anything of them is written.
"""

import hashlib
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from gzip import BadGzipFile
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from parlay.data.layouts import find
from parlay.data.sources import facts, load
from parlay.errors import InputError
from parlay.files import replace_whole

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that have come, and the bytes to come in all where that is known."""

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte after which a connection counts as lost


@dataclass(frozen=True)
class File:
    """A published file and its published checksum."""

    name: str
    md5: str


@dataclass(frozen=True)
class Published:
    """Where a data set is published. `folder` is where its files go; an archive brings that folder along itself."""

    base_url: str
    files: tuple[File, ...]
    folder: str
    archive: bool


_TORONTO = "https://www.cs.toronto.edu/~kriz/"

PUBLISHED = {
    "mnist": Published(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            File("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            File("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            File("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            File("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        folder="MNIST/raw",
        archive=False,
    ),
    "cifar10": Published(
        _TORONTO,
        (File("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
        folder="cifar-10-batches-py",
        archive=True,
    ),
    "cifar100": Published(
        _TORONTO,
        (File("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
        folder="cifar-100-python",
        archive=True,
    ),
}


def fetch(name: str, data_dir: Path, progress: Progress, base_url: str | None = None) -> None:
    """Bring the files of a data set into the data folder, unless they are all there. `base_url` names a mirror."""
    facts(name)  # refuses an unknown name
    data_dir = Path(data_dir)
    if name not in PUBLISHED or find(name, data_dir) is not None:
        return
    published = PUBLISHED[name]
    base = (base_url or published.base_url).rstrip("/") + "/"
    if urlsplit(base).scheme not in ("http", "https"):
        raise InputError(f"{base} is no web address: write one that begins with https:// or http://")
    for file in published.files:
        if published.archive:
            _fetch_archive(base, file, data_dir, published.folder, progress)
        else:
            _fetch_file(base, file, data_dir / published.folder / file.name, progress)


def check(name: str, data_dir: str | Path) -> str:
    """Read and validate all of a data set; say in one line what was found."""
    data = load(name, data_dir)
    classes = int((data.train.targets.bincount() > 0).sum())
    published, shape = facts(name), " x ".join(map(str, data.facts.shape))
    found = find(name, Path(data_dir)) if name in PUBLISHED else None
    line = (
        f"{name}: {len(data.train)} training and {len(data.test)} test images of {shape}, "
        f"{classes} classes, {f'in {found.folder}' if found else 'no files needed'}"
    )
    if (len(data.train), len(data.test)) != (published.train_size, published.test_size):
        line += f" (published: {published.train_size} and {published.test_size})"
    return line


def _fetch_file(base: str, file: File, final: Path, progress: Progress) -> None:
    if not (final.is_file() and _md5(final) == file.md5):
        _write(final, partial(_download, base, file, progress))


def _fetch_archive(base: str, file: File, data_dir: Path, folder: str, progress: Progress) -> None:
    archive = data_dir / file.name
    if archive.is_file() and _md5(archive) == file.md5:  # somebody without a network here has put it there
        unpack(archive, data_dir, folder)
        return
    _write(archive, partial(_download, base, file, progress))
    try:
        unpack(archive, data_dir, folder)
    finally:
        archive.unlink()


def _write(final: Path, write: Callable[[BinaryIO], object]) -> None:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(final, write)
    except BadGzipFile:  # is an OSError too, but says that the archive is broken
        raise
    except OSError as error:
        raise InputError(f"{final}: cannot be written ({error.strerror or error}): choose another --data-dir") from None


def _download(base: str, file: File, progress: Progress, out: BinaryIO) -> None:
    url = base + file.name
    md5 = hashlib.md5(usedforsecurity=False)  # the checksum that was published; it guards against accidents
    done = 0
    for piece, total in _pieces(url):
        md5.update(piece)
        out.write(piece)
        done += len(piece)
        progress(file.name, done, total)
    if md5.hexdigest() != file.md5:
        raise InputError(
            f"{url}: its md5 is {md5.hexdigest()}, not the published {file.md5}; nothing kept, fetch again"
        )


def _pieces(url: str) -> Iterator[tuple[bytes, int | None]]:
    """What comes from the address, and how much it will be in all. Errors in here are the network's, not the disk's."""
    done, total = 0, None
    try:
        with urlopen(url, timeout=TIMEOUT) as answer:
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            yield b"", total  # the progress is seen to begin
            while piece := answer.read(CHUNK):
                done += len(piece)
                yield piece, total
    except HTTPError as error:
        error.close()
        raise InputError(
            f"{url}: the server answers {error.code} {error.reason}; name a mirror of these files"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"{url}: the connection failed ({reason}); nothing kept, fetch again") from None
    if total is not None and done != total:
        raise InputError(f"{url}: the connection ended after {done} of {total} bytes; nothing kept, fetch again")


def unpack(archive: Path, into: Path, folder: str) -> None:
    """Write the files of an archive. All must be plain and belong under `into`/`folder`; else none is written."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = tar.getmembers()
            for member in members:
                _check_member(member, archive, folder)
            for member in members:
                content = tar.extractfile(member)  # None for a folder
                if content is not None:
                    with content:
                        _write(into / member.name, partial(shutil.copyfileobj, content))
    except (tarfile.TarError, EOFError, zlib.error, BadGzipFile) as error:
        raise InputError(f"{archive}: not a whole archive ({error}); fetch again") from None


def _check_member(member: tarfile.TarInfo, archive: Path, folder: str) -> None:
    parts = PurePosixPath(member.name).parts
    if not (member.isreg() or member.isdir()):
        raise InputError(f"{archive}: {member.name!r} is a link or a device; refused, nothing written")
    if parts[:1] != (folder,) or ".." in parts or "\\" in member.name:
        raise InputError(f"{archive}: {member.name!r} does not belong under {folder}/; refused, nothing written")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
