"""The runs of the demo: the same network, data, seed and epochs, trained serially and with layers in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlay import compare
from parlay.compare import Fit, Planned, Row
from parlay.config.recipe import Recipe
from parlay.run.progress import Progress

ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "serial": ("serial training", {"method": "serial"}),
    "al-k2": ("AL (augmented Lagrangian), K = 2", {"method": "al", "stages": 2, "schedule": "parallel"}),
    "al-k3": ("AL, K = 3", {"method": "al", "stages": 3, "schedule": "parallel"}),
    "ds-sph-al-k3": (
        "DS-SPH-AL (small states, the last epochs serial), K = 3",
        {"method": "al", "stages": 3, "schedule": "tail:4:1", "lr_schedule": "hold", "downsample": 2},
    ),
    "replay-k3": ("replay, K = 3", {"method": "replay", "stages": 3, "schedule": "parallel"}),
}
"""By the names of their folders: what a person reads while they run, and the keys of their recipes.

The hybrid keeps its rate for the serial epochs at its end: they fit the stages to maps that are not filtered
(results/digits-hybrid).

Some six seconds of a core each. The penalty method, and K = 2 of the last two, would teach nothing more.
"""


def planned(out: Path, epochs: int) -> list[Planned]:
    return [
        Planned(Row(text, keys), Recipe(epochs=epochs, checkpoint_every=0, **keys), out / name)
        for name, (text, keys) in ROWS.items()
    ]


def train(runs: Sequence[Planned], fit: Fit, progress: Progress) -> str:
    """One run after another. Gives the status of the whole: finished, interrupted or failed.

    In one thread, so that the sums are added up alike, and the accuracies are the same, on any number of cores.
    """
    from parlay.bench.cpu import one_core

    with one_core():
        return compare.carry_out(runs, fit, progress)
