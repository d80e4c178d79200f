"""The methods that join neighbouring stages, one file each, behind the interface of `base`."""

from parlay.coupling.augmented_lagrangian import AugmentedLagrangian
from parlay.coupling.base import Coupling, Pair
from parlay.coupling.penalty import Penalty

__all__ = ["AugmentedLagrangian", "Coupling", "Pair", "Penalty"]
