"""Which samples a step works on, and which random numbers it draws.

Both are functions of the seed and of the place in training alone. So all processes draw the same batches without
sending indices, the batch of the next step is known a step ahead, and a resumed run continues where it stopped
without any generator state in its checkpoint.
"""

from hashlib import blake2b

import torch
from torch import Tensor

from parlay.errors import InputError


def mixed_seed(purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one purpose. Hashed, because neighbouring seeds of a generator may give related numbers."""
    text = ",".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def step_seed(seed: int, epoch: int, step: int, stream: int = 0) -> int:
    """The seed of one step's random numbers; uses that must not share numbers take different streams."""
    return mixed_seed("step", seed, epoch, step, stream)


def order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch goes through the sample ids 0..samples-1.

    Even and odd ids take turns, each kind shuffled: a method in which the halves of the data do different things then
    has as many samples of each in every batch.
    """
    if samples < 1:
        raise InputError("the data set is empty: pass at least one sample")
    generator = torch.Generator().manual_seed(mixed_seed("order", seed, epoch))
    ids = torch.empty(samples, dtype=torch.int64)
    ids[0::2] = 2 * torch.randperm((samples + 1) // 2, generator=generator)
    ids[1::2] = 2 * torch.randperm(samples // 2, generator=generator) + 1
    return ids


def batches(samples: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """The sample ids of each step of an epoch. Disjoint, and together all of them: the last batch may be smaller."""
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: write a whole number from 1 up")
    ids = order(samples, seed, epoch)
    return [ids[start : start + batch_size] for start in range(0, samples, batch_size)]
