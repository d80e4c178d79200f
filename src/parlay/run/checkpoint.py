"""The files of one checkpoint: tensors by part, and the manifest that makes them a whole.

    0000000120/manifest.json          step, meta, and the size and SHA-256 of every part and of itself
    0000000120/stage-0.safetensors    one file per part

Nothing here is a pickle: reading a checkpoint runs no code. The folder of checkpoints is in checkpoints.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from parlay import signs
from parlay.errors import InputError
from parlay.files import read_bounded, sync, sync_folder
from parlay.run.records import fits, wrong_key

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 * 2**20  # bytes
CHUNK = 16 * 2**20  # bytes written and hashed at a time: parts mapped from a file need not fit into memory
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Tensors = Mapping[str, Tensor]
Entries = dict[str, dict[str, Any]]
"""Of a manifest: size and digest of every part, by its name."""
Check = Callable[[dict[str, Any]], str | None]
"""What is wrong with the meta of a checkpoint; None where it is right."""

NAMES = {
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
"""Of the data types, in the safetensors format."""


class Damage(Exception):
    """Which file of a checkpoint is not as it was written, and how."""


@dataclass(frozen=True)
class Checkpoint(Mapping[str, dict[str, Tensor]]):
    """One that was found whole: its parts by name, each read when it is asked for, with tensors on the CPU."""

    step: int
    meta: dict[str, Any]
    path: Path
    parts: tuple[str, ...]

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if name not in self.parts:
            raise KeyError(name)
        return load_file(part_file(self.path, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def part_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def size(parts: Mapping[str, Tensors]) -> int:
    """Bytes that these parts take."""
    return sum(tensor.numel() * tensor.element_size() for part in parts.values() for tensor in part.values())


def write_part(folder: Path, name: str, tensors: Tensors) -> dict[str, Any]:
    """A part of a checkpoint; its entry in the manifest."""
    if not PART_NAME.fullmatch(name):
        raise InputError(f"no checkpoint part {name!r}: write letters, digits, '-', '_' and '.'")
    for key, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise InputError(f"{key} of part {name} is {tensor.dtype}, which a checkpoint cannot hold: convert it")
    return write_file(part_file(folder, name), packed(tensors))


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file, hash it in the same pass, and put it on the disk."""
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            signs.beat()
            file.write(chunk)
            digest.update(chunk)
            count += len(chunk)
        sync(file)
    return {"bytes": count, "sha256": digest.hexdigest()}


def write_manifest(folder: Path, step: int, entries: Entries, meta: Mapping[str, Any]) -> None:
    body = {"format": FORMAT, "step": step, "parts": entries, "meta": meta}
    body = json.loads(json.dumps(body))  # so that the digest is taken of what a reader will see
    write_file(folder / MANIFEST, [json.dumps({"sha256": _digest_of(body), **body}, indent=1).encode()])
    sync_folder(folder)


def packed(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, a chunk at a time.

    Not by `save_file`: it refuses tensors that share memory, hides the error of a full disk, makes files that only
    their owner may read, and its file would be read again for the digest. Widest types first, so that all are aligned.
    """
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in order:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    line = json.dumps(header).encode()
    line += b" " * (-len(line) % 8)
    yield len(line).to_bytes(8, "little") + line
    for _, tensor in order:
        yield from _chunks(tensor)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Some rows at a time: a store on a GPU, or of channels-last samples, is copied on the way, and may be large."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row = rows.element_size() * max(rows[:1].numel(), 1)
    for part in torch.split(rows, max(CHUNK // row, 1)):
        yield part.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def verified(path: Path, check: Check) -> Checkpoint:
    """The checkpoint in this folder, or Damage."""
    manifest = _manifest(path, check)
    for name, entry in manifest["parts"].items():
        _check_part(part_file(path, name), entry["bytes"], entry["sha256"])
    return Checkpoint(manifest["step"], manifest["meta"], path, tuple(manifest["parts"]))


def _manifest(path: Path, check: Check) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(read_bounded(path / MANIFEST, MANIFEST_LIMIT))
        digest = manifest.pop("sha256")
    except FileNotFoundError:
        raise Damage(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Damage(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damage(f"{MANIFEST} does not parse") from None
    if digest != _digest_of(manifest):
        raise Damage(f"{MANIFEST} does not have the SHA-256 it was written with")
    if manifest.get("format") != FORMAT:
        raise Damage(f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}")
    wrong = wrong_key(manifest, {"step": int, "parts": dict, "meta": dict}) or check(manifest["meta"])
    entry = {"bytes": int, "sha256": str}
    if wrong is None and not all(PART_NAME.fullmatch(n) and fits(e, entry) for n, e in manifest["parts"].items()):
        wrong = "parts"
    if wrong is not None:
        raise Damage(f"{MANIFEST} has no proper {wrong}")
    return manifest


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _check_part(path: Path, count: int, digest: str) -> None:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != count:
            raise Damage(f"{path.name} has {found.st_size:,} bytes, not {count:,}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise Damage(f"{path.name} does not have the SHA-256 it was written with")
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    except OSError as error:
        raise Damage(f"{path.name} cannot be read ({error.strerror})") from error
