"""The processes of a distributed run: which stage each of them trains, and the groups in which they talk.

    rank = stage · R + replica      replicas of a stage stand beside each other: they average gradients at every step

Nothing here trains. A world is formed from the variables that `torchrun` and the launcher set (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, ...); a process group that stands already is used.
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
from parlay.engines.crew import Crew
from parlay.engines.links import Link, Lost, Neighbour, Rounds, Waits
from parlay.engines.meeting import meet
from parlay.errors import InputError

T = TypeVar("T")
POSTED = 4  # times the usual patience that gloo has for what was posted ahead; a wait for it ends after once that
LONG = 20  # times the usual patience, while another process measures, or writes or reads a large checkpoint


def started() -> bool:
    """Was this process started as one of several?"""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@final
class World(Crew):
    """All processes of a run. Made before any group is formed, so that wrong numbers are refused at once."""

    def __init__(self, stages: int, replicas: int = 1) -> None:
        process.prepare_cuda()
        if "RANK" not in os.environ and not dist.is_initialized():
            raise InputError(
                "the distributed engine needs a process per stage: write `parlay train --engine distributed`, or "
                f"start your script with torchrun --nproc-per-node {stages * replicas}"
            )
        self.size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        if self.size != stages * replicas:
            by = f" with {replicas} replicas each" if replicas > 1 else ""
            raise InputError(
                f"{self.size} processes for {stages} stages{by}: start {stages * replicas} of them, "
                f"or write --stages {max(self.size // replicas, 1)}"
            )
        self.stages, self.replicas = stages, replicas
        self.stage, self.replica = divmod(self.rank, replicas)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.leads = self.rank == 0
        self.own_gpu = False
        self._groups: list[Any] = []
        self.waits = Waits(self.stage)
        self.mesh: DeviceMesh | None = None

    def device(self, asked: str) -> torch.device:
        """Of this process: its own GPU where there is one for each, the CPU otherwise."""
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
            shape, names = (self.stages, self.replicas), ("stage", "replica")
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

    def neighbours(self, device: torch.device) -> tuple[Neighbour | None, Neighbour | None]:
        """The stage before this process's and the one behind it. All form the groups of all pairs, in one order."""
        found: dict[int, Neighbour] = {}
        signs.beat()
        for k in range(self.stages - 1):
            for r in range(self.replicas):
                low, high = self.rank_of(k, r), self.rank_of(k + 1, r)
                up, down = (self._pair(low, high) for _ in range(2))
                if self.rank in (low, high):
                    peer = k if self.rank == high else k + 1
                    common = f"stage {peer}", device, self.waits
                    found[peer] = Neighbour(Link(up, low, high, *common), Link(down, high, low, *common))
                    if self.own_gpu:
                        with signs.blocked():
                            found[peer].meet()
        return found.get(self.stage - 1), found.get(self.stage + 1)

    def rounds(self) -> Rounds | None:
        """For messages that must go together: those between GPUs."""
        return Rounds(self._gpus, self.stage) if self._gpus is not None else None

    def _pair(self, a: int, b: int) -> Any:
        patience = timedelta(seconds=POSTED * signs.patience())
        return self._group([a, b], patience, "nccl" if self.own_gpu else "gloo")

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        return stage * self.replicas + (self.replica if replica is None else replica)

    def pooled(self, sums: Tensor) -> Tensor:
        """The sums over all replicas of this stage."""
        return self.summed(sums, self.peers())

    def column(self) -> Any:
        """The group of all stages of this replica."""
        assert self.mesh is not None
        return self.mesh.get_group("stage")

    def peers(self) -> Any:
        """The group of all replicas of this stage."""
        assert self.mesh is not None
        return self.mesh.get_group("replica")

    def led(self, work: Callable[[], T]) -> T:
        said = self._said(_tried(work, 0) if self.leads else b"", 0)
        return _taken([said])[0]  # type: ignore[no-any-return]

    def gathered(self, work: Callable[[], T]) -> list[T]:
        mine = _tried(work, self.rank)
        return _taken([self._said(mine, rank) for rank in range(self.size)])

    def told(self, value: T, by: int) -> T:
        """The value that the process of this rank has."""
        return _taken([self._said(_tried(lambda: value, self.rank), by)])[0]  # type: ignore[no-any-return]

    def spread(self, tensors: list[Tensor], by: int) -> None:
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
        return Lost(f"stage {self.stage}", "another stage")

    def close(self) -> None:
        """Give up the groups of this run; the processes stay joined."""
        if self.mesh is None:
            return
        self.mesh = None
        groups, self._groups = self._groups, []
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


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
