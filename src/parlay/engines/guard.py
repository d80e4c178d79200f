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

from parlay.stage import Stage

Agree = Callable[[Tensor], Any]
"""Begin to make a flag the greatest that any process has; its `wait` holds the current stream until it is."""


@final
class Guard:
    """Between the losses of a step and its updates.

    Each loss is `seen` on the stream that computes it, then `look` is called once, and each stream that makes an
    update goes through `hold` first.
    """

    def __init__(self, device: torch.device | None, stages: Iterable[Stage] = (), agree: Agree | None = None) -> None:
        """`device`: the GPU with the flag; None: the host looks. `stages`: all that is trained, by fused optimisers."""
        self.on_device = device is not None
        self._agree = agree
        self._losses: list[Tensor] = []
        self._agreement: Any = None
        if device is not None:
            self._flag = torch.zeros((), device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for stage in stages:
                stage.hold_by(self._flag)

    def seen(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())
        if self.on_device:
            self._stream.wait_stream(torch.cuda.current_stream())

    def look(self) -> bool:
        """May the step go on? On a GPU it always does, and `hold` and the flag decide."""
        losses, self._losses = self._losses, []
        if not self.on_device:
            return all_finite(losses)
        with torch.cuda.stream(self._stream):
            self._flag.masked_fill_(~torch.stack([loss.float() for loss in losses]).isfinite().all(), 1.0)
            if self._agree is not None:
                self._agreement = self._agree(self._flag)
        return True

    def hold(self) -> None:
        """What the current stream does next comes after the flag."""
        if self.on_device:
            torch.cuda.current_stream().wait_stream(self._stream)
            if self._agreement is not None:
                self._agreement.wait()


def all_finite(losses: Sequence[Tensor]) -> bool:
    """As the host sees it, with one copy from a device."""
    together = torch.stack([loss.float().to(losses[0].device) for loss in losses])
    return all(math.isfinite(loss) for loss in together.tolist())
