"""Real processes for the tests: few, forked from a server that has loaded torch once.

together   what a function returns in each of several ranks
commands   how a command of `parlay` ends in each of several ranks, started as torchrun starts them
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay.bench.processes import SERVER, Children
from parlay.cli import main
from parlay.launch.rank import end

SERVER.set_forkserver_preload(["parlay.bench.cpu", "parlay.run", "parlay.launch.supervise", "problems"])


def together(
    ranks: int, work: Callable[..., Any], *given: Any, timeout: float = 60.0, hosts: bool = False
) -> list[Any]:
    """What `work(*given)` returns in each of so many processes; all are ended after the timeout.

    `hosts`: each poses as a host of its own, with all the GPUs of this one.
    """
    port = _free_port()
    children = Children("ranks", _rank, [(rank, ranks, port, hosts, work, given) for rank in range(ranks)])
    try:
        return [pickle.loads(answer) for answer in children.hear(timeout)]
    except RuntimeError as error:
        pytest.fail(str(error))
    finally:
        children.close()


def _rank(
    end: Connection, rank: int, ranks: int, port: int, hosts: bool, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    _become(rank, ranks, port, hosts)
    try:
        # as bytes: tensors would go by shared memory, which ends with this process
        end.send((pickle.dumps(work(*given)), None))
    except BaseException:
        end.send((None, traceback.format_exc()))


def commands(ranks: int, *words: object, timeout: float = 60.0) -> list[tuple[int, str]]:
    """Exit code (negative: the signal) and output of `parlay WORDS` in each of so many ranks."""
    port, given = _free_port(), list(map(str, words))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            SERVER.Process(target=_command, args=(given, dict(os.environ), log, rank, ranks, port), daemon=True)
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + timeout
        for process in processes:
            process.join(max(until - time.monotonic(), 0))
            process.kill()
            process.join()
        return [(process.exitcode or 0, log.read_text()) for process, log in zip(processes, logs, strict=True)]


def _command(words: list[str], environment: dict[str, str], log: Path, rank: int, ranks: int, port: int) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ |= environment
    _become(rank, ranks, port)
    end(main(words))


def _become(rank: int, ranks: int, port: int, hosts: bool = False) -> None:
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


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
