"""A loss that is not finite stops every update, in the step in which it appears.

Elsewhere than on GPUs the host looks at the losses before the updates. A GPU must not be waited for: there the answer
stays on the device, as a flag that fused optimisers read (`found_inf`, which gradient scalers set for them). It is set
for good, so the steps that the host has sent ahead change nothing either, until it looks and names the stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from parlay.lanes import Lanes
from parlay.stage.optimiser import Optimiser

Agree = Callable[[Tensor], Any]
"""Begin to make a flag the greatest that any process has; its `wait` holds the current stream until it is."""


@final
class Guard:
    """Between the losses of a step and its updates.

    Each loss is seen in the lane that computes it, then `may_update` is called once, and each lane that makes an update
    goes through `hold` first.
    """

    def __init__(
        self, lanes: Lanes | None, device: torch.device, trained: Iterable[Optimiser] = (), agree: Agree | None = None
    ) -> None:
        """`lanes`: of the device with the flag; None: the host looks. `trained`: fused, so that the flag holds them."""
        self._lanes = lanes
        self._agree = agree
        self._losses: list[Tensor] = []
        self._agreement: Any = None
        if lanes is not None:
            with lanes.main:
                self._flag = torch.zeros((), device=device)
            self._lane = lanes.lane()
            for optimiser in trained:
                optimiser.hold_by(self._flag)

    @property
    def on_device(self) -> bool:
        return self._lanes is not None

    def see(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())
        if self._lanes is not None:
            self._lane.follow(self._lanes.current)

    def may_update(self) -> bool:
        """On a GPU it always may, and the flag decides."""
        losses, self._losses = self._losses, []
        if self._lanes is None:
            return all_finite(losses)
        with self._lane:
            self._flag.masked_fill_(~torch.stack([loss.float() for loss in losses]).isfinite().all(), 1.0)
            if self._agree is not None:
                self._agreement = self._agree(self._flag)
        return True

    def hold(self) -> None:
        """What the current lane does next comes after the flag."""
        if self._lanes is not None:
            self._lanes.current.follow(self._lane)
            if self._agreement is not None:
                self._agreement.wait()

    def clear(self) -> None:
        """Of a step that was not made nothing stays behind."""
        self._losses = []


def all_finite(losses: Sequence[Tensor]) -> bool:
    """As the host sees it, with one copy from a device."""
    return all(map(math.isfinite, torch.stack([loss.float() for loss in losses]).tolist()))
