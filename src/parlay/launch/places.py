"""Which stage and replica a rank is, and what the environment says about this process. No torch in this room."""

from __future__ import annotations

import os
from dataclasses import dataclass

from parlay.errors import InputError

FOR_NCCL = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # its kernels wait for neighbours: no other may stand behind one


@dataclass(frozen=True)
class Place:
    """One process among K x R."""

    rank: int
    stage: int
    replica: int
    stages: int
    replicas: int

    def __str__(self) -> str:
        replica = f", replica {self.replica} of {self.replicas}" if self.replicas > 1 else ""
        return f"stage {self.stage} of {self.stages}{replica}"


def place(rank: int, stages: int, replicas: int) -> Place:
    """Replicas of a stage are neighbours: they average gradients at every step, and so belong on one host."""
    return Place(rank, rank // replicas, rank % replicas, stages, replicas)


def is_worker() -> bool:
    """Has somebody (the launcher, torchrun, SLURM) made this process one of several?"""
    return "RANK" in os.environ


def prepare() -> None:
    """What CUDA reads when it starts, in a process that trains one of several stages. What is set already stays."""
    for name, value in FOR_NCCL.items():
        os.environ.setdefault(name, value)


def rank() -> int:
    """Of this process; 0 where there is only one."""
    return whole_number("RANK", 0)


def world_size() -> int:
    return whole_number("WORLD_SIZE", 1)


def restarted() -> bool:
    """Is this process a later attempt at a run that was begun?"""
    return whole_number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def check_world(stages: int, replicas: int) -> None:
    """A world size that was given must be that of the recipe."""
    given = whole_number("WORLD_SIZE", stages * replicas)
    if given == stages * replicas:
        return
    product = f"{stages} stages" if replicas == 1 else f"{stages} stages x {replicas} replicas"
    hint = f"start {stages * replicas} processes"
    if given % replicas == 0:
        hint += f", or write --stages {given // replicas}"
    raise InputError(f"WORLD_SIZE is {given} and {product} need {stages * replicas}: {hint}")


def check_tasks(processes: int) -> None:
    """Under SLURM's srun every task would become a launcher."""
    tasks = whole_number("SLURM_STEP_NUM_TASKS", 1)
    if tasks > 1:
        raise InputError(
            f"srun has started {tasks} tasks, each of which would start {processes} processes: write "
            "srun --ntasks-per-node=1 torchrun ... -m parlay.cli train ..., as in docs/running.md"
        )


def whole_number(variable: str, default: int) -> int:
    """The value of an environment variable."""
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.strip().isdecimal():
        raise InputError(f"the environment variable {variable} is '{text}': write a whole number, or unset it")
    return int(text)


def seconds(variable: str, default: float) -> float:
    """The value of an environment variable."""
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"the environment variable {variable} is '{text}': write a number of seconds above 0")
    return value
