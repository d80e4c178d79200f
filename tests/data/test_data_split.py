"""A user's own data set becomes two tensors, or is refused in a line that names the sample."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from parlay.data import Split, as_split
from parlay.errors import InputError

X, Y = torch.arange(12.0).view(4, 3), torch.tensor([3, 1, 0, 2])


class Listed(Dataset):
    def __init__(self, *samples: object) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


class Endless(IterableDataset):
    def __iter__(self):
        yield X[0], 0


@pytest.mark.parametrize(
    "data",
    [
        Split(X, Y),
        (X, Y),
        [X, Y],
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(4)),
        list(zip(X, Y, strict=True)),
        Listed(*zip(X, Y.tolist(), strict=True)),
        Listed(*zip(X, Y.numpy(), strict=True)),
    ],
    ids=["Split", "pair", "list-pair", "TensorDataset", "Subset", "list", "plain-labels", "numpy-labels"],
)
def test_every_kind_of_data_set_gives_the_same_tensors(data: object) -> None:
    split = as_split(data)
    assert torch.equal(split.inputs, X)
    assert torch.equal(split.targets, Y)
    assert split.targets.dtype == torch.int64
    assert len(split) == 4


def test_tensors_that_need_gradients_come_in_without_them() -> None:
    assert not as_split((X.clone().requires_grad_(), Y)).inputs.requires_grad
    assert not as_split(Listed((X[0].clone().requires_grad_(), 0))).inputs.requires_grad


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((X[:0], Y[:0]), "empty"),
        (Listed(), "empty"),
        ((X, Y[:3]), "4 inputs but 3 targets"),
        ((X, torch.tensor(1)), "the targets are a single number"),
        (Listed((X[0], 0), (X[1][:2], 1)), "sample 1: input of shape (2,)"),
        (Listed((X[0], 0), (X[1].double(), 1)), "sample 1: input of shape (3,) and torch.float64"),
        (Listed((X[0], 0), (X[1], 1), (X[2], 0.5)), "sample 2: target"),
        (Listed((X[0], 0), (X[1].numpy(), 1)), "sample 1: its input is of type ndarray: return a tensor"),
        (Listed((X[0], "cat")), "sample 0: its target is of type str"),
        (Listed((X[0], 0), X[1]), "sample 1 is of type Tensor: return a pair"),
        (Listed((X[0], 0, 1)), "sample 0 is 3 things: return a pair"),
        ((np.zeros((4, 3)), np.zeros(4)), "sample 0 is of type ndarray: return a pair (input, target) of tensors"),
        (Endless(), "Endless is no data set with sample ids"),
        (DataLoader(TensorDataset(X, Y)), "of a DataLoader, its `.dataset`"),
        ({"inputs": X}, "dict is no data set"),
        (None, "NoneType is no data set"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_said_in_a_line(data: object, says: str) -> None:
    with pytest.raises(InputError) as refused:
        as_split(data)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
