"""Files that are whole or not there, reads that end, the lock on a run folder, and scratch folders."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, final

from parlay.errors import InputError

SHOWN = 300  # characters of a path in a message


def replace_whole(path: Path, write: Callable[[BinaryIO], object], needed: int = 0) -> None:
    """Let `write` fill a file so that at any moment the old or the new content is at `path`, whole.

    The file has the mode that the umask says. `needed` bytes are what the message about a full disk names.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")  # another process may write the same file
    try:
        with naming_a_full_disk(path, needed), new.open("wb") as file:
            write(file)
            sync(file)
        os.replace(new, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by this content."""
    raw = content.encode() if isinstance(content, str) else content
    replace_whole(path, lambda file: file.write(raw), len(raw))


def sync(file: BinaryIO) -> None:
    """Put the content on the disk, or its name may outlive it in a power cut."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk: only then a rename lasts."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def naming_a_full_disk(path: Path, needed: int) -> Iterator[None]:
    """An error of a full disk says which file it was, and the bytes that it needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(path.parent).free
        wanted = f"it needs {needed:,} bytes and " if needed else ""
        raise OSError(
            error.errno,
            f"{path} could not be written ({os.strerror(error.errno)}): {wanted}the disk has {free:,} free; "
            "what was saved before is untouched",
        ) from error


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; OSError for all else, so that no read waits or grows.

    A FIFO would wait for a writer that never comes, and a device has no end.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL character", str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(number, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    finally:
        os.close(number)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
    return content


def exists(path: Path) -> bool:
    """Is anything there? A path that no file can have is refused: the usual question answers it with an OSError."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds a NUL character"
        raise InputError(f"{shown(path)} is no usable path ({reason}): write another --out") from None
    return True


def shown(path: Path | str) -> str:
    """A path as one line of proper text, cut to a readable length: no line breaks, no bytes that are not UTF-8."""
    text = str(path).encode("utf-8", "replace").decode("utf-8")
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2]}...{line[-SHOWN // 2 :]}"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of this user alone, with a name that nobody can guess; it goes with the block."""
    folder = Path(tempfile.mkdtemp(prefix="parlay-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@final
class FolderLock:
    """One run at a time in a folder: `with FolderLock(out): ...`, or InputError naming the process that has it.

    The lock is the kernel's (flock on OUT/.lock) and ends with its process, however that ends: no stale lock, and no
    process number that means another process by now. The number in the file is for the message only. The file stays:
    removing it would let two runs lock two files of the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._file: int | None = None

    def __enter__(self) -> FolderLock:
        exists(self.path)  # refuses what can be no path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Not inherited by programs that this process starts, so the lock does not outlive it in one of them.
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            self._close()
            raise InputError(
                f"{self.path.parent} is in use by {self._owner()}: wait until it has ended, or write another --out"
            ) from None
        except OSError as error:
            self._close()
            raise InputError(
                f"{self.path.parent} cannot be written or locked ({error.strerror}): write another --out"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            # By word and not only by closing: a forked child may hold the same lock open.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._close()

    def _owner(self) -> str:
        number = read_bounded(self.path, 100).decode(errors="replace").strip()
        return f"process {number}" if number else "another process"

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
