"""A CPU that behaves as badly as CUDA is allowed to: the seam of `parlay/lanes.py`, for tests.

Work that is issued inside `with lane:` is not done at once. Every aten op is caught below autograd. Views are made at
once. All else gets memory that holds NaN (huge numbers, where they are whole), and joins the lane's queue. It runs when
the host waits, and the lanes go in any order that the events between them allow:

    earliest     each op as soon as it is issued
    latest       only what the host waits for, only then, and the newest first
    forwards     the first lane as far as it can go, then the second
    backwards    the last lane first
    random-7     by ranks of the lanes that are drawn anew now and then; 7 is the seed

A capture keeps the ops and runs none. A replay queues the same ops on the same memory and runs no Python of the caller.
Numbers are baked in. A host wait inside a capture is an error that names the line.

Memory comes from pools: one for each lane, and one for each graph that is given none. What Python has let go is used
again by the same lane, in blocks that are powers of two; which block is left to chance. It is filled with NaN before
the next thing that its lane does. So what is read too late is found, as is what another graph of the pool overwrites.

Storages that come from a lane, from `send`, `adopt` or `to_device` are device memory, all others are the host's. An op
on both is an error, as in CUDA, but for numbers (0 dimensions, read when issued) and copies. What is issued outside of
all lanes belongs to `main`, if it touches device memory; else it is the host's and done at once.

Random ops draw from the source that they are issued in, from its seed of that moment on, in the order in which the host
issues them. A captured op draws anew in each replay, the number that it would have drawn uncaptured.

What it does not show:

- Time: how fast anything is, or how much of a GPU works.
- Two ops at the same moment. An op is whole here: a race is a wrong order of ops, never half a tensor.
- CUDA's kernels: their rounding, workspaces, the algorithms that cuDNN chooses, the ops that autocast lowers (a CPU
  has a list of its own), the ops that wait for the host or refuse a capture in CUDA only.
- Several threads or devices, NCCL, memory that runs out, a full queue, an error that leaves the device unusable.
- `torch.compile`, ops of one's own that hide what they change, explicit generators, sparse tensors, `set_`, `resize_`,
  an `out=` of the wrong size.
- What goes behind the dispatcher: `data_ptr`, dlpack; and `.cpu()`, `.to("cpu")`, which do nothing on a CPU. The host's
  waits by `.item()`, `tolist`, `numpy`, printing and copies that block are seen.
- The allocator in detail: CUDA splits blocks and joins them, so it may reuse less or more than is reused here.
- Orders that were not tried. No fault found means: none under these schedules.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from parlay.lanes import Lane, Lanes, Source

Thing = TypeVar("Thing", Tensor, nn.Module)
SPOILT = 0x7FFF  # as 16 bits again and again: NaN in float64 to float16, a huge number in any other type
HARMLESS = {"is_same_size", "is_pinned", "_has_compatible_shallow_copy_type"}  # tell of tensors, not of their values
READS = {Tensor.tolist, Tensor.numpy, Tensor.__repr__, Tensor.__format__, Tensor.__array__}  # values without an op


Pool = dict[tuple["RehearsalLane", int], list[Tensor]]
"""Free blocks, by lane and size."""


class HostWait(RuntimeError):
    """The host would wait for the device inside a capture."""


class Promise(Future[Any]):
    """Work that is done when somebody asks for it, and not before."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work: Callable[[], Any] | None = work

    def result(self, timeout: float | None = None) -> Any:
        work, self.work = self.work, None
        if work is not None:
            self.set_result(work())
        return super().result(timeout)


class AtLast(Executor):
    """Threads of the host as the caller's own, and as late as can be."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Promise:  # type: ignore[override]
        return Promise(lambda: fn(*args, **kwargs))

    def map(self, fn: Callable[..., Any], *given: Any, **_: Any) -> Iterator[Any]:
        return map(fn, *given)


class Op:
    """A computation on memory. It holds no tensor of the caller."""

    def __init__(self, name: str, run: Callable[[], Any], source: RehearsalSource | None = None) -> None:
        self.name, self.run, self.source, self.where = name, run, source, _line()


class Node:
    """An op in a queue. It may run when those in `after` are done: the one before it, and what its lane waits for."""

    __slots__ = ("after", "done", "drawn", "number", "op")

    def __init__(self, op: Op, after: list[Node], number: int) -> None:
        self.op, self.after, self.number, self.done = op, after, number, False
        self.drawn = op.source.drawn if op.source is not None else None


class Drawn:
    """Random numbers from one seed on."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()


