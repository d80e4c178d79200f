"""Between host and GPU: batches of rows go in and out while the GPU trains."""

from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from parlay.lanes import Event, Lanes

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
ALIGNED = 256  # bytes: where compiled code expects a tensor to begin
HANDS = 4  # threads that copy rows, at most


def parts(parcel: Tensor, contents: Sequence[Tensor], count: int) -> list[Tensor]:
    """`count` rows of each of these contents, which lie one after the other in a parcel: views of its bytes."""
    found, begin = [], 0
    for rows in contents:
        end = begin + count * rows.shape[1] * rows.itemsize
        found.append(parcel[begin:end].view(rows.dtype).view(count, rows.shape[1]))
        begin = _aligned(end)
    return found


def parcel_bytes(contents: Sequence[Tensor], count: int) -> int:
    end = 0
    for rows in contents:
        end = _aligned(end) + count * rows.shape[1] * rows.itemsize
    return end


@dataclass(frozen=True)
class _Ahead:
    """A batch that was asked for ahead of its gather."""

    ids: list[int]
    batch: Future[tuple[Tensor, Event]]


@dataclass(frozen=True)
class _Write:
    """Values on their way to the host."""

    ids: Set[int]
    done: Future[None]


@final
class Courier:
    """Carries batches between rows in host memory and a device, behind the back of the one who trains.

    `contents` are rows of one or several stores: those of a batch go together, as one parcel of bytes. What costs the
    one who trains is each call of Python, and that other threads call it too; so a step makes three, whatever the
    number of stores (results/gpu-bench, "States on the host").

    One thread reads rows and one writes them, each in the order in which it was asked. A read waits for writes of the
    same rows that came before it: so a gather sees every scatter. Other reads wait for nothing, and are done steps
    before they are needed. Copies run in two lanes of their own. A batch that was prepared costs the gather a wait on
    one event. Ids are best given on the CPU: reading them from a GPU waits for it.

    The threads call CUDA when they like, so `settle()` (by `Store.tensor()`) before a CUDA graph is captured.
    """

    # Finished steps of which the values may be still on their way: bounds the pinned memory when writing is slow.
    WRITES = 2

    def __init__(self, contents: Sequence[Tensor], lanes: Lanes) -> None:
        self._contents = list(contents)
        # Copied by numpy, row by row in one thread: torch divides even this among all cores, and their meeting again
        # takes longer than 8 MiB (4.9 ms in place of 0.6 on two cores of which one was busy).
        self._bytes = [_as_bytes(rows) for rows in contents]
        self._lanes = lanes
        self._inward, self._outward = lanes.copy_lanes()
        self._reader, self._writer = lanes.threads(1, "parlay-read"), lanes.threads(1, "parlay-write")
        hands = min(HANDS, (len(self._contents) + 1) // 2)
        self._hands = lanes.threads(hands, "parlay-rows") if hands > 1 else None
        self._ahead: _Ahead | None = None
        self._writes: deque[_Write] = deque()

    def prepare(self, ids: Tensor) -> None:
        self._ahead = self._ask(ids.tolist())

    def fetch(self, ids: Tensor) -> Tensor:
        """Their parcel, on the device."""
        wanted = ids.tolist()
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.ids != wanted:
            ahead = self._ask(wanted)
        parcel, arrived = ahead.batch.result()
        while self._writes and self._writes[0].done.done():
            self._writes.popleft().done.result()  # failed writes come out here
        self._lanes.current.wait(arrived)
        self._lanes.keep(parcel, self._lanes.current)
        return parcel

    def bring(self, ids: Tensor, parcel: Tensor) -> None:
        """The parcel is the courier's from here on: it is read later, in another lane."""
        places = ids.tolist()
        while len(self._writes) >= self.WRITES:
            self._writes.popleft().done.result()
        self._outward.follow(self._lanes.current)
        with self._outward:
            buffer = self._lanes.fetch(parcel)
            self._lanes.keep(parcel, self._outward)
            arrived = self._outward.mark(asleep=True)
        done = self._writer.submit(self._write, places, buffer, arrived)
        self._writes.append(_Write(frozenset(places), done))
        if self._ahead is not None and not self._writes[-1].ids.isdisjoint(self._ahead.ids):
            # What was prepared has just become old: read it again, behind this write.
            self._ahead = self._ask(self._ahead.ids)

    def settle(self) -> None:
        """Until all that was brought is in the rows and nothing is being read; what was prepared is dropped."""
        while self._writes:
            self._writes.popleft().done.result()
        if self._ahead is not None:
            self._ahead.batch.result()
            self._ahead = None

    def close(self) -> None:
        try:
            self.settle()
        finally:
            for pool in (self._reader, self._writer, self._hands):
                if pool is not None:
                    pool.shutdown()

    def _ask(self, ids: list[int]) -> _Ahead:
        before = [write.done for write in self._writes if not write.ids.isdisjoint(ids)]
        return _Ahead(ids, self._reader.submit(self._read, ids, before))

    def _read(self, ids: list[int], before: list[Future[None]]) -> tuple[Tensor, Event]:
        for write in before:
            write.result()
        with self._inward:
            buffer = self._lanes.staging(parcel_bytes(self._contents, len(ids)))
            self._for_each(_take, ids, buffer)
            return self._lanes.send(buffer), self._inward.mark()

    def _write(self, ids: list[int], buffer: Tensor, arrived: Event) -> None:
        arrived.synchronize()
        self._for_each(_put, ids, buffer)

    def _for_each(self, copy: Callable[[Bytes, Bytes, Bytes], None], ids: list[int], buffer: Tensor) -> None:
        """Copy between the rows of every content and their part of the buffer."""
        places = [np.array(ids)] * len(self._contents)
        batches = [_as_bytes(part) for part in parts(buffer, self._contents, len(ids))]
        # the copies themselves need no Python, and go on side by side
        list((self._hands.map if self._hands else map)(copy, self._bytes, places, batches))


def _take(rows: Bytes, places: Bytes, batch: Bytes) -> None:
    np.take(rows, places, axis=0, out=batch, mode="clip")  # "raise" would copy twice


def _put(rows: Bytes, places: Bytes, batch: Bytes) -> None:
    rows[places] = batch


def _aligned(end: int) -> int:
    return -(-end // ALIGNED) * ALIGNED


def _as_bytes(rows: Tensor) -> Bytes:
    """The same memory: numpy knows no bfloat16."""
    return rows.view(torch.uint8).numpy()
