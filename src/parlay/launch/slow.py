"""Which ranks are far slower than the others, once there is enough evidence for it.

In come the ranks' heartbeats, at every look of the launcher; out come those to flag. A rank must have been slow at
every look while it computed for `EVIDENCE` seconds: on a busy machine the steps of a moment say nothing of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from parlay.launch.heartbeat import Beat
from parlay.launch.places import Place

SLOW = 3.0  # times the others' time of a step; stages that are cut unevenly stay below
SLOWER_BY = 0.005  # seconds; less is the noise of very small networks
EVIDENCE = 10.0  # seconds of the rank's own steps; a run that is over before has lost nothing worth a word


@final
class SlowRanks:
    """Remembers since when a rank is slow."""

    def __init__(self) -> None:
        self._since: dict[Place, float] = {}
        """Seconds that the rank had computed when it was first found slow."""

    def look(self, beats: Mapping[Place, Beat]) -> None:
        self._since = {place: self._since.get(place, beats[place].computed) for place in _ratios(beats)}

    def found(self, beats: Mapping[Place, Beat]) -> tuple[dict[str, Any], ...]:
        """Those to flag, with how many times as long as the others' their steps took."""
        self.look(beats)
        proven = {place for place, since in self._since.items() if beats[place].computed - since >= EVIDENCE}
        return tuple(
            {"stage": place.stage, "replica": place.replica, "times": round(times, 1)}
            for place, times in _ratios(beats).items()
            if place in proven
        )


def _ratios(beats: Mapping[Place, Beat]) -> dict[Place, float]:
    """Of the ranks that are slow now: their pace over the median of the others', waiting not counted."""
    found = {}
    for place, beat in beats.items():
        others = sorted(other.pace for at, other in beats.items() if at != place and other.pace > 0)
        usual = others[len(others) // 2] if others else 0.0
        if usual > 0 and beat.pace > SLOW * usual and beat.pace - usual > SLOWER_BY:
            found[place] = beat.pace / usual
    return found