class RehearsalSource(Source):
    def __init__(self, owner: Rehearsal) -> None:
        super().__init__()
        self.owner, self.drawn = owner, Drawn(0)

    def seed(self, number: int) -> None:
        if self.owner.capturing is not None:
            raise RuntimeError(f"a seed inside a capture, at {_line()}")
        super().seed(number)
        with _disable_current_modes():
            self.drawn = Drawn(number)

    def __enter__(self) -> Self:
        self.owner.sources.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.owner.sources.pop()


class RehearsalEvent:
    """A node, or the number of an op in a graph."""

    def __init__(self, owner: Rehearsal, at: Any, graph: RehearsalGraph | None) -> None:
        self.owner, self.at, self.graph = owner, at, graph

    def synchronize(self) -> None:
        self.owner.host_waits("event.synchronize()", self)


class RehearsalLane(Lane):
    def __init__(self, owner: Rehearsal, number: int) -> None:
        super().__init__(owner)
        self.number = number
        self.queue: deque[Node] = deque()
        self.after: list[Node] = []
        self.pool: Pool = {}
        self.let_go: list[Tensor] = []

    def mark(self, asleep: bool = False) -> RehearsalEvent:  # noqa: ARG002
        graph = self.owner.graph_of(self)
        return RehearsalEvent(self.owner, self.owner.issue(self, Op("event", _do_nothing)), graph)

    def wait(self, event: RehearsalEvent) -> None:
        graph = self.owner.capturing
        if event.graph is not graph and (event.graph is not None or self.owner.graph_of(self) is not None):
            raise RuntimeError(f"a wait across the border of a capture, at {_line()}")
        (self.after if event.graph is None else event.graph.lanes.setdefault(self, [])).append(event.at)


class RehearsalGraph:
    def __init__(self, owner: Rehearsal, root: RehearsalLane, pool: Pool) -> None:
        self.owner, self.root, self.pool = owner, root, pool
        self.lanes: dict[RehearsalLane, list[int]] = {
            root: []
        }  # that take part, and the ops that their next one waits for
        self.ops: list[tuple[Op, RehearsalLane, list[int]]] = []
        self.let_go: dict[RehearsalLane, list[Tensor]] = {}

    def add(self, lane: RehearsalLane, op: Op) -> int:
        blocks = self.let_go.pop(lane, [])
        if blocks:
            self.add(lane, _spoiling(blocks))
        self.ops.append((op, lane, self.lanes[lane]))
        self.lanes[lane] = [len(self.ops) - 1]
        return len(self.ops) - 1

    def end(self) -> None:
        reached, todo = set(), [self.add(self.root, Op("end", _do_nothing))]
        while todo:
            if (i := todo.pop()) not in reached:
                reached.add(i)
                todo += self.ops[i][2]
        for i, (op, _, _) in enumerate(self.ops):
            if i not in reached:
                raise RuntimeError(f"a lane has not come back to its capture: {op.name} at {op.where}")

    def replay(self) -> None:
        owner, here = self.owner, self.owner.current
        if owner.capturing is not None:
            raise RuntimeError(f"a replay inside a capture, at {_line()}")
        owner.counts.launches += 1
        nodes: list[Node] = []
        queues: dict[RehearsalLane, deque[Node]] = {lane: deque() for lane in self.lanes} | {self.root: here.queue}
        owner.branches += [queue for lane, queue in queues.items() if lane is not self.root]
        for op, lane, after in self.ops:
            nodes.append(owner.push(here if lane is self.root else lane, queues[lane], op, [nodes[i] for i in after]))
        owner.go_on(len(nodes))


