"""Residual networks by name, each a flat `nn.Sequential` of blocks that can be cut between any two.

In: a name, the shape of one input and the number of classes. Out: the network, drawn from the global random state.
"""

import difflib
import re

from torch import nn

from parlay.errors import InputError
from parlay.models.resnet import resnet
from parlay.models.resnet_vae import resnet_vae
from parlay.models.wide_resnet import wide_resnet

_COMMON = (
    *(f"resnet{depth}" for depth in (8, 14, 20, 32, 44, 56, 110, 164, 1202)),
    *(f"wrn-{size}" for size in ("10-1", "16-2", "16-4", "16-8", "22-8", "28-10", "40-2", "40-4", "40-10")),
    *("resnet-vae", "resnet8-vae", "resnet20-vae", "resnet56-vae"),
)
_LARGEST = 100_000  # depth x width², as which the weights grow: wrn-40-10 has 4,000, and 56 million weights
_VAE = re.compile(r"resnet(\d+)?-vae")
_RESNET = re.compile(r"resnet(\d+)")
_WIDE = re.compile(r"wrn-(\d+)-(\d+)")


def build(name: str, shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """The network of that name for inputs of that (channels, height, width). An auto-encoder ignores `classes`."""
    if len(shape) != 3 or min(shape) < 1:
        raise InputError(f"input shape {tuple(shape)}: write (channels, height, width), each at least 1")
    if match := _VAE.fullmatch(name):
        return resnet_vae(shape, _blocks_per_group(int(match[1] or 110), 2, "resnet{}-vae", name))
    if classes < 1:
        raise InputError(f"{classes} classes: write a number of classes of at least 1")
    if match := _RESNET.fullmatch(name):
        return resnet(shape, classes, _blocks_per_group(int(match[1]), 2, "resnet{}", name))
    if match := _WIDE.fullmatch(name):
        n = _blocks_per_group(int(match[1]), 4, "wrn-{}-" + str(max(int(match[2]), 1)), name)
        if int(match[2]) < 1:
            raise InputError(f"model {name!r} has width 0: write wrn-{match[1]}-1 or a larger width")
        if int(match[1]) * int(match[2]) ** 2 > _LARGEST:
            raise InputError(f"model {name!r} has billions of weights: write a smaller depth or width")
        return wide_resnet(shape, classes, n, int(match[2]))
    raise InputError(_unknown(name))


def is_vae(name: str) -> bool:
    """Whether the network reconstructs its input: the target of a sample is then the sample itself."""
    return _VAE.fullmatch(name) is not None


def _blocks_per_group(depth: int, ends: int, pattern: str, name: str) -> int:
    """n of depth = 6n + ends. Six, since there are three groups and two convolutions in a block."""
    n, rest = divmod(depth - ends, 6)
    if n >= 1 and rest == 0:
        return n
    near = [pattern.format(6 * i + ends) for i in (n, n + 1) if i >= 1] or [pattern.format(6 + ends)]
    raise InputError(f"model {name!r} has no such depth (depths are 6n+{ends}): write {' or '.join(near)}")


def _unknown(name: str) -> str:
    # Case, spaces and underscores are the commonest slips; without this they outweigh the letters.
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    near = difflib.get_close_matches(plain, _COMMON, n=1, cutoff=0.6)
    rule = "resnet{6n+2}, wrn-{6n+4}-{k} or resnet-vae"
    return (
        f"unknown model {name!r}: write {near[0]} (names are {rule})"
        if near
        else f"unknown model {name!r}: write {rule}"
    )
