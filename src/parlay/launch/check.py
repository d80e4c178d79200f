"""What can be refused is refused here, before any process is started."""

from __future__ import annotations

import sys

import torch

from parlay import data, faults, models, signs
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.launch.rank import check_world
from parlay.partitioning import Partition, partition
from parlay.process import whole_number
from parlay.run import board
from parlay.run.setup import make_method


def check(recipe: Recipe) -> Partition:
    """The network's shape, cut as the recipe says (evenly where it is yet to be measured), without its numbers."""
    processes = recipe.stages * recipe.replicas
    if sys.platform != "linux":  # pidfd, /proc, a signal at a parent's death
        raise InputError(f"the launcher needs Linux, and this is {sys.platform}: start the processes by torchrun")
    check_world(recipe.stages, recipe.replicas)
    tasks = whole_number("SLURM_STEP_NUM_TASKS", 1)
    if tasks > 1:
        raise InputError(
            f"srun has started {tasks} tasks, each of which would start {processes} processes: write "
            "srun --ntasks-per-node=1 torchrun ... -m parlay.cli train ..., as in docs/running.md"
        )
    signs.timeout()
    faults.arm(recipe.stages)
    if recipe.device == "cuda" and torch.cuda.device_count() == 0:
        raise InputError(f"0 GPUs for {processes} processes: write --device cpu")
    make_method(recipe)
    if recipe.tensorboard:
        board.check()
    shape = data.Synthetic(recipe.shape(), recipe.synthetic_classes, recipe.synthetic_samples, 1)
    facts = data.facts(recipe.dataset, shape)
    with torch.device("meta"):
        model = models.build(recipe.model, facts.shape, facts.classes)
        example = torch.empty(2, *facts.shape)
    return partition(model, recipe.stages, example, "even" if recipe.partition == "cost" else recipe.cuts())