class Rehearsal(Lanes):
    """`with Rehearsal("latest") as lanes:`, and all torch work of this thread goes through it."""

    captures = True

    def __init__(self, schedule: str) -> None:
        self.order, _, seed = schedule.partition("-")
        if self.order not in {"earliest", "latest", "forwards", "backwards", "random"}:
            raise ValueError(f"no such schedule: {schedule}")
        self.dice, self.memory_dice = random.Random(int(seed or 0)), random.Random(int(seed or 0))
        self.queues: list[deque[Node]] = []
        self.branches: list[deque[Node]] = []  # of replays
        self.ranks: dict[int, float] = {}
        self.blocks: dict[int, Tensor] = {}  # all device memory, by its address
        self.released: deque[tuple[Tensor, Pool, RehearsalLane]] = deque()
        self.readers: dict[int, list[RehearsalLane]] = {}  # other lanes that read a block, by its address
        self.kept: list[tuple[list[Node], tuple[Tensor, Pool, RehearsalLane]]] = []  # let go, and still read by them
        self.capturing: RehearsalGraph | None = None
        self.number = 0
        super().__init__()
        self.sources = [RehearsalSource(self)]
        self.modes: list[Any] = [_Reads(self), _Ops(self)]

    def __enter__(self) -> Self:
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(kind, *error)
        if kind is None:
            self.synchronize()

    @staticmethod
    def aside() -> Any:
        """What is done inside is the host's own: nothing of it is caught."""
        return _disable_current_modes()

    # the seam

    def lane(self) -> RehearsalLane:
        self.queues.append((lane := RehearsalLane(self, len(self.queues))).queue)
        return lane

    def send(self, value: Tensor) -> Tensor:
        """Through memory of the host that is kept until it is read."""
        self.counts.copies += 1
        with _disable_current_modes():
            staged = value.clone()
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # nobody reads what it lies in
            there = self._allocate(staged)
        there.copy_(staged, non_blocking=True)
        return there

    def fetch(self, value: Tensor) -> Tensor:
        self.counts.copies += 1
        with _disable_current_modes():
            here = torch.empty(value.shape, dtype=value.dtype)
            _spoil(here)
        return here.copy_(value, non_blocking=True)

    def threads(self, count: int, name: str) -> Executor:  # noqa: ARG002
        return AtLast()

    def staging(self, count: int) -> Tensor:
        with _disable_current_modes():
            return torch.empty(count, dtype=torch.uint8)

    def keep(self, tensor: Tensor, lane: RehearsalLane) -> None:
        self.readers.setdefault(tensor.untyped_storage().data_ptr(), []).append(lane)

    def source(self) -> RehearsalSource:
        return RehearsalSource(self)

    def adopt(self, *things: Any) -> None:
        """These tensors, and those of these modules, are device memory from now on; others are passed over."""
        for thing in things:
            found = (*thing.parameters(), *thing.buffers()) if isinstance(thing, nn.Module) else (thing,)
            with _disable_current_modes():
                for tensor in found:
                    if isinstance(tensor, Tensor):
                        self.blocks[tensor.untyped_storage().data_ptr()] = _as_bytes(tensor)

    def to_device(self, thing: Thing) -> Thing:
        """On the device: a module itself, a copy of a tensor. Before anything is issued."""
        with _disable_current_modes():
            there: Any = thing.clone() if isinstance(thing, Tensor) else thing
            for tensor in (*there.parameters(), *there.buffers()) if isinstance(there, nn.Module) else (there,):
                self.blocks[tensor.untyped_storage().data_ptr()] = _as_bytes(tensor)
        return there  # type: ignore[no-any-return]

    def pool(self) -> Pool:
        return {}

    @contextmanager
    def capture(self, lane: RehearsalLane, pool: Pool | None = None) -> Iterator[RehearsalGraph]:
        if self.capturing is not None:
            raise RuntimeError(f"a capture inside a capture, at {_line()}")
        self._collect()
        graph = self.capturing = RehearsalGraph(self, lane, {} if pool is None else pool)
        try:
            with lane:
                yield graph
            self._collect()
            graph.end()
        finally:
            self.capturing = None
        self.counts.graphs += 1

    def synchronize(self) -> None:
        self.host_waits("synchronize()", None)

    # queues

    def graph_of(self, lane: RehearsalLane) -> RehearsalGraph | None:
        return self.capturing if self.capturing is not None and lane in self.capturing.lanes else None

    def issue(self, lane: RehearsalLane, op: Op) -> Any:
        if (graph := self.graph_of(lane)) is not None:
            return graph.add(lane, op)
        blocks, lane.let_go = lane.let_go, []
        if blocks:
            self.push(lane, lane.queue, _spoiling(blocks), [])
        node = self.push(lane, lane.queue, op, [])
        self.go_on(1)
        return node

    def push(self, lane: RehearsalLane, queue: deque[Node], op: Op, after: list[Node]) -> Node:
        self.number += 1
        if queue is lane.queue:
            after, lane.after = [*after, *lane.after, *([queue[-1]] if queue else [])], []
        queue.append(node := Node(op, [a for a in after if not a.done], self.number))
        return node

    def go_on(self, issued: int) -> None:
        """The device may work while the host issues."""
        if self.order == "earliest":
            self._run(None)
        elif self.order == "random" and self.dice.random() < 1 - 0.99**issued:
            self._run(None, self.dice.randrange(200))

    def host_waits(self, what: str, event: RehearsalEvent | None) -> None:
        """For one event, or for all there is."""
        if self.capturing is not None:
            raise HostWait(f"{what} waits for the device inside a capture, at {_line()}")
        if event is not None and event.graph is not None:
            raise RuntimeError(f"an event of a capture is waited for outside, at {_line()}")
        self.counts.waits += 1
        self._collect()
        self._run(None if event is None else event.at)

    def _run(self, until: Node | None, most: float = float("inf")) -> None:
        """Until a node is done, or all are, or `most` of them."""
        todo = [until] if until is not None and self.order == "latest" else []
        wanted = set(todo)
        while todo:
            todo += (new := set(todo.pop().after) - wanted)
            wanted |= new
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            while most > 0 and not (until is not None and until.done):
                queues = [q for q in (*self.queues, *self.branches) if q and all(a.done for a in q[0].after)]
                queues = [q for q in queues if not wanted or q[0] in wanted]
                if not queues:
                    if until is not None or any(self.queues):
                        raise RuntimeError("the lanes stand still: an op has failed before")
                    break
                self._do(self._chosen(queues).popleft())
                most -= 1
            self.branches = [q for q in self.branches if q]

    def _chosen(self, queues: list[deque[Node]]) -> deque[Node]:
        if self.order == "random":
            if self.dice.random() < 0.01:
                self.ranks.clear()
            return max(queues, key=lambda q: self.ranks.setdefault(id(q), self.dice.random()))
        if self.order in {"earliest", "latest"}:
            return (min if self.order == "earliest" else max)(queues, key=lambda q: q[0].number)
        return queues[0 if self.order == "forwards" else -1]

    def _do(self, node: Node) -> None:
        try:
            with _drawing(node.drawn) if node.drawn is not None else nullcontext():
                node.op.run()
        except Exception as error:
            error.add_note(f"in {node.op.name}, issued at {node.op.where}")
            raise
        node.done, node.after = True, []

    # memory

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.blocks

    def _memory_of(self, tensor: Tensor) -> Tensor:
        """The same elements, without a hold on the tensor: its memory may be let go while this is queued."""
        storage = self.blocks[tensor.untyped_storage().data_ptr()].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _allocate(self, like: Tensor) -> Tensor:
        lane, graph = self.current, self.graph_of(self.current)
        pool = lane.pool if graph is None else graph.pool
        size = max(1, _span(like) * like.element_size())
        kind = lane, max(512, 1 << (size - 1).bit_length())
        free = pool.setdefault(kind, [])
        if not free or self.memory_dice.random() < 0.25:
            new = torch.empty(kind[1], dtype=torch.uint8)
            _spoil(new)
            self.blocks[new.data_ptr()] = new
            free.append(new)
        block = free.pop(self.memory_dice.randrange(len(free)))
        lease = memoryview(block.numpy())[:size]  # type: ignore[arg-type]  # lives as long as the storage that is made of it
        weakref.finalize(lease, self.released.append, (block, pool, lane)).atexit = False
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.size(), like.stride())

    def _collect(self) -> None:
        """What Python has let go is free for its lane, and spoilt before the next thing that this lane does.

        Sooner it cannot be used again: a lane that has waited for all readers meanwhile disturbs nobody.
        """
        free = deque(what for nodes, what in self.kept if all(node.done for node in nodes))
        self.kept = [(nodes, what) for nodes, what in self.kept if not all(node.done for node in nodes)]
        while self.released:
            what = self.released.popleft()
            readers = self.readers.pop(what[0].data_ptr(), [])
            if readers:
                nodes = [self.push(reader, reader.queue, Op("kept", _do_nothing), []) for reader in readers]
                self.kept.append((nodes, what))
            else:
                free.append(what)
        while free:
            block, pool, lane = free.popleft()
            graph = self.graph_of(lane)
            if pool is lane.pool:
                lane.let_go.append(block)
            elif graph is not None and pool is graph.pool:
                graph.let_go.setdefault(lane, []).append(block)
            pool.setdefault((lane, len(block)), []).append(block)

    # ops

    def read(self, what: str) -> None:
        """The host waits for the lane that we are in, and for no other."""
        self.host_waits(what, self.current.mark() if self.capturing is None else None)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, leaves = func._schema.name.removeprefix("aten::"), _flat((args, kwargs))
        tensors, kinds = [x for x in leaves if isinstance(x, Tensor)], [str(r.type) for r in func._schema.returns]
        makes = not tensors and bool(self.inside) and "Tensor" in kinds
        if func.is_view or name in HARMLESS or not (makes or any(self.is_device(t) for t in tensors)):
            return func(*args, **kwargs)  # no values, or the host's
        if name in {"set_", "resize_", "resize_as_"} or any(isinstance(x, torch.Generator) for x in leaves):
            raise NotImplementedError(f"{func} in a lane, at {_line()}")
        self._collect()
        copies = name == "copy_" and self.is_device(args[0]) != self.is_device(args[1])
        blocks = copies and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))

        def there(x: Any) -> Any:
            if not isinstance(x, Tensor) or (copies and not self.is_device(x)):
                return x.detach() if isinstance(x, Tensor) else x
            if self.is_device(x):
                return self._memory_of(x)
            if x.dim() and x.numel():
                raise RuntimeError(f"{func} on memory of the host and of the device, at {_line()}")
            return x.detach().clone()

        args_there, kwargs_there = _map(there, args), _map(there, kwargs)
        varies = torch.Tag.dynamic_output_shape in func.tags and (
            name != "index" or any(t.dtype == torch.bool for t in tensors)
        )
        if blocks or varies or any("Tensor" not in kind for kind in kinds):
            self.read(f"{func}")
            with torch.no_grad():
                value = func(*args_there, **kwargs_there)
            return args[0] if blocks else _map(lambda v: self.to_device(v) if isinstance(v, Tensor) else v, value)
        dice = torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            result, outs = _written(func, args, kwargs), []
        else:
            result = _map(
                lambda m: m if m is None else self._allocate(m), _results(func, args_there, kwargs_there, dice)
            )
            outs = [x if x is None else self._memory_of(x) for x in _flat(result)]

        def run() -> None:
            if name.startswith(("empty", "new_empty")):
                _map(_spoil, outs)
                return
            for out, value in zip(outs, _flat(func(*args_there, **kwargs_there)), strict=False):
                if out is not None:
                    out.copy_(value)

        self.issue(self.current, Op(str(func), run, self.sources[-1] if dice else None))
        return result


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, owner: Rehearsal) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.owner.op(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    def __init__(self, owner: Rehearsal) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and self.owner.is_device(args[0]):
            self.owner.read(func.__name__)
        return func(*args, **(kwargs or {}))


def _do_nothing() -> None: ...


def _spoiling(blocks: list[Tensor]) -> Op:
    return Op("let go", lambda: _map(_spoil, blocks))


def _map(f: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _map(f, value) for key, value in x.items()}
    return type(x)(_map(f, y) for y in x) if isinstance(x, (list, tuple)) else f(x)


def _flat(x: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, x)
    return found


def _span(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True)) if tensor.numel() else 0


