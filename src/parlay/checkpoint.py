"""What lasts: checkpoints that are whole or not there, files written in one piece, and the lock on a run folder.

In come tensors by part and name and a dictionary of plain JSON values; out comes the newest set of them that is whole,
after any kill, full disk or flipped bit. A checkpoint is a folder, named by its step, under the folder `root` that all
functions take (`OUT/checkpoints`):

    root/0000000120/manifest.json          step, meta, and the size and SHA-256 of every part and of itself
    root/0000000120/stage-0.safetensors    one file per part
    root/.new-0000000160/                  a save on its way, or the leftover of a killed one
    root/.old-0000000120/                  the former save of a step that is saved again, until the new one stands
    root/.gone-0000000080/                 one on its way out

Nothing here is a pickle: reading a checkpoint runs no code.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from parlay import signs
from parlay.errors import InputError

FORMAT = 1
MANIFEST = "manifest.json"
CHUNK = 16 * 2**20  # bytes written and hashed at a time: parts mapped from a file need not fit into memory

NEW, OLD, GONE = ".new-", ".old-", ".gone-"
STEP_NAME = re.compile(r"\d{10,}")
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Entries = dict[str, dict[str, Any]]
"""Of a manifest: size and digest of every part, by its name."""

# The names that the safetensors format has for data types.
SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    step: int
    meta: dict[str, Any]
    path: Path
    parts: tuple[str, ...]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, on the CPU."""
        if name not in self.parts:
            raise InputError(f"the checkpoint {self.path} has no part {name!r}: write one of {', '.join(self.parts)}")
        return load_file(_part_file(self.path, name))

    def content(self) -> Mapping[str, dict[str, Tensor]]:
        """All parts by name, each read when it is asked for: a process takes what it needs."""
        return _Content(self)


class _Content(Mapping[str, dict[str, Tensor]]):
    def __init__(self, found: Checkpoint) -> None:
        self._found = found

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if name not in self._found.parts:
            raise KeyError(name)
        return self._found.part(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found.parts)

    def __len__(self) -> int:
        return len(self._found.parts)


