"""Checkpoints are whole or not there, whatever is killed, full or flipped; one run at a time holds a folder."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parlay.errors import InputError
from parlay.files import FolderLock, write_whole
from parlay.run.checkpoints import newest, save


def parts_of(step: int) -> dict[str, dict[str, Tensor]]:
    return {"stage-0": {"weight": torch.full((3, 4), float(step))}, "interface-1": {"states": torch.arange(5) + step}}


def save_step(root: Path, step: int, **options: Any) -> Path:
    return save(root, step, parts_of(step), {"epoch": step // 10}, **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def silent(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


def assert_whole(root: Path, step: int) -> None:
    found = newest(root, silent)
    assert found is not None
    assert found.step == step
    assert found.part("stage-0")["weight"].flatten().tolist() == 12 * [step]
    assert found.part("interface-1")["states"].tolist() == [step + i for i in range(5)]


# --- what goes in comes out ---


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {
        "f32": base,
        "view": base[1:3],
        "same": base,
        "transposed": base.t(),
        "strided": base[:, ::2],
        "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "bf16": torch.randn(7).bfloat16(),
        "f16": torch.randn(3).half(),
        "f64": torch.randn(3, dtype=torch.float64),
        "count": torch.tensor(12345678901),
        "scalar bf16": torch.tensor(0.1, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "random state": torch.random.get_rng_state(),
        "empty": torch.zeros(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
        "expanded": torch.ones(1).expand(5),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "name with \N{GREEK SMALL LETTER LAMDA}": torch.ones(1),
    }
    save(tmp_path, 3, {"stage-0": tensors, "nothing": {}}, {})
    found = newest(tmp_path, silent)
    assert found is not None
    assert found.parts == ("stage-0", "nothing")
    assert found.part("nothing") == {}
    loaded = found.part("stage-0")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        assert loaded[name].dtype == tensor.dtype
        torch.testing.assert_close(loaded[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)


def test_a_part_larger_than_a_chunk_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.run.checkpoint.CHUNK", 100)
    states = torch.randn(33, 7)
    save(tmp_path, 1, {"interface-1": {"states": states}}, {})
    found = newest(tmp_path, silent)
    assert found is not None
    assert torch.equal(found.part("interface-1")["states"], states)


def test_a_part_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    path = save_step(tmp_path, 7)
    assert names(path) == ["interface-1.safetensors", "manifest.json", "stage-0.safetensors"]
    assert torch.equal(load_file(path / "stage-0.safetensors")["weight"], torch.full((3, 4), 7.0))


def test_the_meta_comes_back_as_json_says_it(tmp_path: Path) -> None:
    meta = {"epoch": 3, "cuts": (2, 4), "loss": 0.1 + 0.2, "worst": float("inf"), "by stage": {10: "a", 9: "b"}}
    save(tmp_path, 1, {}, meta)
    found = newest(tmp_path, silent)
    assert found is not None
    assert found.meta == {**meta, "cuts": [2, 4], "by stage": {"10": "a", "9": "b"}}


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path, silent) is None
    assert newest(tmp_path / "missing", silent) is None


def test_a_missing_part_is_named_with_those_that_exist(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    found = newest(tmp_path, silent)
    assert found is not None
    with pytest.raises(InputError, match=r"no part 'stage-7': write one of stage-0, interface-1"):
        found.part("stage-7")


@pytest.mark.parametrize("name", ["../stage", "", "a/b", ".hidden"])
def test_a_part_cannot_be_named_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no checkpoint part"):
        save(tmp_path, 1, {name: {}}, {})


def test_a_tensor_that_cannot_be_written_is_named_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"phase of part stage-0 is torch.complex64"):
        save(tmp_path, 1, {"stage-0": {"phase": torch.zeros(2, dtype=torch.complex64)}}, {})
    assert names(tmp_path) == []


# --- which ones remain ---


def test_the_newest_two_remain(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        assert save_step(tmp_path, step) == tmp_path / f"{step:010d}"
    assert names(tmp_path) == ["0000000015", "0000000020"]
    assert_whole(tmp_path, 20)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_step(tmp_path, 5)
    save(tmp_path, 10, {"stage-0": {"weight": torch.zeros(1)}}, {"first": True})
    save_step(tmp_path, 10)
    assert names(tmp_path) == ["0000000005", "0000000010"]
    assert_whole(tmp_path, 10)


def test_later_steps_that_the_run_went_back_behind_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep=3)
    save_step(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["0000000015"]


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "0000000001").write_text("a file")
    for step in (2, 3, 4):
        save_step(tmp_path, step)
    assert names(tmp_path) == ["0000000001", "0000000003", "0000000004", "12", "notes"]
    assert_whole(tmp_path, 4)


# --- damage ---


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change_the_meta(path: Path) -> None:
    path.write_text(path.read_text().replace('"epoch": 2', '"epoch": 3'))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("stage-0.safetensors", flip_a_byte, "stage-0.safetensors does not have the SHA-256"),
        ("interface-1.safetensors", cut_short, r"interface-1.safetensors has \d+ bytes, not \d+"),
        ("stage-0.safetensors", Path.unlink, "stage-0.safetensors is missing"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", cut_short, "manifest.json does not parse"),
        ("manifest.json", lambda path: path.write_text("[]"), "manifest.json does not parse"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff{}"), "manifest.json does not parse"),
        ("manifest.json", change_the_meta, "manifest.json does not have the SHA-256"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, file: str, damage: Any, reason: str
) -> None:
    before, damaged = save_step(tmp_path, 10), save_step(tmp_path, 20)
    damage(damaged / file)
    lines: list[str] = []
    found = newest(tmp_path, lines.append)
    assert found is not None
    assert found.path == before
    assert torch.equal(found.part("stage-0")["weight"], torch.full((3, 4), 10.0))
    assert len(lines) == 1
    with pytest.raises(AssertionError, match=f"{damaged} is damaged: {reason}.*; {before} is taken instead$"):
        silent(lines[0])


def test_a_flipped_bit_in_any_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"stage-0": {"w": torch.arange(3.0)}}, {"epoch": 1})
    lines: list[str] = []
    for file in path.iterdir():
        raw = file.read_bytes()
        for position in range(len(raw)):
            damaged = bytearray(raw)
            damaged[position] ^= 0x10
            file.write_bytes(damaged)
            assert newest(tmp_path, lines.append) is None, (file.name, position)
        file.write_bytes(raw)
    assert newest(tmp_path, silent) is not None


def test_when_all_are_damaged_each_is_named_and_none_is_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        flip_a_byte(save_step(tmp_path, step) / "stage-0.safetensors")
    lines: list[str] = []
    assert newest(tmp_path, lines.append) is None
    assert len(lines) == 2
    assert all("there is no whole one to take instead" in line for line in lines)


def test_after_damage_the_next_saves_work_and_the_damaged_one_goes(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    cut_short(save_step(tmp_path, 20) / "stage-0.safetensors")
    save_step(tmp_path, 15)
    assert names(tmp_path) == ["0000000010", "0000000015"]
    assert_whole(tmp_path, 15)


# --- kills ---

# Steps 10 and 20 are there; then step STEP is saved by a child that is killed at its n-th call of an `os` function
# that saving uses, for n = 1, 2, ... until the save gets through. Forks, so that importing is paid for once.
KILLED_SAVES = """
import os, shutil, signal, sys, torch
from pathlib import Path
from parlay.run.checkpoints import save

