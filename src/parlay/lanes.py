"""The seam to a GPU: what a step asks of a device that works in its own time goes through here.

Lanes, events, captures, memory pools, copies that do not block, the random numbers of captured steps. `Lanes` does
everything at once, for CPUs; `Cuda` is a GPU. Tests put in a third one, a CPU that behaves as badly as CUDA is allowed
to (tests/rehearsal.py). The engine in one process uses no streams, events and graphs of CUDA but through here; the
copier of stores in host memory and the timing of blocks still have their own. The rules for those who call:

- Device work is issued inside `with lane:`. It runs later, after all that this lane was given before.
- Two lanes are in no order, except where one waits for an event of the other.
- A tensor made in one lane and read in another lives until its own lane has waited for the reader.
- A capture takes the work of its lane, and of the lanes that wait for an event of the capture. They must come back.
- A capture keeps no Python: numbers are baked in, and what may change is a tensor. The host cannot wait inside.
- Memory that is let go during a capture may be used by the next capture of the same pool.
- `send` and `fetch` read their source late, and keep it until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor


@dataclass
class Counts:
    """Of what goes through the seam. `waits`: of the host for the device."""

    graphs: int = 0
    launches: int = 0
    copies: int = 0
    waits: int = 0


class Event(Protocol):
    def synchronize(self) -> None:
        """The host waits for it."""


class Graph(Protocol):
    def replay(self) -> None:
        """Give the captured work to the lane that we are in."""


class Lane:
    """A queue of device work. This one does its work when it is issued, so it is its own event."""

    def __init__(self, owner: Lanes) -> None:
        self.owner = owner

    def __enter__(self) -> Self:
        self.owner.inside.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.owner.inside.pop()

    def mark(self) -> Event:
        """Happens when all that this lane was given so far is done."""
        return self

    def wait(self, event: Any) -> None:
        """What this lane is given from now on begins after the event."""

    def follow(self, other: Lane) -> None:
        """What this lane is given from now on begins after all that the other was given so far."""
        self.wait(other.mark())

    def synchronize(self) -> None: ...


class Lanes:
    """Of a CPU. `main` is for what belongs to no stage; it is in no order with the other lanes either."""

    captures = False

    def __init__(self) -> None:
        self.counts = Counts()
        self.inside: list[Any] = []
        self.main: Any = self.lane()

    @property
    def current(self) -> Any:
        """The lane that we are in."""
        return self.inside[-1] if self.inside else self.main

    def lane(self) -> Any:
        return Lane(self)

    def send(self, value: Tensor) -> Tensor:
        """A copy of a tensor of the host on the device, made in the lane that we are in. The host goes on."""
        self.counts.copies += 1
        return value.clone()

    def fetch(self, value: Tensor) -> Tensor:
        """A copy on the host. It is there when an event marked after this has happened."""
        self.counts.copies += 1
        return value.clone()

    def seed(self, seed: int) -> None:
        """Of the random numbers that device work draws from now on, captured or not."""
        torch.default_generator.manual_seed(seed)

    def pool(self) -> Any:
        """Memory that captures may share."""

    def capture(self, lane: Any, pool: Any = None) -> AbstractContextManager[Graph]:
        """What is issued inside is kept and not run. Without a pool the graph has one of its own."""
        raise NotImplementedError("nothing can be captured here: ask `captures` first")

    def fastest_kernels(self) -> AbstractContextManager[Any]:
        """Time all kernels for a shape once and take the fastest: for shapes that stay the same."""
        return nullcontext()


class _Counted:
    """An event or a graph of CUDA."""

    def __init__(self, it: Any, counts: Counts) -> None:
        self.it, self.counts = it, counts

    def synchronize(self) -> None:
        self.counts.waits += 1
        self.it.synchronize()

    def replay(self) -> None:
        self.counts.launches += 1
        self.it.replay()


class _CudaLane(Lane):
    def __init__(self, owner: Cuda, stream: Any) -> None:
        super().__init__(owner)
        self.stream = stream
        self._contexts: list[Any] = []

    def __enter__(self) -> Self:
        self._contexts.append(torch.cuda.stream(self.stream))
        self._contexts[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._contexts.pop().__exit__(*error)

    def mark(self) -> Event:
        return _Counted(self.stream.record_event(), self.owner.counts)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.it)


class Cuda(Lanes):
    """A GPU. `torch.cuda.set_sync_debug_mode("error")` finds waits of the host that do not come through here."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__()
        self.main = _CudaLane(self, torch.cuda.default_stream(device))

    @property
    def current(self) -> Any:
        """Outside of all lanes it is the caller's own stream."""
        return self.inside[-1] if self.inside else _CudaLane(self, torch.cuda.current_stream(self.device))

    def lane(self) -> Any:
        return _CudaLane(self, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def send(self, value: Tensor) -> Tensor:
        self.counts.copies += 1
        # PyTorch keeps pinned memory until it is read: the host may be many steps ahead by then
        return value.pin_memory().to(self.device, non_blocking=True)

    def fetch(self, value: Tensor) -> Tensor:
        self.counts.copies += 1
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    def seed(self, seed: int) -> None:
        """`torch.manual_seed` asks every kind of device; this is called at each step."""
        torch.default_generator.manual_seed(seed)
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, lane: Any, pool: Any = None) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        self.inside.append(lane)
        try:
            # thread_local: stores on the host go on copying in their own threads meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=lane.stream, capture_error_mode="thread_local"):
                yield _Counted(graph, self.counts)
        finally:
            self.inside.pop()
        self.counts.graphs += 1

    @contextmanager
    def fastest_kernels(self) -> Iterator[None]:
        """Not where equal results are asked for."""
        flags = torch.backends.cudnn
        before = flags.benchmark
        flags.benchmark = before or not flags.deterministic
        try:
            yield
        finally:
            flags.benchmark = before