def save(
    root: Path, step: int, parts: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint and return its folder; a kill or an error at any point leaves the ones before as they were.

    `meta` is anything JSON can say (tuples come back as lists, keys as strings). Afterwards the newest `keep` up to
    `step` remain. Those of later steps go too: the run went back behind them, because they were damaged or because it
    started anew, and a resumed run would take them for its own.
    """
    _check_step(step, keep)
    _check_parts(parts)
    try:
        begin(root, step, size(parts))
        return finish(root, step, write_parts(root, step, parts), meta, keep)
    except BaseException:
        give_up(root)
        raise


def begin(root: Path, step: int, needed: int = 0) -> None:
    """The first of three steps of a save, by one process; then each writes its parts, then the first finishes it.

    `needed` bytes are what the message about a full disk says.
    """
    _check_step(step, 1)
    with _naming_a_full_disk(root / _name(step), needed):
        root.mkdir(parents=True, exist_ok=True)
        _tidy(root)
        _new(root, step).mkdir()


def write_parts(root: Path, step: int, parts: Mapping[str, Mapping[str, Tensor]]) -> Entries:
    """The second: parts, by as many processes as there are. What it gives goes into the manifest."""
    _check_parts(parts)
    entries = {}
    with _naming_a_full_disk(root / _name(step), size(parts)):
        for name, tensors in parts.items():
            digest, count = _write_file(_part_file(_new(root, step), name), _safetensors(tensors))
            entries[name] = {"bytes": count, "sha256": digest}
    return entries


def finish(root: Path, step: int, entries: Entries, meta: Mapping[str, Any], keep: int = 2) -> Path:
    """The third: the manifest of all parts makes them a checkpoint, which is put in its place."""
    _check_step(step, keep)
    final_path = root / _name(step)
    with _naming_a_full_disk(final_path, sum(entry["bytes"] for entry in entries.values())):
        _write_manifest(_new(root, step), step, entries, meta)
        _put_in_place(_new(root, step), final_path, root / f"{OLD}{_name(step)}")
    _prune(root, step, keep)
    return final_path


def give_up(root: Path) -> None:
    """Clear away what a save that failed has left."""
    if root.is_dir():
        _tidy(root)


def newest(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole. Every damaged one passed over is named by a line to `warn`."""
    refused: list[str] = []
    found: Checkpoint | None = None
    for path in _candidates(root):
        try:
            found = _verified(path)
            break
        except _Damage as damage:
            refused.append(f"checkpoint {path} is damaged: {damage}")
    instead = f"{found.path} is taken instead" if found else "there is no whole one to take instead"
    for line in refused:
        warn(f"{line}; {instead}")
    return found


def atomic_write(path: Path, text: str | bytes) -> None:
    """Write a file so that at any moment the old or the new content is there, whole."""
    content = text.encode() if isinstance(text, str) else text
    new = path.with_name(f".{path.name}.new")
    try:
        with _naming_a_full_disk(path, len(content)):
            _write_file(new, [content])
            os.replace(new, path)
            _sync_folder(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@final
class FolderLock:
    """One run at a time in a folder: `with FolderLock(out): ...`, or InputError naming the process that has it.

    The lock is the kernel's (flock on OUT/.lock) and ends with the process that holds it, however that ends: there is
    no stale lock to clear and no recycled process number to be mistaken. The number in the file is for the message
    only. The file stays: removing it would let two runs lock two files of the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._file: int | None = None

    def __enter__(self) -> "FolderLock":
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
        number = self.path.read_text(errors="replace").strip()
        return f"process {number}" if number else "another process"

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _name(step: int) -> str:
    return f"{step:010d}"


def _new(root: Path, step: int) -> Path:
    return root / f"{NEW}{_name(step)}"


def _check_step(step: int, keep: int) -> None:
    if step < 0 or keep < 1:
        raise InputError(f"no checkpoint of step {step} with {keep} to keep: write a step from 0 and keep from 1 on")


def _check_parts(parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    for name, tensors in parts.items():
        if not PART_NAME.fullmatch(name):
            raise InputError(f"no checkpoint part {name!r}: write letters, digits, '-', '_' and '.'")
        for key, tensor in tensors.items():
            if tensor.dtype not in SAFETENSORS:
                raise InputError(f"{key} of part {name} is {tensor.dtype}, which a checkpoint cannot hold: convert it")


def _write_manifest(folder: Path, step: int, entries: Entries, meta: Mapping[str, Any]) -> None:
    body = {"format": FORMAT, "step": step, "parts": entries, "meta": meta}
    # Through JSON and back, so that the digest is taken of what a reader will see.
    body = json.loads(json.dumps(body))
    text = json.dumps({"sha256": _digest_of(body), **body}, indent=1)
    _write_file(folder / MANIFEST, [text.encode()])
    _sync_folder(folder)


def _put_in_place(new: Path, path: Path, old: Path) -> None:
    # A folder cannot be replaced in one call. Between these two `.old-` stands in for it, see _candidates.
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _sync_folder(path.parent)
    if old.exists():
        _discard(old)


def _write_file(path: Path, chunks: "Iterator[memoryview] | list[bytes]") -> tuple[str, int]:
    """Write, hash in the same pass and sync; returns digest and size."""
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            signs.beat()
            file.write(chunk)
            digest.update(chunk)
            count += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), count


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, a chunk at a time.

    Not by `save_file`, which refuses tensors that share memory, hides the error number of a full disk, and would have
    to be read again for the digest. Widest types first, so that every tensor is aligned.
    """
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in order:
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in order:
        yield from _chunks(tensor)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Some rows at a time: a store on a GPU, or of channels-last samples, is copied on the way, and may be large."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row = rows.element_size() * max(rows[:1].numel(), 1)
    for part in torch.split(rows, max(CHUNK // row, 1)):
        yield part.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def size(parts: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Bytes that these parts take."""
    return sum(tensor.numel() * tensor.element_size() for part in parts.values() for tensor in part.values())


def _part_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """A rename lasts only when the folder that holds the name has been synced."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _naming_a_full_disk(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(path.parent).free
        reason = os.strerror(error.errno)
        raise OSError(
            error.errno,
            f"{path} could not be written ({reason}): it needs {needed:,} bytes and the disk has {free:,} free; "
            "what was saved before is untouched",
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Cleaning up. Only save() does it: a reader beside a running save must not remove its work.


def _tidy(root: Path) -> None:
    """Remove what killed saves left, and put the former save of a step back if its successor never came to stand."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(OLD) and not (root / path.name.removeprefix(OLD)).exists():
            os.rename(path, root / path.name.removeprefix(OLD))
        elif path.name.startswith(OLD):
            _discard(path)
        elif path.name.startswith((NEW, GONE)):
            shutil.rmtree(path)


def _prune(root: Path, step: int, keep: int) -> None:
    saved = sorted(filter(_is_checkpoint, root.iterdir()), key=_step)
    up_to_now = [path for path in saved if _step(path) <= step]
    for path in set(saved) - set(up_to_now[-keep:]):
        _discard(path)


def _discard(path: Path) -> None:
    """Out of sight first: a checkpoint that is half removed would read as a damaged one."""
    gone = path.with_name(f"{GONE}{path.name.removeprefix(OLD)}")
    os.rename(path, gone)
    shutil.rmtree(gone)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _is_checkpoint(path: Path) -> bool:
    return STEP_NAME.fullmatch(path.name.removeprefix(OLD)) is not None and path.is_dir()


def _step(path: Path) -> int:
    return int(path.name.removeprefix(OLD))


class _Damage(Exception):
    """Which file of a checkpoint is not as it was written, and how."""


def _candidates(root: Path) -> list[Path]:
    """Newest first; of one step the former save comes behind its successor."""
    if not root.is_dir():
        return []
    found = filter(_is_checkpoint, root.iterdir())
    return sorted(found, key=lambda path: (_step(path), not path.name.startswith(OLD)), reverse=True)


def _verified(path: Path) -> Checkpoint:
    manifest = _manifest(path)
    for name, entry in manifest["parts"].items():
        _check_part(_part_file(path, name), entry["bytes"], entry["sha256"])
    return Checkpoint(manifest["step"], manifest["meta"], path, tuple(manifest["parts"]))


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        digest = manifest.pop("sha256")
    except FileNotFoundError:
        raise _Damage(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise _Damage(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _Damage(f"{MANIFEST} does not parse") from None
    # Past this point it is what save() wrote: its keys need no further checks.
    if digest != _digest_of(manifest):
        raise _Damage(f"{MANIFEST} does not have the SHA-256 it was written with")
    if manifest["format"] != FORMAT:
        raise _Damage(f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}")
    return dict(manifest)


def _check_part(path: Path, count: int, digest: str) -> None:
    try:
        found = path.stat().st_size
        if found != count:
            raise _Damage(f"{path.name} has {found:,} bytes, not {count:,}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise _Damage(f"{path.name} does not have the SHA-256 it was written with")
    except FileNotFoundError:
        raise _Damage(f"{path.name} is missing") from None
    except OSError as error:
        raise _Damage(f"{path.name} cannot be read ({error.strerror})") from error