root, step = Path(sys.argv[1]), int(sys.argv[2])
parts = lambda step: {
    "stage-0": {"weight": torch.full((3, 4), float(step))}, "interface-1": {"states": torch.arange(5) + step}}

def count_down(name, left):
    real = getattr(os, name)
    def call(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    setattr(os, name, call)

for former in (10, 20):
    save(root / "former", former, parts(former), {})
for n in range(1, 1000):
    here = root / str(n)
    shutil.copytree(root / "former", here)
    child = os.fork()
    if child == 0:
        left = [n]
        for name in ("open", "mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "close"):
            count_down(name, left)
        save(here, step, parts(step), {"new": True})
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(n - 1)
        break
"""


def assert_the_others_are_whole_too(root: Path, found: Path) -> None:
    others = root.with_suffix(".others")
    shutil.copytree(root, others)
    shutil.rmtree(others / found.name)
    before = newest(others, silent)
    assert before is not None
    assert_whole(others, before.step)


@pytest.mark.parametrize("step", [20, 30])
def test_a_kill_at_each_point_of_a_save_leaves_the_old_or_the_new_one_whole(tmp_path: Path, step: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED_SAVES, str(tmp_path), str(step)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    points = int(run.stdout)
    assert points > 15
    outcomes = []
    for point in range(1, points + 1):
        root = tmp_path / str(point)
        found = newest(root, silent)
        assert found is not None
        assert found.step in (20, step)
        outcomes.append("new" if found.meta else "old")
        assert_whole(root, found.step)
        assert_the_others_are_whole_too(root, found.path)
        save_step(root, 40)
        assert names(root) == [f"{found.step:010d}", "0000000040"]
        assert_whole(root, 40)
    assert outcomes == sorted(outcomes, reverse=True)
    assert set(outcomes) == {"old", "new"}


ENDLESS_SAVES = """
import sys, torch
from pathlib import Path
from parlay.run.checkpoints import save
for step in range(10**9):
    save(Path(sys.argv[1]), step, {"stage-0": {"weight": torch.full((1000, 300), float(step))}}, {"step": step})
    print(step, flush=True)
"""


def test_a_real_kill_in_the_middle_of_saving_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS_SAVES, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        time.sleep(0.003)
        child.kill()
        reported = [2, *map(int, child.stdout.read().split())]
    found = newest(tmp_path, silent)
    assert found is not None
    assert found.step >= reported[-1]
    assert found.part("stage-0")["weight"].flatten().tolist() == 300_000 * [found.meta["step"]]
    save_step(tmp_path, found.step + 1)
    assert names(tmp_path) == [f"{step:010d}" for step in (found.step, found.step + 1)]


@pytest.mark.parametrize("failing", range(1, 8))
def test_an_error_at_any_sync_or_rename_leaves_no_trace_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    save_step(tmp_path, 10)
    save_step(tmp_path, 20)
    calls = 0

    def failing_at_times(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args)

        return call

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, failing_at_times(name))
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 20, parts_of(20), {"again": True})
    monkeypatch.undo()
    # Files and folder synced (4), the old one renamed away and the new one into its place (6), the names synced (7).
    assert names(tmp_path) == ["0000000010", "0000000020"]
    found = newest(tmp_path, silent)
    assert found is not None
    assert found.meta == ({"again": True} if failing == 7 else {"epoch": 2})
    assert_whole(tmp_path, 20)


# --- full disks ---


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


def test_a_disk_that_fills_up_while_writing_keeps_the_old_one_and_says_what_is_needed(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    parts = {"stage-0": {"weight": torch.zeros(100)}, "stage-1": {"weight": torch.zeros(100_000)}}
    with files_no_larger_than(50_000), pytest.raises(OSError, match="needs 400,400 bytes") as caught:
        save(tmp_path, 20, parts, {})
    assert str(tmp_path / "0000000020") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["0000000010"]
    assert_whole(tmp_path, 10)
    save(tmp_path, 20, parts, {})
    assert names(tmp_path) == ["0000000010", "0000000020"]


def test_no_space_left_is_reported_as_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 10)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_step(tmp_path, 20)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert names(tmp_path) == ["0000000010"]
    assert_whole(tmp_path, 10)


# --- single files ---


@pytest.mark.parametrize("text", ["κ ← κ − 2b (λ − x)\n", b"\x00\xff"])
def test_an_atomic_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_whole(path, text)
    assert path.read_bytes() == (text.encode() if isinstance(text, str) else text)
    assert names(tmp_path) == ["summary.json"]


def test_an_atomic_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with files_no_larger_than(10), pytest.raises(OSError, match="needs 1,000 bytes"):
        write_whole(path, "x" * 1000)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["summary.json"]


# --- the lock ---

HOLD_THE_LOCK = """
import sys, time
from pathlib import Path
from parlay.files import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@contextmanager
def another_run(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(folder)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "locked\n"
            yield child
        finally:
            child.kill()


def test_a_second_run_is_refused_with_the_firsts_process_and_a_killed_ones_lock_is_free(tmp_path: Path) -> None:
    with another_run(tmp_path) as first:
        with pytest.raises(InputError, match=f"{tmp_path} is in use by process {first.pid}: "), FolderLock(tmp_path):
            pass
        first.kill()
        first.wait()
        with FolderLock(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_is_free_again_after_its_block_even_after_an_error(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "new" / "folder")
    with pytest.raises(KeyError), lock:
        raise KeyError
    with lock, pytest.raises(InputError, match="in use"), FolderLock(tmp_path / "new" / "folder"):
        pass


def test_a_lock_file_left_by_hand_does_not_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1\n")
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())


def test_a_file_in_the_place_of_the_folder_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with (
        pytest.raises(InputError, match=r"out cannot be written or locked .*: write another --out"),
        FolderLock(tmp_path / "out"),
    ):
        pass


def test_manifests_hold_plain_json_and_the_digests_of_all_parts(tmp_path: Path) -> None:
    path = save_step(tmp_path, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 20
    assert manifest["meta"] == {"epoch": 2}
    assert {name: entry["bytes"] for name, entry in manifest["parts"].items()} == {
        name: (path / f"{name}.safetensors").stat().st_size for name in ("stage-0", "interface-1")
    }


def test_a_copied_checkpoint_is_still_whole(tmp_path: Path) -> None:
    save_step(tmp_path / "a", 20)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert_whole(tmp_path / "b", 20)
