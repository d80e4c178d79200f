"""Where the states and multipliers live: one tensor per training sample at one interface.

A store takes and gives batches by sample id: `gather(ids)` before a step, `scatter(ids, values)` after it. It holds the
small tensors that the filter makes, in the data type they are stored in; what they mean is the coupling's affair.
There are three kinds: on the device, in the host's memory, and in a file mapped into memory. `place` chooses the first
that fits, or says in one line what is missing; `make_store` makes it. All of them start filled with zeros.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from parlay.errors import InputError

Shape = tuple[int, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("device", "host", "file")


class Store(ABC):
    """One tensor of `shape` and `dtype` per sample, read and written in batches of ids, delivered on `device`."""

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.samples = samples
        self.shape: Shape = tuple(shape)
        self.dtype = dtype
        self.device = device

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The bytes it holds at this moment: 0 once it is closed."""

    @abstractmethod
    def gather(self, ids: Tensor) -> Tensor:
        """The tensors of these samples, (len(ids), *shape), in the store's dtype and on `device`."""

    @abstractmethod
    def scatter(self, ids: Tensor, values: Tensor) -> None:
        """Replace the tensors of these samples (each at most once in `ids`) by `values`, converted to the dtype."""

    @abstractmethod
    def prefetch(self, ids: Tensor) -> None:
        """A hint: these ids, in this order, are gathered next."""

    @abstractmethod
    def fill(self, value: float) -> None:
        """Set every element."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """The whole content, (samples, *shape), without a copy and with every scatter done; for checkpoints."""

    @abstractmethod
    def load(self, content: Tensor) -> None:
        """Replace the whole content; another shape or dtype is refused."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. The store is not used again; closing it twice is allowed."""

    def _as_rows(self, values: Tensor) -> Tensor:
        return values.detach().to(self.device, self.dtype).reshape(len(values), math.prod(self.shape))

    def _check(self, content: Tensor) -> None:
        wanted = (self.samples, *self.shape)
        if tuple(content.shape) != wanted or content.dtype != self.dtype:
            raise InputError(
                f"a store of shape {wanted} in {self.dtype} cannot load a content of shape {tuple(content.shape)} "
                f"in {content.dtype}: start the states anew, or resume with the recipe of the saved run"
            )


@final
class DeviceStore(Store):
    """A tensor on the device. With ids on the device nothing waits, so a CUDA graph can hold gather and scatter."""

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(samples, shape, dtype, device)
        self._rows = _zeros(samples, shape, dtype, device)

    @property
    def bytes(self) -> int:
        return self._rows.nbytes

    def gather(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.device, non_blocking=True)
        return self._rows.index_select(0, ids).view(-1, *self.shape)

    def scatter(self, ids: Tensor, values: Tensor) -> None:
        ids = ids.to(self.device, non_blocking=True)
        self._rows.index_copy_(0, ids, self._as_rows(values))

    def prefetch(self, ids: Tensor) -> None:
        pass

    def fill(self, value: float) -> None:
        self._rows.fill_(value)

    def tensor(self) -> Tensor:
        return self._rows.view(self.samples, *self.shape)

    def load(self, content: Tensor) -> None:
        self._check(content)
        self._rows.copy_(content.reshape(self._rows.shape))

    def close(self) -> None:
        self._rows = self._rows.new_empty(0, 0)


class _HostMemory(Store):
    """What stores in the host's address space have in common, be it memory of its own or a mapped file.

    `_rows` is (samples, elements). For a CUDA device a `_Courier` carries the batches; for the CPU they are at hand.
    """

    def __init__(
        self, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rows: Tensor
    ) -> None:
        super().__init__(samples, shape, dtype, device)
        self._rows = rows
        self._courier = _Courier(rows, device) if device.type == "cuda" else None

    @property
    def bytes(self) -> int:
        return self._rows.nbytes

    def gather(self, ids: Tensor) -> Tensor:
        if self._courier is not None:
            return self._courier.fetch(ids).view(-1, *self.shape)
        return self._rows.index_select(0, ids).view(-1, *self.shape)

    def scatter(self, ids: Tensor, values: Tensor) -> None:
        rows = self._as_rows(values)
        if self._courier is not None:
            # A copy, because the caller may overwrite its values (a CUDA graph does) before they are on the host.
            self._courier.bring(ids, rows.clone())
        else:
            self._rows.index_copy_(0, ids, rows)

    def prefetch(self, ids: Tensor) -> None:
        if self._courier is not None:
            self._courier.prepare(ids)

    def fill(self, value: float) -> None:
        self._settle()
        self._rows.fill_(value)

    def tensor(self) -> Tensor:
        if self._courier is not None:
            self._courier.wait()
        return self._rows.view(self.samples, *self.shape)

    def load(self, content: Tensor) -> None:
        self._check(content)
        self._settle()
        self._rows.copy_(content.reshape(self._rows.shape))

    def close(self) -> None:
        if self._courier is not None:
            self._courier.close()
            self._courier = None
        self._rows = torch.empty(0, 0, dtype=self.dtype)

    def _settle(self) -> None:
        """Before the content is written from elsewhere: no batch is on its way in, none was prepared from the old."""
        if self._courier is not None:
            self._courier.wait()
            self._courier.forget()


