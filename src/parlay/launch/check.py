"""What can be refused is refused here, before any process is started."""

from __future__ import annotations

import sys

import torch

from parlay import data, faults, models
from parlay.errors import InputError
from parlay.launch import heartbeat, places
from parlay.partitioning import Partition, partition
from parlay.recipe import Recipe
from parlay.run import board
from parlay.run.setup import make_method


def check(recipe: Recipe) -> Partition:
    """The network's shape, cut as the recipe says (evenly where it is yet to be measured), without its numbers."""
    _check_platform()
    places.check_world(recipe.stages, recipe.replicas)
    places.check_tasks(recipe.stages * recipe.replicas)
    heartbeat.timeout()
    faults.arm(recipe.stages)
    _check_devices(recipe)
    make_method(recipe)
    if recipe.tensorboard:
        board.check()
    shape = data.Synthetic(recipe.shape(), recipe.synthetic_classes, recipe.synthetic_samples, 1)
    facts = data.facts(recipe.dataset, shape)
    with torch.device("meta"):
        model = models.build(recipe.model, facts.shape, facts.classes)
        example = torch.empty(2, *facts.shape)
    return partition(model, recipe.stages, example, "even" if recipe.partition == "cost" else recipe.cuts())


def _check_platform() -> None:
    """Watching over processes is done by means of Linux: pidfd, /proc, a signal at a parent's death."""
    if sys.platform != "linux":
        raise InputError(f"the launcher needs Linux, and this is {sys.platform}: start the processes by torchrun")


def _check_devices(recipe: Recipe) -> None:
    """Ranks may share a GPU, if there is one."""
    if recipe.device == "cuda" and torch.cuda.device_count() == 0:
        raise InputError(f"0 GPUs for {recipe.stages * recipe.replicas} processes: write --device cpu")