def _as_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _spoil(tensor: Tensor) -> None:
    _as_bytes(tensor).view(torch.int16).fill_(SPOILT)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an op changes and returns."""
    found = []
    for result in func._schema.returns:
        if result.alias_info is None:
            raise NotImplementedError(f"{func} changes arguments and makes new tensors, at {_line()}")
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.before_set == result.alias_info.before_set:
                found.append(kwargs[a.name] if a.name in kwargs else args[i])
    return None if not found else found[0] if len(found) == 1 else tuple(found)


_known: dict[Any, Any] = {}


def _results(func: Any, args: Any, kwargs: Any, dice: bool) -> Any:
    """What an op would make, without memory. It is asked on zeros, so that strides are those of the real kernel."""
    leaves = _flat((args, kwargs))
    key = func, *((x.size(), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves)

    def zeros(x: Any) -> Any:
        return torch.zeros(_span(x), dtype=x.dtype).as_strided(x.size(), x.stride()) if isinstance(x, Tensor) else x

    def bare(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        whole = x if all(s or n < 2 for n, s in zip(x.size(), x.stride(), strict=True)) else x.contiguous()
        return torch.empty_strided(whole.size(), whole.stride(), dtype=whole.dtype, device="meta")

    if key not in _known:
        with _drawing(Drawn(0)) if dice else nullcontext():
            _known[key] = _map(bare, func(*_map(zeros, args), **_map(zeros, kwargs)))
    return _known[key]


@contextmanager
def _drawing(drawn: Drawn) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.set_rng_state(drawn.state)
    yield
    drawn.state = torch.get_rng_state()
    torch.set_rng_state(before)


def _line() -> str:
    """Of the caller, outside of torch and of this."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] in {"torch", "contextlib"}
        or (frame.f_code.co_filename == __file__ and frame.f_code.co_qualname.startswith(("Rehearsal", "Op.", "_")))
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} ({frame.f_code.co_name})"