@final
class HostStore(_HostMemory):
    """The host's memory. Only the batches on their way are pinned, not the content.

    A batch is picked row by row into a pinned buffer anyway, and PyTorch rounds pinned memory up to a power of two:
    91.55 GiB of states would take 128.
    """

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(samples, shape, dtype, device, _zeros(samples, shape, dtype, torch.device("cpu")))


@final
class FileStore(_HostMemory):
    """A file mapped into memory, for states that fit nowhere else. Made by `create`, or found again by `open`.

    The file is a header of `HEADER` bytes and then the elements as they are in memory (bfloat16 as its bits). The
    header says what the file is: samples, shape, dtype, and a `tag` that names the run. The kernel writes pages back
    when it likes, so the file outlives the process but not a power cut; checkpoints are what lasts.
    """

    def __init__(self, path: Path, header: "_Header", device: torch.device, rows: Tensor) -> None:
        super().__init__(header.samples, header.shape, DTYPES[header.dtype], device, rows)
        self.path = path
        self.tag = header.tag

    @classmethod
    def create(
        cls, path: Path, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tag: str = ""
    ) -> "FileStore":
        """A fresh store of zeros at `path`, in the place of an older store; any other file there is refused."""
        header = _Header.of(samples, shape, dtype, tag)
        _make_file(path, header)
        return cls(path, header, device, _map(path, header))

    @classmethod
    def open(
        cls, path: Path, samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tag: str = ""
    ) -> "FileStore":
        """The store that is at `path`, refused when it is cut short or of another run, shape or dtype."""
        header = _Header.of(samples, shape, dtype, tag)
        _check_file(path, header)
        return cls(path, header, device, _map(path, header))


def make_store(
    kind: str,
    samples: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    path: Path,
    tag: str = "",
) -> Store:
    """A fresh store of one of `KINDS`; only a file store uses `path` and `tag`."""
    if kind == "device":
        return DeviceStore(samples, shape, dtype, device)
    if kind == "host":
        return HostStore(samples, shape, dtype, device)
    if kind == "file":
        return FileStore.create(path, samples, shape, dtype, device, tag)
    raise InputError(f"no store on {kind!r}: write one of {', '.join(KINDS)}")


def store_bytes(samples: int, shapes: Sequence[Shape], dtype: torch.dtype, multipliers: bool) -> int:
    """N · Σ_k D_k · bytes per element · (1, or 2 with multipliers); `shapes` are those that the filter leaves."""
    elements = sum(math.prod(shape) for shape in shapes)
    return samples * elements * dtype.itemsize * (2 if multipliers else 1)


def _check_possible(samples: int, dtype: torch.dtype) -> None:
    if samples < 1:
        raise InputError(f"a store of {samples} samples holds nothing: give a data set that is not empty")
    if dtype not in DTYPES.values():
        raise InputError(f"no store in {dtype}: write one of {', '.join(DTYPES)}")


