"""From sample ids to what the network takes: gathered, prepared and augmented in whole batches, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.data.augment import Augmentation
from parlay.data.split import Split

Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Feed:
    """A split of the data with the two functions that stand between it and the network."""

    split: Split
    prepare: Prepare | None = None
    augment: Augmentation | None = None
    reconstruct: bool = False
    """The target of a sample is the prepared sample itself."""

    def __len__(self) -> int:
        return len(self.split)

    def placed(self, first: torch.device, last: torch.device) -> Feed:
        """The inputs on the first stage's device, the targets on the last one's."""
        split = Split(self.split.inputs.to(first), self.split.targets.to(last))
        return Feed(split, self.prepare, self.augment, self.reconstruct)

    def draw(self, count: int, random: torch.Generator) -> dict[str, Tensor]:
        """The random changes of a batch, as tensors; none where nothing is augmented."""
        return dict(self.augment.draw(count, random)) if self.augment is not None else {}

    def batch(self, ids: Tensor, changes: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples; augmented where changes were drawn for them."""
        inputs = self.split.inputs[ids.to(self.split.inputs.device)]
        if changes is not None and self.augment is not None:
            inputs = self.augment.apply(inputs, changes)
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        if self.reconstruct:
            return inputs, inputs.to(self.split.targets.device)
        return inputs, self.split.targets[ids.to(self.split.targets.device)]

    def targets(self, ids: Tensor, changes: Mapping[str, Tensor] | None = None) -> Tensor:
        """The targets alone, for a last stage that has no use for the inputs."""
        if self.reconstruct:
            return self.batch(ids, changes)[1]
        return self.split.targets[ids.to(self.split.targets.device)]
