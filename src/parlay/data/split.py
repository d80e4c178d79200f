"""One half of a data set as two tensors, and the way there from whatever a user has.

States and multipliers are kept per sample, so a sample must have an id: its row in these tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from parlay.errors import InputError


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of a training or a test set: row i of both tensors is the sample with the id i."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        for word, tensor in (("inputs", self.inputs), ("targets", self.targets)):
            if tensor.dim() == 0:
                raise InputError(f"the {word} are a single number: pass a tensor whose first dimension is the samples")
        if len(self.inputs) != len(self.targets):
            raise InputError(f"{len(self.inputs)} inputs but {len(self.targets)} targets: pass one target per input")
        if len(self.inputs) == 0:
            raise InputError("the data set is empty: pass at least one sample")

    def __len__(self) -> int:
        return len(self.inputs)


@runtime_checkable
class MapStyle(Protocol):
    """What a map-style data set can do: say how many samples it has, and give one by its id."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def as_split(data: object) -> Split:
    """A Split of any data set of (input, target) pairs.

    `data` is a Split, a pair of tensors (inputs, targets), or a map-style data set. The last is read once, sample by
    sample: random transforms in it are drawn once and then stay.
    """
    if isinstance(data, Split):
        return data
    if type(data) is TensorDataset:  # not a subclass, which may change the samples on the way out
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return Split(data[0].detach(), data[1].detach())
    if isinstance(data, IterableDataset | Mapping | str | bytes) or not isinstance(data, MapStyle):
        raise InputError(
            f"{type(data).__name__} is no data set with sample ids: pass a map-style Dataset (of a DataLoader, its "
            "`.dataset`) or a pair of tensors (inputs, targets)"
        )
    return _stacked(data)


def _stacked(data: MapStyle) -> Split:
    """All samples, read into two tensors allocated once: a list of samples and then its stack would be twice that."""
    n = len(data)
    if n == 0:
        raise InputError("the data set is empty: pass at least one sample")
    first = _pair(data[0], 0)
    stacks = tuple(torch.empty(n, *part.shape, dtype=part.dtype, device=part.device) for part in first)
    for i in range(n):
        pair = first if i == 0 else _pair(data[i], i)
        for word, part, stack in zip(("input", "target"), pair, stacks, strict=True):
            if part.shape != stack.shape[1:] or part.dtype != stack.dtype:
                raise InputError(
                    f"sample {i}: {word} of shape {tuple(part.shape)} and {part.dtype}, but that of sample 0 has "
                    f"{tuple(stack.shape[1:])} and {stack.dtype}: make all samples alike"
                )
            stack[i] = part
    return Split(*stacks)


def _pair(sample: object, i: int) -> tuple[Tensor, Tensor]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        what = f"{len(sample)} things" if isinstance(sample, tuple | list) else f"of type {type(sample).__name__}"
        raise InputError(f"sample {i} is {what}: return a pair (input, target) of tensors")
    return _tensor(sample[0], i, "input"), _tensor(sample[1], i, "target")


def _tensor(value: object, i: int, word: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if word == "target" and isinstance(value, Real):  # class numbers are plain integers in most data sets
        return torch.as_tensor(value)
    raise InputError(f"sample {i}: its {word} is of type {type(value).__name__}: return a tensor")
