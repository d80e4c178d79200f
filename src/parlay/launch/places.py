"""Which stage and replica a rank is, and what the environment says about this process. No torch in this room."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.errors import InputError
from parlay.process import whole_number


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
