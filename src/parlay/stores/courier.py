"""Between host and GPU: batches of rows go in and out while the GPU trains."""

from collections import deque
from collections.abc import Set
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class _Ahead:
    """A batch that was asked for ahead of its gather."""

    ids: list[int]
    batch: Future[tuple[Tensor, torch.cuda.Event]]


@dataclass(frozen=True)
class _Write:
    """Values on their way to the host."""

    ids: Set[int]
    done: Future[None]


@final
class Courier:
    """Carries batches between rows in host memory and a GPU, behind the back of the one who trains.

    One thread reads rows and one writes them, each in the order in which it was asked. A read waits for writes of the
    same rows that came before it: so a gather sees every scatter. Other reads wait for nothing, and are done steps
    before they are needed. Copies run on two side streams, one for each direction, from and to pinned buffers;
    PyTorch's host allocator keeps a buffer until its copy is done. A batch that was prepared costs the gather a wait on
    one event. Ids are best given on the CPU: reading them from the GPU waits for it.

    The threads call CUDA when they like, so `settle()` (by `Store.tensor()`) before a CUDA graph is captured.
    """

    # Finished steps of which the values may be still on their way: bounds the pinned memory when writing is slow.
    WRITES = 2

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self._rows = rows
        # Copied by numpy, row by row in one thread: torch divides even this among all cores, and their meeting again
        # takes longer than 8 MiB (4.9 ms in place of 0.6 on two cores of which one was busy).
        self._bytes = _as_bytes(rows)
        self._device = device
        self._inward, self._outward = _side_streams(device)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="parlay-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="parlay-write")
        self._ahead: _Ahead | None = None
        self._writes: deque[_Write] = deque()

    def prepare(self, ids: Tensor) -> None:
        self._ahead = self._ask(ids.tolist())

    def fetch(self, ids: Tensor) -> Tensor:
        wanted = ids.tolist()
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.ids != wanted:
            ahead = self._ask(wanted)
        batch, arrived = ahead.batch.result()
        while self._writes and self._writes[0].done.done():
            self._writes.popleft().done.result()  # failed writes come out here
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        # The batch was allocated on the side stream: without this its memory could be reused under our reads.
        batch.record_stream(stream)
        return batch

    def bring(self, ids: Tensor, values: Tensor) -> None:
        """`values` are the courier's from here on: they are read later, on another stream."""
        places = ids.tolist()
        while len(self._writes) >= self.WRITES:
            self._writes.popleft().done.result()
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            buffer.copy_(values, non_blocking=True)
            values.record_stream(self._outward)
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(self._outward)
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
            futures.wait([self._ahead.batch])
            self._ahead = None

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._reader.shutdown()
            self._writer.shutdown()

    def _ask(self, ids: list[int]) -> _Ahead:
        before = [write.done for write in self._writes if not write.ids.isdisjoint(ids)]
        return _Ahead(ids, self._reader.submit(self._read, ids, before))

    def _read(self, ids: list[int], before: list[Future[None]]) -> tuple[Tensor, torch.cuda.Event]:
        futures.wait(before)
        with torch.cuda.stream(self._inward):
            buffer = torch.empty(len(ids), self._rows.shape[1], dtype=self._rows.dtype, pin_memory=True)
            np.take(self._bytes, ids, axis=0, out=_as_bytes(buffer), mode="clip")  # "raise" would copy twice
            return buffer.to(self._device, non_blocking=True), self._inward.record_event()

    def _write(self, ids: list[int], buffer: Tensor, arrived: torch.cuda.Event) -> None:
        arrived.synchronize()
        self._bytes[ids] = _as_bytes(buffer)


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Of all couriers: a GPU has few queues, and with two streams each they would stand behind a step's kernels in one.

    Those of high priority have queues of their own.
    """
    inward, outward = (torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
    return inward, outward


def _as_bytes(rows: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The same memory: numpy knows no bfloat16."""
    return rows.view(torch.uint8).numpy()
