"""A step of the stages that a process owns; engine.py is where to begin to read."""

from parlay.engine.build import build
from parlay.engine.engine import Engine
from parlay.engine.evaluate import Loss
from parlay.engine.options import Options
from parlay.engine.world import Processes, World, started, world_of
from parlay.stage.optimiser import MakeOptimizer, sgd

__all__ = [
    "Engine",
    "Loss",
    "MakeOptimizer",
    "Options",
    "Processes",
    "World",
    "build",
    "sgd",
    "started",
    "world_of",
]
