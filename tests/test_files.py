"""Files are written whole or not at all, reads end, and one run at a time holds a folder."""

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from parlay.errors import InputError
from parlay.files import FolderLock, exists, read_bounded, scratch_folder, shown, write_whole


@contextmanager
def files_no_larger_than(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
@pytest.mark.parametrize("content", ["κ ← κ − 2b (λ − x)\n", b"\x00\xff"])
def test_a_file_is_replaced_with_the_mode_of_the_umask_and_nothing_is_left_beside_it(
    tmp_path: Path, content: str | bytes, mask: int, mode: int
) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    before = os.umask(mask)
    try:
        write_whole(path, content)
    finally:
        os.umask(before)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_write_that_fails_leaves_the_old_content_and_says_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with files_no_larger_than(10), pytest.raises(OSError, match="needs 1,000 bytes and the disk has"):
        write_whole(path, "x" * 1000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda path: path.write_bytes(bytes(11)), "it has more than 10 bytes"),
        (lambda _: None, "No such file"),
    ],
)
def test_what_is_no_small_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], Any], told: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=told):
        read_bounded(tmp_path / "file", 10)


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    assert read_bounded(tmp_path / "file", 10) == bytes(10)
    with pytest.raises(OSError, match="NUL"):
        read_bounded(Path("a\0b"), 10)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, f"/tmp/{'x' * 300}"])
def test_a_path_that_no_file_can_have_is_refused_in_a_short_line(path: str) -> None:
    with pytest.raises(InputError, match=r"is no usable path .*: write another --out") as refused:
        exists(Path(path))
    assert len(str(refused.value)) < 500
    assert "\0" not in str(refused.value)
    with pytest.raises(InputError, match="no usable path"), FolderLock(Path(path)):
        pass


def test_a_path_is_shown_in_one_line_of_proper_text() -> None:
    assert shown("a\nb\udcff") == "a\N{REPLACEMENT CHARACTER}b?"


def test_a_scratch_folder_is_for_its_owner_alone_and_goes_with_its_block() -> None:
    with scratch_folder() as folder:
        (folder / "file").write_text("content")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


HOLD_THE_LOCK = """
import sys, time
from pathlib import Path
from parlay.files import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_with_the_firsts_process_and_a_killed_ones_lock_is_free(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"{tmp_path} is in use by process {first.pid}: "), FolderLock(tmp_path):
            pass
        first.kill()
        first.wait()
    assert (tmp_path / ".lock").read_text() == f"{first.pid}\n"  # left by the killed one, and no lock
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_is_free_again_after_its_block_even_after_an_error(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "new" / "folder")
    with pytest.raises(KeyError), lock:
        raise KeyError
    with lock, pytest.raises(InputError, match="in use"), FolderLock(tmp_path / "new" / "folder"):
        pass


@pytest.mark.parametrize("in_the_way", ["a folder's place", "the lock's place"])
def test_what_stands_in_the_way_of_a_lock_is_refused_in_a_line(tmp_path: Path, in_the_way: str) -> None:
    out = tmp_path / "out"
    if in_the_way == "a folder's place":
        out.write_text("a file")
    else:
        out.mkdir()
        os.mkfifo(out / ".lock")
    with pytest.raises(InputError, match=r"out cannot be written or locked .*: write another --out"), FolderLock(out):
        pass
