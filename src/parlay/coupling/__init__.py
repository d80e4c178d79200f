"""The methods that join neighbouring stages, one file each, behind the interfaces of `base` and `streaming`."""

from parlay.coupling.augmented_lagrangian import AugmentedLagrangian
from parlay.coupling.auxnet import AuxNet
from parlay.coupling.base import Coupling, Pair
from parlay.coupling.delayed import Delayed
from parlay.coupling.dni import DNI
from parlay.coupling.local import Local
from parlay.coupling.penalty import Penalty
from parlay.coupling.replay import Replay
from parlay.coupling.streaming import Streaming

Method = Coupling | Streaming
"""States per sample, kept for the whole data set, or states that live a few steps."""

__all__ = [
    "DNI",
    "AugmentedLagrangian",
    "AuxNet",
    "Coupling",
    "Delayed",
    "Local",
    "Method",
    "Pair",
    "Penalty",
    "Replay",
    "Streaming",
]
