"""The seam to a GPU: what a step asks of a device that works in its own time goes through here.

Lanes, events, captures, memory pools, copies that do not block, threads that copy, random numbers of captured steps.
`Lanes` does everything at once, for CPUs; `Cuda` is a GPU. Tests put in a third one, a CPU that behaves as badly as
CUDA is allowed to (tests/rehearsal.py). No other module names CUDA's streams, events and graphs. The rules for those
who call:

- Device work is issued inside `with lane:`. It runs later, after all that this lane was given before.
- Two lanes are in no order, except where one waits for an event of the other.
- A tensor made in one lane and read in another lives until its own lane has waited for the reader.
- A capture takes the work of its lane, and of the lanes that wait for an event of the capture. They must come back.
- A capture keeps no Python: numbers are baked in, and what may change is a tensor. The host cannot wait inside.
- Memory that is let go during a capture may be used by the next capture of the same pool.
- `send` and `fetch` read their source late, and keep it until then. Each thread is in lanes of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
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

    def mark(self, asleep: bool = False) -> Event:  # noqa: ARG002
        """Happens when all that this lane was given so far is done. `asleep`: whoever waits for it sleeps meanwhile."""
        return self

    def wait(self, event: Any) -> None:
        """What this lane is given from now on begins after the event."""

    def follow(self, other: Lane) -> None:
        """What this lane is given from now on begins after all that the other was given so far."""
        self.wait(other.mark())

    def synchronize(self) -> None: ...


class Source:
    """Random numbers of one pass: what is drawn inside `with source:` follows from its last seed alone.

    The seed is set by the host before the pass, or before the replay of a capture that holds the pass.
    """

    def __init__(self) -> None:
        self.number = 0

    def seed(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> Self:
        torch.manual_seed(self.number)
        return self

    def __exit__(self, *error: object) -> None: ...


class Lanes:
    """Of a CPU. `main` is for what belongs to no stage; it is in no order with the other lanes either."""

    captures = False

    def __init__(self) -> None:
        self.counts = Counts()
        self._where = threading.local()
        self.main: Any = self.lane()

    @property
    def inside(self) -> list[Any]:
        """The lanes that this thread is in, one inside the other."""
        if not hasattr(self._where, "lanes"):
            self._where.lanes = []
        found: list[Any] = self._where.lanes
        return found

    @property
    def current(self) -> Any:
        """The lane that we are in."""
        return self.inside[-1] if self.inside else self.main

    def lane(self) -> Any:
        return Lane(self)

    def copy_lanes(self) -> tuple[Any, Any]:
        """For copies between host and device beside all other work: inward and outward."""
        return self.lane(), self.lane()

    def threads(self, count: int, name: str) -> Executor:
        """Threads of the host that copy while the device works."""
        return ThreadPoolExecutor(count, thread_name_prefix=name)

    def staging(self, count: int) -> Tensor:
        """So many bytes of the host, from which and into which copies need not wait."""
        return torch.empty(count, dtype=torch.uint8)

    def keep(self, tensor: Tensor, lane: Any) -> None:
        """The tensor, made in another lane, lives until this lane has done what it was given so far."""

    def send(self, value: Tensor) -> Tensor:
        """A copy of a tensor of the host on the device, made in the lane that we are in. The host goes on."""
        self.counts.copies += 1
        return value.clone()

    def fetch(self, value: Tensor) -> Tensor:
        """A copy on the host. It is there when an event marked after this has happened."""
        self.counts.copies += 1
        return value.clone()

    def source(self) -> Any:
        """Made before the captures that draw from it."""
        return Source()

    def pool(self) -> Any:
        """Memory that captures may share."""

    def capture(self, lane: Any, pool: Any = None) -> AbstractContextManager[Graph]:
        """What is issued inside is kept and not run. Without a pool the graph has one of its own."""
        raise NotImplementedError("nothing can be captured here: ask `captures` first")

    def fastest_kernels(self) -> AbstractContextManager[Any]:
        """Time all kernels for a shape once and take the fastest: for shapes that stay the same."""
        return nullcontext()

    def synchronize(self) -> None:
        """The host waits for all that was given to the device."""

    def seconds(self, work: Callable[[], None]) -> float:
        """That the device takes for this work, without what the host takes to give it."""
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


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

    def mark(self, asleep: bool = False) -> Event:
        event = torch.cuda.Event(blocking=asleep)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _Counted(event, self.owner.counts)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.it)


class _CudaSource(Source):
    """A state of CUDA's generator, which captures know by itself: a replay draws from its seed of that moment."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._default: Any = torch.cuda.default_generators[index]
        self.generator: Any = self._default.clone_state()
        self.used = False
        """Has anything been drawn? A captured step must know, and pays for, those sources alone."""
        self._before: Any = None

    def seed(self, number: int) -> None:
        super().seed(number)
        self.generator.manual_seed(number)

    def __enter__(self) -> Self:
        torch.default_generator.manual_seed(self.number)
        self._before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self.generator)
        return self

    def __exit__(self, *error: object) -> None:
        self._default.graphsafe_set_state(self._before)
        if not self.used and not torch.cuda.is_current_stream_capturing():
            self.used = self.generator.get_offset() > 0


class Cuda(Lanes):
    """A GPU. `torch.cuda.set_sync_debug_mode("error")` finds waits of the host that do not come through here."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sources: list[_CudaSource] = []
        super().__init__()
        self.main = _CudaLane(self, torch.cuda.default_stream(device))

    @property
    def current(self) -> Any:
        """Outside of all lanes it is the caller's own stream."""
        return self.inside[-1] if self.inside else _CudaLane(self, torch.cuda.current_stream(self.device))

    def lane(self) -> Any:
        return _CudaLane(self, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def copy_lanes(self) -> tuple[Any, Any]:
        """The same for all: a GPU has few queues, and those of high priority have queues of their own."""
        inward, outward = _side_streams(self.device)
        return _CudaLane(self, inward), _CudaLane(self, outward)

    def staging(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def keep(self, tensor: Tensor, lane: Any) -> None:
        tensor.record_stream(lane.stream)

    def send(self, value: Tensor) -> Tensor:
        self.counts.copies += 1
        # PyTorch keeps pinned memory until it is read: the host may be many steps ahead by then
        return value.pin_memory().to(self.device, non_blocking=True)

    def fetch(self, value: Tensor) -> Tensor:
        self.counts.copies += 1
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    def source(self) -> Any:
        self._sources.append(_CudaSource(self.device))
        return self._sources[-1]

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, lane: Any, pool: Any = None) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        for source in self._sources:
            if source.used:
                graph.register_generator_state(source.generator)
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

    def synchronize(self) -> None:
        self.counts.waits += 1
        torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], None]) -> float:
        with torch.cuda.device(self.device):  # events belong to the current device, which may be another one
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # Small kernels take longer to launch than to run. While the device sleeps (a few milliseconds) the launches
            # queue up, and the events then see what a captured graph would take.
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            _Counted(end, self.counts).synchronize()
        return float(start.elapsed_time(end)) / 1000


@cache
def _side_streams(device: torch.device) -> tuple[Any, Any]:
    inward, outward = (torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
    return inward, outward


def lanes_of(device: torch.device) -> Lanes:
    return Cuda(device) if device.type == "cuda" else Lanes()
