"""Which ranks are far slower than the others, once there is enough evidence for it.

A rank must be slow at every look of the launcher while it computes for `EVIDENCE` seconds: on a busy machine the steps
of a moment say nothing about a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from parlay.launch.heartbeat import Beat
from parlay.launch.rank import Position

SLOW = 3.0  # times the others' time of a step; stages that are cut unevenly stay below
SLOWER_BY = 0.005  # seconds; less is the noise of very small networks
EVIDENCE = 10.0  # seconds of the rank's own steps; a run that is over before has lost nothing worth a word


@final
class SlowRanks:
    """Remembers since when a rank is slow."""

    def __init__(self) -> None:
        self._since: dict[Position, float] = {}
        """Seconds that the rank had computed when it was first found slow."""

    def look(self, beats: Mapping[Position, Beat]) -> None:
        self._since = {rank: self._since.get(rank, beats[rank].computed) for rank in _ratios(beats)}

    def found(self, beats: Mapping[Position, Beat]) -> tuple[dict[str, Any], ...]:
        """Those to flag, with how many times as long as the others' their steps took."""
        self.look(beats)
        return tuple(
            {"stage": rank.stage, "replica": rank.replica, "times": round(times, 1)}
            for rank, times in _ratios(beats).items()
            if beats[rank].computed - self._since[rank] >= EVIDENCE
        )


def _ratios(beats: Mapping[Position, Beat]) -> dict[Position, float]:
    """Of the ranks that are slow now: the time of their steps over the median of the others', waiting not counted."""
    found = {}
    for rank, beat in beats.items():
        others = sorted(other.step_seconds for at, other in beats.items() if at != rank and other.step_seconds > 0)
        usual = others[len(others) // 2] if others else 0.0
        if usual > 0 and beat.step_seconds > max(SLOW * usual, usual + SLOWER_BY):
            found[rank] = beat.step_seconds / usual
    return found
