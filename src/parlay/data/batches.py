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

    The two halves of the data take turns, each shuffled: a method in which they do different things then has as many
    samples of each in every batch.
    """
    if samples < 1:
        raise InputError("the data set is empty: pass at least one sample")
    generator = torch.Generator().manual_seed(mixed_seed("order", seed, epoch))
    ids = torch.empty(samples, dtype=torch.int64)
    of = half(torch.arange(samples))
    more, fewer = sorted(((of == n).nonzero().squeeze(1) for n in (0, 1)), key=len, reverse=True)
    ids[0::2] = more[torch.randperm(len(more), generator=generator)]
    ids[1::2] = fewer[torch.randperm(len(fewer), generator=generator)]
    return ids


def half(ids: Tensor) -> Tensor:
    """Which half of the data each of these samples is in, 0 or 1: of two neighbours one in either, by a hash.

    Not the even and the odd ones: files have kinds of samples in turn. MNIST's training images do, of two sources
    (their mean ink is 0.123 and 0.139), and the labels of the embedded digits count from 0 to 9 and again.
    """
    mixed = ids // 2
    for factor in (0x2545F4914F6CDD1D, 0x27D4EB2F165667C5, 0x369DEA0F31A53F85):
        mixed = (mixed ^ (mixed >> 31)) * factor
    return (ids + (mixed >> 40)) % 2


def drawn(samples: int, count: int, seed: int) -> Tensor:
    """So many sample ids, or all where there are fewer, drawn once for a seed.

    Every twelfth would be of one kind where kinds stand in turn: on MNIST batch statistics of such samples had cost an
    auto-encoder a tenth of its test loss (paper/results).
    """
    generator = torch.Generator().manual_seed(mixed_seed("drawn", seed))
    return torch.randperm(samples, generator=generator)[:count]


def batches(samples: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """The sample ids of each step of an epoch. Disjoint, and together all of them: the last batch may be smaller."""
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: write a whole number from 1 up")
    ids = order(samples, seed, epoch)
    return [ids[start : start + batch_size] for start in range(0, samples, batch_size)]
