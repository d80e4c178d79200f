"""The processes of a run: which stages each of them trains, and the groups in which they talk.

    position = rank // R, replica = rank % R      replicas stand beside each other: they average gradients at every step
    stages K·p//P to K·(p+1)//P - 1               at position p of P

Nothing here trains. Processes meet by the variables that `torchrun` and the launcher set (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, ...); a process group that stands already is used.

All of them run the same training loop: they make the same calls in the same order. What only one may do (files, locks)
the leader does, and all learn how it went: an error of one is an error of all.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parlay import process, signs
from parlay.engine.gloo import Gloo, Ways
from parlay.engine.meeting import meet
from parlay.engine.nccl import Nccl
from parlay.engine.transport import Lost, Neighbours, Side, Transport, Waits
from parlay.errors import InputError
from parlay.stage.precision import chosen_device

T = TypeVar("T")
POSTED = 4  # times the usual patience that gloo has for what was posted ahead; a wait for it ends after once that
LONG = 20  # times the usual patience, while another process measures, or writes or reads a large checkpoint


def started() -> bool:
    """Was this process started as one of several?"""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


class World:
    """A single process, which has all stages."""

    rank = replica = 0
    size = replicas = 1
    leads = True
    """Does this process write the run folder and talk to the user?"""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.own = range(stages)

    def device(self, asked: str | torch.device) -> torch.device:
        """The one that this process trains on."""
        return chosen_device(asked)

    def by_leader(self, work: Callable[[], T]) -> T:
        """What `work` gives to the leader, to all; the others do not call it. Its error is raised everywhere."""
        return work()

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives to each process, to all, in the order of the ranks. One's error is raised everywhere."""
        return [work()]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` gives to this process; what one process cannot do all refuse."""
        made: list[T] = []
        self.gather(lambda: made.append(work()))
        return made[0]

    def on_this_host(self, amount: int) -> int:
        """The sum over the processes of this host."""
        return amount


@final
class Processes(World):
    """Several. Made before any group is formed, so that wrong numbers are refused at once."""

    def __init__(self, stages: int, replicas: int = 1, processes: int | None = None) -> None:
        """`processes` share the stages of a replica; None: one for each stage."""
        super().__init__(stages)
        count = processes or stages
        if not 1 <= count <= stages:
            raise InputError(f"{count} processes for {stages} stages: write --processes 1 to {stages}")
        process.prepare_cuda()
        if "RANK" not in os.environ and not dist.is_initialized():
            raise InputError(
                "the distributed engine needs a process per stage: write `parlay train --engine distributed`, or "
                f"start your script with torchrun --nproc-per-node {count * replicas}"
            )
        self.size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        if self.size != count * replicas:
            by = f" with {replicas} replicas each" if replicas > 1 else ""
            raise InputError(
                f"{self.size} processes for {count} stages{by}: start {count * replicas} of them, "
                f"or write --stages {max(self.size // replicas, 1)}"
            )
        self.count, self.replicas = count, replicas
        self.position, self.replica = divmod(self.rank, replicas)
        self.own = self._stages_at(self.position)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.leads = self.rank == 0
        self.own_gpu = False
        self._groups: list[Any] = []
        self.waits = Waits(self.own[0])
        self.mesh: DeviceMesh | None = None

    def _stages_at(self, position: int) -> range:
        return range(self.stages * position // self.count, self.stages * (position + 1) // self.count)

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        position = next(p for p in range(self.count) if stage in self._stages_at(p))
        return position * self.replicas + (self.replica if replica is None else replica)

    def device(self, asked: str | torch.device) -> torch.device:
        """Its own GPU where there is one for each process, the CPU otherwise."""
        if isinstance(asked, torch.device):
            return asked
        count = torch.cuda.device_count()
        if asked == "cuda" and count == 0:
            raise InputError("no GPU to be found: write --device cpu")
        if asked not in ("auto", "cpu", "cuda"):
            raise InputError(f"unknown device '{asked}': write auto, cpu or cuda")
        return torch.device("cuda", self.local_rank % count) if asked != "cpu" and count else torch.device("cpu")

    def share_cores(self) -> None:
        """Processes of one host divide its cores; a user who has set OMP_NUM_THREADS has divided them already."""
        if self.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max((os.cpu_count() or 1) // self.local_size, 1))

    def open(self, device: torch.device) -> None:
        """Form the groups; again, it does nothing. All processes call it."""
        if self.mesh is not None:
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.share_cores()
        patience = timedelta(seconds=signs.patience())
        with signs.blocked():
            # NCCL wants a GPU for each process; where several share one, gloo carries over the host
            self.own_gpu = device.type == "cuda" and torch.cuda.device_count() >= self.local_size
            joined("cpu:gloo,cuda:nccl" if self.own_gpu else "gloo", patience)
            shape, names = (self.count, self.replicas), ("stage", "replica")
            self.mesh = init_device_mesh("cuda" if self.own_gpu else "cpu", shape, mesh_dim_names=names)
            everybody = list(range(self.size))
            self.pulse = self._group(everybody, POSTED * patience, "gloo")
            self._control = self._group(everybody, LONG * patience, "gloo")
            self._gpus = self._group(everybody, POSTED * patience, "nccl") if self.own_gpu else None
            if self._gpus is not None:
                self.agreed(torch.zeros((), device=device)).wait()
                torch.cuda.synchronize(device)

    def _group(self, ranks: list[int], timeout: timedelta, backend: str) -> Any:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        self._groups.append(group)
        return group

    def transport(self, device: torch.device) -> Transport:
        """To the processes before and after this one. All form the groups of all pairs, in one order."""
        ways: dict[Side, Ways] = {}
        peers: dict[Side, tuple[int, int]] = {}
        signs.beat()
        for position in range(self.count - 1):
            for r in range(self.replicas):
                low, high = position * self.replicas + r, (position + 1) * self.replicas + r
                up, down = (None, None) if self.own_gpu else (self._pair(low, high), self._pair(low, high))
                if self.rank == low:
                    ways[Side.AFTER], peers[Side.AFTER] = Ways(down, up), (high, self._stages_at(position + 1)[0])
                elif self.rank == high:
                    ways[Side.BEFORE], peers[Side.BEFORE] = Ways(up, down), (low, self._stages_at(position)[-1])
        neighbours = Neighbours(peers.get(Side.BEFORE), peers.get(Side.AFTER))
        if not self.own_gpu:
            return Gloo(neighbours, device, ways, self.waits)
        made = Nccl(neighbours, device, self._gpus, self.own[0])
        with signs.blocked():
            made.connect()
        return made

    def _pair(self, a: int, b: int) -> Any:
        return self._group([a, b], timedelta(seconds=POSTED * signs.patience()), "gloo")

    def over_replicas(self, sums: Tensor) -> Tensor:
        """The sums over all replicas of these stages."""
        return self.summed(sums, self.peers())

    def column(self) -> Any:
        """The group of all stages of this replica."""
        assert self.mesh is not None
        return self.mesh.get_group("stage")

    def peers(self) -> Any:
        """The group of all replicas of these stages."""
        assert self.mesh is not None
        return self.mesh.get_group("replica")

    def by_leader(self, work: Callable[[], T]) -> T:
        said = self._said(_tried(work, 0) if self.leads else b"", 0)
        return _taken([said])[0]  # type: ignore[no-any-return]

    def gather(self, work: Callable[[], T]) -> list[T]:
        mine = _tried(work, self.rank)
        return _taken([self._said(mine, rank) for rank in range(self.size)])

    def on_this_host(self, amount: int) -> int:
        first = self.rank - self.local_rank
        return sum(self.gather(lambda: amount)[first : first + self.local_size])

    def broadcast(self, value: T, by: int) -> T:
        """The value that the process of this rank has, to all."""
        return _taken([self._said(_tried(lambda: value, self.rank), by)])[0]  # type: ignore[no-any-return]

    def fill(self, tensors: list[Tensor], by: int) -> None:
        """Give all processes the values that these tensors, on the CPU, have at one of them."""
        with self.naming_the_lost():
            works = [dist.broadcast(tensor, by, group=self._control, async_op=True) for tensor in tensors]
            for work in works:
                self.finish(work, LONG)

    def summed(self, tensor: Tensor, group: Any) -> Tensor:
        """The sum over the processes of a group, in place."""
        with self.naming_the_lost():
            work = dist.all_reduce(tensor, group=group, async_op=True)
            if self.own_gpu:  # NCCL holds the stream, not the process
                work.wait()
            else:
                self.finish(work)
        return tensor

    def agreed(self, flag: Tensor) -> Any:
        """Begin to make a number on the GPU the greatest that any process has."""
        with self.naming_the_lost():
            return dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._gpus, async_op=True)

    def finish(self, work: Any, times: int = 1) -> None:
        """Wait for something that gloo does: in slices, so that signals are handled."""
        with self.naming_the_lost():
            self.waits.until(work.is_completed, "another stage", times)
            work.wait()

    def _said(self, mine: bytes, by: int) -> bytes:
        """The bytes that one process has, to all."""
        with self.naming_the_lost():
            length = torch.tensor([len(mine)])
            self.finish(dist.broadcast(length, by, group=self._control, async_op=True), LONG)
            content = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == by:
                content = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            self.finish(dist.broadcast(content, by, group=self._control, async_op=True), LONG)
        return content.numpy().tobytes()

    def naming_the_lost(self) -> Lost:
        return Lost(f"stage {self.own[0]}", "another stage")

    def close(self) -> None:
        """Give up the groups of this run; the processes stay joined."""
        if self.mesh is None:
            return
        self.mesh = None
        groups, self._groups = self._groups, []
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def world_of(engine: str, stages: int, replicas: int = 1, processes: int | None = None) -> World:
    """The processes of a run: those that were started together, or this one alone."""
    if engine not in ("auto", "in-process", "distributed"):
        raise InputError(f"unknown engine '{engine}': write auto, in-process or distributed")
    if engine == "distributed" or (engine == "auto" and started()):
        return Processes(stages, replicas, processes)
    if replicas > 1:
        raise InputError("replicas need a process for each: write engine distributed, or leave them out")
    return World(stages)


def _tried(work: Callable[[], Any], rank: int) -> bytes:
    """What came of it, its error included, to be sent. A note on the error says whose it was."""
    try:
        return pickle.dumps((work(), None))
    except Exception as error:
        error.add_note(f"rank {rank}")
        try:
            told = pickle.dumps((None, error))
            pickle.loads(told)
        except Exception:  # an error that cannot travel goes as its text
            stand_in = RuntimeError(f"{type(error).__name__}: {error}")
            stand_in.add_note(f"rank {rank}")
            return pickle.dumps((None, stand_in))
        return told


def _taken(said: list[bytes]) -> list[Any]:
    found = [pickle.loads(part) for part in said]
    for _, error in found:
        if error is not None:
            raise error
    return [value for value, _ in found]


def joined(backend: str, patience: timedelta) -> None:
    """One process group for the life of this process: formed a second time, it would find the first one's addresses."""
    if not dist.is_initialized():
        store, rank, size = meet(signs.timeout() * signs.STARTING)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