def _zeros(samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    _check_possible(samples, dtype)
    return torch.zeros(samples, math.prod(shape), dtype=dtype, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Between host and GPU


@dataclass(frozen=True)
class _Ahead:
    """A batch that was asked for ahead of its gather."""

    ids: Tensor
    batch: "Future[tuple[Tensor, torch.cuda.Event]]"


@final
class _Courier:
    """Carries batches between rows in host memory and a GPU, behind the back of the one who trains.

    One worker thread does all reads and writes of the rows, in the order in which they were asked for: this alone makes
    a gather see every scatter before it. Copies run on two side streams, one for each direction, from and to pinned
    buffers; PyTorch's host allocator keeps a buffer until its copy is done. A batch that was prepared costs the
    gather a wait on one event. Ids are best given on the CPU: reading them from the GPU waits for it.

    The worker calls CUDA when it likes, so `wait()` (by `Store.tensor()`) before a CUDA graph is captured.
    """

    # Finished steps of which the values may be still on their way: bounds the pinned memory when writing is slow.
    WRITES = 2

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="parlay-store")
        self._ahead: _Ahead | None = None
        self._writes: deque[Future[None]] = deque()

    def prepare(self, ids: Tensor) -> None:
        ids = _own_ids(ids)
        self._ahead = _Ahead(ids, self._worker.submit(self._read, ids))

    def fetch(self, ids: Tensor) -> Tensor:
        ids = ids.cpu()
        if self._ahead is None or not torch.equal(self._ahead.ids, ids):
            self.prepare(ids)
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        batch, arrived = ahead.batch.result()
        self._raise_failures()
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        # The batch was allocated on the side stream: without this its memory could be reused under our reads.
        batch.record_stream(stream)
        return batch

    def bring(self, ids: Tensor, values: Tensor) -> None:
        """`values` are the courier's from here on: they are read later, on another stream."""
        ids = _own_ids(ids)
        while len(self._writes) >= self.WRITES:
            self._writes.popleft().result()
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            buffer.copy_(values, non_blocking=True)
            values.record_stream(self._outward)
            arrived = self._outward.record_event()
        self._writes.append(self._worker.submit(self._write, ids, buffer, arrived))
        if self._ahead is not None and bool(torch.isin(ids, self._ahead.ids).any()):
            # What was prepared has just become old: read it again, behind this write.
            self.prepare(self._ahead.ids)

    def forget(self) -> None:
        self._ahead = None

    def wait(self) -> None:
        """Until all that was brought is in the rows, and nothing is being read."""
        while self._writes:
            self._writes.popleft().result()
        if self._ahead is not None:
            futures.wait([self._ahead.batch])

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def _raise_failures(self) -> None:
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def _read(self, ids: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self._inward):
            buffer = torch.empty(len(ids), self._rows.shape[1], dtype=self._rows.dtype, pin_memory=True)
            torch.index_select(self._rows, 0, ids, out=buffer)
            return buffer.to(self._device, non_blocking=True), self._inward.record_event()

    def _write(self, ids: Tensor, buffer: Tensor, arrived: torch.cuda.Event) -> None:
        arrived.synchronize()
        self._rows.index_copy_(0, ids, buffer)


def _own_ids(ids: Tensor) -> Tensor:
    """Ids on the CPU that the caller cannot change while the worker still needs them."""
    return ids.detach().to("cpu", copy=True)


# ---------------------------------------------------------------------------------------------------------------------
# The file of a FileStore

MAGIC = b"PARLAY store\n"
VERSION = 1
HEADER = 4096  # a page, so that the rows start aligned


@dataclass(frozen=True)
class _Header:
    """What a store's file says of itself, as a line of JSON behind the magic bytes."""

    samples: int
    shape: Shape
    dtype: str
    tag: str
    version: int = VERSION

    @classmethod
    def of(cls, samples: int, shape: Sequence[int], dtype: torch.dtype, tag: str) -> "_Header":
        names = {value: name for name, value in DTYPES.items()}
        _check_possible(samples, dtype)
        return cls(samples, tuple(shape), names[dtype], tag)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def file_bytes(self) -> int:
        return HEADER + store_bytes(self.samples, [self.shape], DTYPES[self.dtype], multipliers=False)

    def encode(self) -> bytes:
        raw = MAGIC + json.dumps(vars(self)).encode() + b"\n"
        if len(raw) > HEADER:
            raise InputError(f"a tag of {len(self.tag)} characters does not fit into a store's header: write a shorter")
        return raw.ljust(HEADER, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> "_Header":
        """Raises ValueError (with its reason) when the bytes are not a header."""
        if not raw.startswith(MAGIC):
            raise ValueError("is not a store of Parlay")
        try:
            fields: dict[str, Any] = json.loads(raw[len(MAGIC) : HEADER].rstrip(b"\0"))
            return cls(**{**fields, "shape": tuple(fields["shape"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("has a damaged header") from error

    def difference(self, found: "_Header") -> str | None:
        """The first thing that is not as wanted, in words."""
        for name, wanted in vars(self).items():
            if getattr(found, name) != wanted:
                return f"has {name} {getattr(found, name)!r}, not {wanted!r}"
        return None


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER)


def _make_file(path: Path, header: _Header) -> None:
    """Allocate first: a mapped file with holes dies of SIGBUS when the disk is full, posix_fallocate says ENOSPC."""
    raw = header.encode()
    if path.exists() and not (path.is_file() and _read_header(path).startswith(MAGIC)):
        raise InputError(f"{path} is not a store of Parlay and is left alone: write another folder")
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The old content is given up in any case, and the disk may not hold both.
    path.unlink(missing_ok=True)
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, header.file_bytes)
            file.write(raw)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise InputError(
            f"the store {path} needs {size(header.file_bytes)} and the disk has {size(_disk_free(path))} free: "
            "make room, or write another folder, bfloat16 states or downsample 2"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _check_file(path: Path, wanted: _Header) -> None:
    """Before mapping: a map in mode r+ silently extends a file that was cut short."""
    refusal = "start the states anew, or write the folder of the run that made it"
    if not path.is_file():
        raise InputError(f"there is no store {path}: {refusal}")
    try:
        difference = wanted.difference(_Header.decode(_read_header(path)))
    except ValueError as error:
        raise InputError(f"the store {path} {error}: {refusal}") from error
    if difference is None and path.stat().st_size != wanted.file_bytes:
        difference = f"has {path.stat().st_size:,} bytes, not {wanted.file_bytes:,}"
    if difference is not None:
        raise InputError(f"the store {path} {difference}: {refusal}")


def _map(path: Path, header: _Header) -> Tensor:
    dtype = DTYPES[header.dtype]
    # As integers of the same width: numpy has no bfloat16.
    bits = np.dtype(f"<i{dtype.itemsize}")
    content = np.memmap(path, bits, mode="r+", offset=HEADER, shape=(header.samples, header.elements))
    return torch.from_numpy(content).view(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Which kind fits

DEVICE_RESERVE = 0.3  # of the GPU's memory, for weights, activations and CUDA graphs of the training itself
HOST_RESERVE = 0.2  # of the memory that is available, for the data set, the workers and everybody else


@dataclass(frozen=True)
class Free:
    """Bytes that stores may take in each place; what the training itself needs is already taken off."""

    device: int
    host: int
    disk: int


def free_space(device: torch.device, folder: Path) -> Free:
    """What is free now. On the CPU the device's memory is the host's."""
    host = int((1 - HOST_RESERVE) * _host_free())
    on_device = host
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        on_device = max(0, free - int(DEVICE_RESERVE * total))
    return Free(on_device, host, _disk_free(folder))


def place(kind: str, needed: int, device: torch.device, folder: Path, free: Free | None = None) -> str:
    """The kind of store that holds `needed` bytes: the one asked for, or with "auto" the first of `KINDS` that fits."""
    if kind not in ("auto", *KINDS):
        raise InputError(f"no store on {kind!r}: write one of auto, {', '.join(KINDS)}")
    free = free or free_space(device, folder)
    room = {"device": free.device, "host": free.host, "file": free.disk}
    for candidate in KINDS if kind == "auto" else (kind,):
        if needed <= room[candidate]:
            return candidate
    where = {"auto": "anywhere", "device": "on the device", "host": "on the host", "file": "in a file"}[kind]
    raise InputError(
        f"the stores need {size(needed)} and do not fit {where}: free for them are {size(free.device)} on the device, "
        f"{size(free.host)} on the host, {size(free.disk)} on disk at {folder}; {_advice(needed, room)}"
    )


def _advice(needed: int, room: dict[str, int]) -> str:
    """Only what would really fit."""
    fitting = [f"store {kind}" for kind in KINDS if needed <= room[kind]]
    most = max(room.values())
    if needed <= 2 * most:
        fitting.append("bfloat16 states (half of float32)")
    if needed <= 4 * most:
        fitting.append("downsample 2 (a quarter)")
    if not fitting and needed <= 8 * most:
        fitting.append("bfloat16 states with downsample 2 (an eighth)")
    if not fitting:
        fitting = ["method replay, which stores no states", "fewer stages", "a folder on a larger disk"]
    return "write " + ", or ".join(fitting)


def size(count: int) -> str:
    """Bytes for people: exact, and in GiB."""
    return f"{count:,} bytes ({count / 2**30:.2f} GiB)"


def _disk_free(path: Path) -> int:
    """At `path`, or where it will be made."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _host_free() -> int:
    return min([_memory_available(), *_cgroup_rooms()])


def _memory_available() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_rooms(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Limit less use of this process's control group (version 2) and of all above it; empty where there are none."""
    with contextlib.suppress(OSError):
        inner = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "/")
        group = root / inner.strip("/")
        groups = [group, *(above for above in group.parents if above.is_relative_to(root))]
        return [room for room in map(_cgroup_room, groups) if room is not None]
    return []


def _cgroup_room(group: Path) -> int | None:
    try:
        limit = int((group / "memory.max").read_text())  # the word "max", where there is none, is a ValueError
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files that nobody uses count as used, but are given up on demand.
        return max(0, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
