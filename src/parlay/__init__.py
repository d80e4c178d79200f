"""Parlay: training deep networks with their layers in parallel.

The public names are loaded when they are first asked for, so that the command line answers without torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Threads that share an operation wait for each other in a loop, by default for so long that one of them loses a whole
# time slice where another process has its core. Read once, when torch is loaded. On two cores, one of them busy with an
# endless loop: an epoch of `parlay train --model resnet20 --method al --stages 2` took 23.9 s, with this 1.5 s. On two
# idle ones a plain step of that network and batch took 22 to 25 ms (three times), with this 25 ms (once).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from parlay.config.rates import Rate
    from parlay.config.recipe import Recipe
    from parlay.config.schedule import Schedule
    from parlay.errors import InputError
    from parlay.methods.augmented_lagrangian import AugmentedLagrangian
    from parlay.methods.delayed import Delayed
    from parlay.methods.local import Local
    from parlay.methods.method import Method
    from parlay.methods.penalty import Penalty
    from parlay.methods.replay import Replay
    from parlay.methods.stored import Stored
    from parlay.methods.streamed import Streamed
    from parlay.models import build as build_model
    from parlay.partitioning import Partition, partition
    from parlay.run.outcome import Result
    from parlay.run.trainer import Trainer

_HOMES = {
    "AugmentedLagrangian": "methods.augmented_lagrangian",
    "Delayed": "methods.delayed",
    "InputError": "errors",
    "Local": "methods.local",
    "Method": "methods.method",
    "Partition": "partitioning",
    "Penalty": "methods.penalty",
    "Rate": "config.rates",
    "Recipe": "config.recipe",
    "Replay": "methods.replay",
    "Result": "run.outcome",
    "Schedule": "config.schedule",
    "Stored": "methods.stored",
    "Streamed": "methods.streamed",
    "Trainer": "run.trainer",
    "build_model": "models:build",
    "partition": "partitioning",
}

__all__ = [
    "AugmentedLagrangian",
    "Delayed",
    "InputError",
    "Local",
    "Method",
    "Partition",
    "Penalty",
    "Rate",
    "Recipe",
    "Replay",
    "Result",
    "Schedule",
    "Stored",
    "Streamed",
    "Trainer",
    "build_model",
    "partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parlay' has no attribute '{name}'")
    home, _, real = _HOMES[name].partition(":")
    value = getattr(import_module(f"parlay.{home}"), real or name)
    globals()[name] = value
    return value
