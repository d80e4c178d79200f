"""Files are checked before they are believed, and scratch files go when their store does."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parlay.errors import InputError
from parlay.stores import FileStore, make_store

CPU = torch.device("cpu")
SAMPLES, SHAPE = 20, (3, 2, 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "interface-1.store"
    made = FileStore.create(path, SAMPLES, SHAPE, torch.bfloat16, CPU, tag="run-1")
    made.load(torch.full((SAMPLES, *SHAPE), 1.5, dtype=torch.bfloat16))
    made.close()
    return path


def reopen(path: Path, **changes: object) -> FileStore:
    wanted: dict[str, object] = {"samples": SAMPLES, "shape": SHAPE, "dtype": torch.bfloat16, "tag": "run-1"}
    return FileStore.open(path, device=CPU, **(wanted | changes))  # type: ignore[arg-type]


def test_a_file_is_found_again_with_its_content(file: Path) -> None:
    assert torch.equal(reopen(file).tensor(), torch.full((SAMPLES, *SHAPE), 1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"samples": 21}, "has samples 20, not 21"),
        ({"shape": (3, 4)}, r"has shape \(3, 2, 2\), not \(3, 4\)"),
        ({"dtype": torch.float16}, "has dtype 'bfloat16', not 'float16'"),
        ({"tag": "run-2"}, "has tag 'run-1', not 'run-2'"),
    ],
)
def test_a_file_of_something_else_is_refused_by_its_header(
    file: Path, changes: dict[str, object], difference: str
) -> None:
    with pytest.raises(InputError, match=f"{file}.*{difference}"):
        reopen(file, **changes)


@pytest.mark.parametrize("size", [0, 10, 4095, 4096, 4096 + SAMPLES * 24 - 1, 4096 + SAMPLES * 24 + 1])
def test_a_file_cut_short_or_grown_is_refused_and_not_mended(file: Path, size: int) -> None:
    os.truncate(file, size)
    with pytest.raises(InputError, match=str(file)):
        reopen(file)
    assert file.stat().st_size == size


def test_a_header_with_a_flipped_byte_is_refused(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    for position in (0, 15, 30, 60):
        damaged = raw.copy()
        damaged[position] ^= 0x80
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=str(file)):
            reopen(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no store"):
        reopen(tmp_path / "nothing")


def test_a_store_is_replaced_by_a_fresh_one_of_any_shape(file: Path) -> None:
    made = make_store("file", 3, (2,), torch.float32, CPU, file)
    assert not made.tensor().any()
    assert file.stat().st_size == 4096 + 3 * 2 * 4
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_scratch_files_go_when_their_stores_are_closed_and_the_folder_with_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "stores"
    made = [make_store("file", 3, (2,), torch.float32, CPU, folder / name) for name in ("states-1", "multipliers-1")]
    content = made[0].tensor()
    made[0].close()
    assert [path.name for path in folder.iterdir()] == ["multipliers-1"]
    assert not content.any()  # a view that is still held stays readable
    made[1].close()
    assert list((tmp_path / "run").iterdir()) == []


def test_closing_leaves_other_files_and_folders_alone(tmp_path: Path) -> None:
    for folder in (tmp_path / "stores", tmp_path / "elsewhere"):
        made = make_store("file", 3, (2,), torch.float32, CPU, folder / "states-1")
        made.close()
        folder.mkdir(exist_ok=True)
        (folder / "states-1").write_text("of a later run")
        made.close()
        assert (folder / "states-1").read_text() == "of a later run"
    empty = make_store("file", 3, (2,), torch.float32, CPU, tmp_path / "mine" / "states-1")
    empty.close()
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_scratch_file_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    made = make_store("file", 3, (2,), torch.float32, CPU, tmp_path / "stores" / "states-1")
    shutil.rmtree(tmp_path / "stores")
    made.close()
    assert not (tmp_path / "stores").exists()


def test_a_file_that_was_found_again_stays_when_closed(file: Path) -> None:
    for _ in range(2):
        found = reopen(file)
        assert bool((found.tensor() == 1.5).all())
        found.close()


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(InputError, match="left alone"):
        make_store("file", 3, (2,), torch.float32, CPU, path)
    assert path.read_text() == "years of work"


def test_a_tag_that_does_not_fit_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shorter"):
        FileStore.create(tmp_path / "s", 3, (2,), torch.float32, CPU, tag="x" * 5000)


def test_a_full_disk_is_one_line_before_training_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = tmp_path / "runs" / "interface-1.store"
    with pytest.raises(InputError, match=f"{path} needs 28,096 bytes") as caught:
        make_store("file", 1000, SHAPE, torch.bfloat16, CPU, path)
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == []


FULL_TMPFS = """
import sys, torch
from pathlib import Path
from parlay.errors import InputError
from parlay.stores import make_store
folder = Path(sys.argv[1])
make = lambda samples: make_store("file", samples, (1024,), torch.float32, torch.device("cpu"), folder / "s")
try:
    make(1024)
except InputError as error:
    assert "4,198,400 bytes" in str(error), error
    assert list(folder.iterdir()) == [], "something was left behind"
    make(64).tensor().fill_(1)
    print("refused, then a smaller one fits")
"""


def test_a_disk_that_is_really_full_gives_the_line_and_no_sigbus(tmp_path: Path) -> None:
    namespace = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; shift; exec "$@"', "sh"]
    python = [sys.executable, "-c", FULL_TMPFS, str(tmp_path)]
    try:
        probe = subprocess.run([*namespace, str(tmp_path), "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if probe.returncode:
        pytest.skip("mount namespaces are not allowed here")
    run = subprocess.run([*namespace, str(tmp_path), *python], capture_output=True, text=True, check=False)
    assert run.stdout == "refused, then a smaller one fits\n", run.stderr
