"""What every store promises, and how many bytes it takes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Store(ABC):
    """One tensor of `shape` and `dtype` per sample, read and written in batches of ids, delivered on `device`.

    `rows` is the content, (samples, elements of a sample), wherever the kind of store keeps it. Feature maps lie there
    channels last, as the stages put them out and take them: in any other order each look at a state is a conversion.
    """

    def __init__(self, rows: Tensor, shape: Sequence[int], device: torch.device) -> None:
        self.shape = tuple(shape)
        self.dtype = rows.dtype
        self.device = device
        self._rows = rows

    @abstractmethod
    def gather(self, ids: Tensor) -> Tensor:
        """The tensors of these samples, (len(ids), *shape), as a copy."""

    @abstractmethod
    def scatter(self, ids: Tensor, values: Tensor) -> None:
        """Replace the tensors of these samples (each at most once in `ids`) by `values`, converted to the dtype."""

    @abstractmethod
    def prefetch(self, ids: Tensor) -> None:
        """A hint: these ids, in this order, are gathered next."""

    @abstractmethod
    def _settle(self) -> None:
        """Before the rows are used as a whole: every scatter is in them, and nothing read earlier is given out."""

    @property
    def bytes(self) -> int:
        """What it holds at this moment: 0 once it is closed."""
        return self._rows.nbytes

    def tensor(self) -> Tensor:
        """The whole content, (samples, *shape), without a copy and with every scatter done; for checkpoints."""
        self._settle()
        return self._as_samples(self._rows)

    def load(self, content: Tensor) -> None:
        """Replace the whole content; another shape or dtype is refused."""
        wanted = (len(self._rows), *self.shape)
        if tuple(content.shape) != wanted or content.dtype != self.dtype:
            raise InputError(
                f"a store of shape {wanted} in {self.dtype} cannot load a content of shape {tuple(content.shape)} "
                f"in {content.dtype}: start the states anew, or resume with the recipe of the saved run"
            )
        self._settle()
        self._as_samples(self._rows).copy_(content)

    def close(self) -> None:
        """Give the memory back. The store is not used again; closing it twice is allowed."""
        self._rows = self._rows.new_empty(0, 0)

    def _as_rows(self, values: Tensor) -> Tensor:
        values = values.detach().to(self.device, self.dtype)
        if len(self.shape) == 3:
            values = values.permute(0, 2, 3, 1)
        return values.reshape(len(values), math.prod(self.shape))

    def _as_samples(self, rows: Tensor) -> Tensor:
        if len(self.shape) != 3:
            return rows.view(-1, *self.shape)
        channels, height, width = self.shape
        return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)


def store_bytes(samples: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, multipliers: bool) -> int:
    """N · Σ_k D_k · bytes per element · (1, or 2 with multipliers); `shapes` are those that the filter leaves."""
    elements = sum(math.prod(shape) for shape in shapes)
    return samples * elements * dtype.itemsize * (2 if multipliers else 1)


def check_possible(samples: int, dtype: torch.dtype) -> None:
    if samples < 1:
        raise InputError(f"a store of {samples} samples holds nothing: give a data set that is not empty")
    if dtype not in DTYPES.values():
        raise InputError(f"no store in {dtype}: write one of {', '.join(DTYPES)}")


def zeros(samples: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rows of a fresh store."""
    check_possible(samples, dtype)
    return torch.zeros(samples, math.prod(shape), dtype=dtype, device=device)
