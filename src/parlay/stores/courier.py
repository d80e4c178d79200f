"""Between host and GPU: batches of rows go in and out while the GPU trains."""

from collections import deque
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Ahead:
    """A batch that was asked for ahead of its gather."""

    ids: Tensor
    batch: Future[tuple[Tensor, torch.cuda.Event]]


@final
class Courier:
    """Carries batches between rows in host memory and a GPU, behind the back of the one who trains.

    One worker thread does all reads and writes of the rows, in the order in which they were asked for: this alone makes
    a gather see every scatter before it. Copies run on two side streams, one for each direction, from and to pinned
    buffers; PyTorch's host allocator keeps a buffer until its copy is done. A batch that was prepared costs the
    gather a wait on one event. Ids are best given on the CPU: reading them from the GPU waits for it.

    The worker calls CUDA when it likes, so `settle()` (by `Store.tensor()`) before a CUDA graph is captured.
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
        self._ahead = self._ask(ids)

    def fetch(self, ids: Tensor) -> Tensor:
        ids = ids.cpu()
        ahead, self._ahead = self._ahead, None
        if ahead is None or not torch.equal(ahead.ids, ids):
            ahead = self._ask(ids)
        batch, arrived = ahead.batch.result()
        # Failed writes come out here: those before the batch are done.
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()
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

    def settle(self) -> None:
        """Until all that was brought is in the rows and nothing is being read; what was prepared is dropped."""
        while self._writes:
            self._writes.popleft().result()
        if self._ahead is not None:
            futures.wait([self._ahead.batch])
            self._ahead = None

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._worker.shutdown()

    def _ask(self, ids: Tensor) -> _Ahead:
        ids = _own_ids(ids)
        return _Ahead(ids, self._worker.submit(self._read, ids))

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
