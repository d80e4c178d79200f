"""Real processes for the tests of the distributed engine: few, forked from a server that has loaded torch once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed.pipelining", "parlay.trainer", "problems"])


def together(
    ranks: int, work: Callable[..., Any], *given: Any, timeout: float = 60.0, hosts: bool = False
) -> list[Any]:
    """What `work(*given)` returns in each of so many processes; all are ended after the timeout.

    `hosts`: each poses as a host of its own, with all the GPUs of this one.
    """
    port = _free_port()
    processes, ends = [], []
    for rank in range(ranks):
        here, there = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=_rank, args=(there, rank, ranks, port, hosts, work, given), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    try:
        until = time.monotonic() + timeout
        return [_answer(end, rank, until) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(end: Connection, rank: int, until: float) -> Any:
    if not end.poll(max(until - time.monotonic(), 0)):
        pytest.fail(f"rank {rank} has not answered in time")
    try:
        answer, error = pickle.loads(end.recv_bytes())
    except EOFError:
        pytest.fail(f"rank {rank} has died")
    if error:
        pytest.fail(f"rank {rank}: {error}")
    return answer


def _rank(
    end: Connection,
    rank: int,
    ranks: int,
    port: int,
    hosts: bool,
    work: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    if hosts:
        os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(0 if hosts else rank),
        "LOCAL_WORLD_SIZE": str(1 if hosts else ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    try:
        answer = (work(*given), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    end.send_bytes(pickle.dumps(answer))  # as bytes: tensors would go by shared memory, which ends with this process


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
