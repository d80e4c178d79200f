"""Checkpoints are whole or not there, whatever is killed, full, flipped or made up."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parlay.engine.world import World
from parlay.errors import InputError
from parlay.run.checkpoint import Checkpoint, _digest_of, write_part
from parlay.run.checkpoints import newest, save
from test_files import files_no_larger_than

T = TypeVar("T")


def parts_of(step: int) -> dict[str, dict[str, Tensor]]:
    return {"stage-0": {"weight": torch.full((3, 4), float(step))}, "interface-1": {"states": torch.arange(5) + step}}


def save_step(root: Path, step: int) -> Path:
    return save(root, step, parts_of(step), {"epoch": step // 10})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def whole(root: Path) -> Checkpoint:
    found = newest(root, pytest.fail)
    assert found is not None
    return found


def assert_whole(root: Path, step: int) -> None:
    found = whole(root)
    assert found.step == step
    assert found["stage-0"]["weight"].flatten().tolist() == 12 * [step]
    assert found["interface-1"]["states"].tolist() == [step + i for i in range(5)]


# --- what goes in comes out ---


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.run.checkpoint.CHUNK", 40)  # some are larger
    base = torch.randn(4, 6)
    tensors = {
        "view": base[1:3],
        "same": base,
        "transposed": base.t(),
        "strided": base[:, ::2],
        "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "bf16": torch.randn(7).bfloat16(),
        "f64": torch.randn(3, dtype=torch.float64),
        "count": torch.tensor(12345678901),
        "flags": torch.tensor([True, False, True]),
        "random state": torch.random.get_rng_state(),
        "empty": torch.zeros(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
        "expanded": torch.ones(1).expand(5),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "name with \N{GREEK SMALL LETTER LAMDA}": torch.ones(1),
    }
    save(tmp_path, 3, {"stage-0": tensors, "nothing": {}}, {})
    found = whole(tmp_path)
    assert list(found) == ["stage-0", "nothing"]
    assert found["nothing"] == {}
    loaded = found["stage-0"]
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].shape, loaded[name].dtype) == (tensor.shape, tensor.dtype)
        torch.testing.assert_close(loaded[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)


def test_parts_are_plain_safetensors_files_and_the_manifest_is_json(tmp_path: Path) -> None:
    meta = {"epoch": 3, "cuts": (2, 4), "loss": 0.1 + 0.2, "worst": float("inf"), "by stage": {10: "a", 9: "b"}}
    path = save(tmp_path, 7, parts_of(7), meta)
    assert names(path) == ["interface-1.safetensors", "manifest.json", "stage-0.safetensors"]
    assert torch.equal(load_file(path / "stage-0.safetensors")["weight"], torch.full((3, 4), 7.0))
    assert json.loads((path / "manifest.json").read_text())["step"] == 7
    assert whole(tmp_path).meta == {**meta, "cuts": [2, 4], "by stage": {"10": "a", "9": "b"}}


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path, pytest.fail) is None
    assert newest(tmp_path / "missing", pytest.fail) is None


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"../stage": {}}, "no checkpoint part"),
        ({"": {}}, "no checkpoint part"),
        ({"stage-0": {"phase": torch.zeros(2, dtype=torch.complex64)}}, "phase of part stage-0 is torch.complex64"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, parts: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        save(tmp_path, 1, parts, {})
    assert names(tmp_path) == []


# --- by several processes ---


class Two(World):
    """This process and another one, which writes its part with `write`, or fails."""

    size = 2

    def __init__(self, write: Callable[[], Any]) -> None:
        super().__init__(2)
        self.write = write

    def gather(self, work: Callable[[], T]) -> list[T]:
        return [work(), self.write()]


def test_parts_written_by_several_are_a_checkpoint_once_all_stand(tmp_path: Path) -> None:
    save_step(tmp_path, 1)

    def write() -> Any:
        assert whole(tmp_path).step == 1
        return {"stage-1": write_part(tmp_path / ".new-0000000002", "stage-1", {"w": torch.ones(2)})}

    save(tmp_path, 2, {"stage-0": {"w": torch.zeros(2)}}, {}, world=Two(write))
    found = whole(tmp_path)
    assert {name: found[name]["w"].tolist() for name in found} == {"stage-0": [0, 0], "stage-1": [1, 1]}
    (found.path / "stage-1.safetensors").unlink()
    assert found["stage-0"]["w"].tolist() == [0, 0]  # only the parts that are asked for are read


def test_a_save_of_which_one_writer_fails_leaves_nothing(tmp_path: Path) -> None:
    def write() -> Any:
        raise OSError(errno.EIO, "lost")

    with pytest.raises(OSError, match="lost"):
        save(tmp_path, 1, parts_of(1), {}, world=Two(write))
    assert names(tmp_path) == []


# --- which ones remain ---


def test_the_newest_two_remain_and_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "0000000001").write_text("a file")
    for step in (5, 10, 15, 20):
        assert save_step(tmp_path, step) == tmp_path / f"{step:010d}"
    assert names(tmp_path) == ["0000000001", "0000000015", "0000000020", "12", "notes"]
    assert_whole(tmp_path, 20)


def test_saving_a_step_again_replaces_it_and_later_steps_go(tmp_path: Path) -> None:
    for step in (10, 30):
        save_step(tmp_path, step)
    save(tmp_path, 20, {"stage-0": {"weight": torch.zeros(1)}}, {"first": True})
    save_step(tmp_path, 20)
    assert names(tmp_path) == ["0000000010", "0000000020"]
    assert_whole(tmp_path, 20)


# --- damage ---


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def forged(**changes: Any) -> Callable[[Path], object]:
    """A manifest with other content and the digest of that."""

    def write(path: Path) -> None:
        body = {**json.loads(path.read_text()), **changes}
        body.pop("sha256")
        path.write_text(json.dumps({"sha256": _digest_of(body), **body}))

    return write


ENTRY = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("stage-0.safetensors", flip_a_byte, "stage-0.safetensors does not have the SHA-256"),
        ("interface-1.safetensors", cut_short, r"interface-1.safetensors has \d+ bytes, not \d+"),
        ("stage-0.safetensors", Path.unlink, "stage-0.safetensors is missing"),
        ("stage-0.safetensors", fifo, "stage-0.safetensors has 0 bytes"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", cut_short, "manifest.json does not parse"),
        ("manifest.json", text("[]"), "manifest.json does not parse"),
        ("manifest.json", text("[" * 100_000), "manifest.json does not parse"),
        ("manifest.json", text('{"step": %s}' % ("9" * 5000)), "manifest.json does not parse"),
        ("manifest.json", fifo, "manifest.json cannot be read .it is not a regular file."),
        ("manifest.json", endless, "manifest.json cannot be read .it is not a regular file."),
        ("manifest.json", forged(format=2), "manifest.json has format 2, this version reads 1"),
        ("manifest.json", forged(step="20"), "manifest.json has no proper step"),
        ("manifest.json", forged(step=10**300), "manifest.json has no proper step"),
        ("manifest.json", forged(meta=[]), "manifest.json has no proper meta"),
        ("manifest.json", forged(parts=[]), "manifest.json has no proper parts"),
        ("manifest.json", forged(parts={"../stage-0": ENTRY}), "manifest.json has no proper parts"),
        ("manifest.json", forged(parts={"stage-0": {"bytes": -1}}), "manifest.json has no proper parts"),
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
    assert len(lines) == 1
    with pytest.raises(pytest.fail.Exception, match=f"{damaged} is damaged: {reason}.*; {before} is taken instead$"):
        pytest.fail(lines[0])
    save_step(tmp_path, 15)
    assert names(tmp_path) == ["0000000010", "0000000015"]


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
    assert all("there is no whole one to take instead" in line for line in lines)
    assert whole(tmp_path).step == 1


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


@pytest.mark.parametrize("step", [20, pytest.param(30, marks=pytest.mark.slow)])
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
        found = whole(root)
        assert found.step in (20, step)
        outcomes.append("new" if found.meta else "old")
        assert_whole(root, found.step)
        others = tmp_path / f"{point}.others"  # without it the one before is whole
        shutil.copytree(root, others)
        shutil.rmtree(others / found.path.name)
        assert_whole(others, whole(others).step)
        save_step(root, 40)
        assert names(root) == [f"{found.step:010d}", "0000000040"]
        assert_whole(root, 40)
    assert outcomes == sorted(outcomes, reverse=True)
    assert set(outcomes) == {"old", "new"}


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
    assert whole(tmp_path).meta == ({"again": True} if failing == 7 else {"epoch": 2})
    assert_whole(tmp_path, 20)


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
