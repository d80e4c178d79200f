"""Cuts a network into K contiguous stages, evenly or by measured cost.

In: any `nn.Sequential` and an example batch. Out: a `Partition`: the cuts, the stages as slices of the model, and the
shape of a sample's state at every cut. The model itself is left as found.
"""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from parlay.costs import block_costs, check_model, left_as_found, name, walk
from parlay.errors import InputError

WAYS = ("even", "cost")


@dataclass(frozen=True)
class Partition:
    """A model and the places where it is cut."""

    model: nn.Sequential
    cuts: tuple[int, ...]
    """K-1 indices into the model's blocks: stage k is model[cuts[k-1]:cuts[k]]."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of one sample at every cut, K-1 of them."""

    def __len__(self) -> int:
        return len(self.cuts) + 1

    @property
    def stages(self) -> list[nn.Sequential]:
        """Slices of the model: they share its modules and keep its parameter names."""
        bounds = (0, *self.cuts, len(self.model))
        return [_slice(self.model, a, b) for a, b in itertools.pairwise(bounds)]


def partition(
    model: nn.Sequential,
    stages: int,
    example: Tensor,
    by: str | Sequence[int] = "even",
    work: Sequence[float] | None = None,
) -> Partition:
    """Cuts `model` into `stages` stages: "even" by number of blocks, "cost" by measured time, or at the given cuts.

    `work` is what a step of every stage costs, in units of its forward and backward pass, for a cut by cost.
    """
    check_model(model, example)
    stages = _check_count(stages, len(model))
    if not isinstance(by, str):
        cuts = _check_cuts(by, stages, len(model))
    elif by not in WAYS:
        near = difflib.get_close_matches(by, WAYS, n=1, cutoff=0.0)[0]
        raise InputError(f"unknown partition {by!r}: write {near!r} (one of {', '.join(WAYS)}), or the cuts themselves")
    elif by == "even" or stages == 1:
        cuts = even_cuts(len(model), stages)
    else:
        cuts = cost_cuts(block_costs(model, example), stages, work)
    if not cuts:
        return Partition(model, (), ())
    _check_tied(model, cuts)
    return Partition(model, cuts, _shapes(model, cuts, example))


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """Stages of as equal a number of blocks as can be."""
    stages = _check_count(stages, blocks)
    return tuple(round(i * blocks / stages) for i in range(1, stages))


def cost_cuts(costs: Sequence[float], stages: int, work: Sequence[float] | None = None) -> tuple[int, ...]:
    """Contiguous stages whose dearest one is as cheap as can be, solved exactly by dynamic programming.

    Stage k costs `work[k]` times the sum of its blocks, the sum itself where no work is given. Of several solutions the
    one with the least sum of squares (the most even one) is taken, of these the one that cuts earliest.
    """
    stages = _check_count(stages, len(costs))
    prefix = [0, *itertools.accumulate(_whole_numbers(costs))]
    factors = _whole_numbers(work if work is not None else [1.0] * stages)
    return _least_squares(prefix, factors, _least_maximum(prefix, factors))


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs in a unit in which all are whole: sums of floats round, and equal solutions would seem to differ."""
    for i, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise InputError(f"the cost of block {i} is {cost}: write a finite number that is not negative")
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in ratios)  # powers of two: the largest is a multiple of all
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _least_maximum(prefix: list[int], work: list[int]) -> int:
    """The cost of the dearest stage in the best partition. best[i]: the same for the first i blocks alone."""
    blocks, dear = len(prefix) - 1, max(work)
    best = [work[0] * end for end in prefix]  # one stage
    for k in range(2, len(work) + 1):
        new = best[:]
        for i in range(k, blocks + 1):
            new[i] = dear * prefix[i]
            for j in range(i - 1, k - 2, -1):  # the k-th stage is j..i, and grows
                last = work[k - 1] * (prefix[i] - prefix[j])
                if last >= new[i]:
                    break
                new[i] = min(new[i], max(best[j], last))
        best = new
    return best[blocks]


def _least_squares(prefix: list[int], work: list[int], dearest: int) -> tuple[int, ...]:
    """Of the partitions without a stage over `dearest`, the one with the least sum of squares.

    It is built from the back (the first stage is chosen last), so that the earliest cut wins a tie.
    """
    blocks, stages = len(prefix) - 1, len(work)
    # best[k][i]: (sum of squares, end of the first stage) when the blocks from i on make k stages
    best: list[dict[int, tuple[int, int]]] = [{blocks: (0, blocks)}]
    for k in range(1, stages + 1):
        row: dict[int, tuple[int, int]] = {}
        for i in range(blocks - k, -1, -1):
            for end in range(i + 1, blocks - k + 2):
                first = work[stages - k] * (prefix[end] - prefix[i])
                if first > dearest:
                    break
                if end in best[k - 1]:
                    candidate = (first * first + best[k - 1][end][0], end)
                    row[i] = min(row.get(i, candidate), candidate)
        best.append(row)
    cuts = [0]
    for k in range(stages, 1, -1):
        cuts.append(best[k][cuts[-1]][1])
    return tuple(cuts[1:])


def _shapes(model: nn.Sequential, cuts: tuple[int, ...], example: Tensor) -> tuple[tuple[int, ...], ...]:
    shapes = []
    with left_as_found(model, example):
        model.eval()
        for i, _, output in walk(model, example):
            if i + 1 in cuts:
                assert isinstance(output, Tensor)  # `walk` checks it for all blocks but the last
                _check_state(i, model[i], output, len(example))
                shapes.append(tuple(output.shape[1:]))
    return tuple(shapes)


def _slice(model: nn.Sequential, start: int, end: int) -> nn.Sequential:
    # not model[start:end]: that calls the constructor of the model's class, which may be a user's with other arguments
    stage = nn.Sequential(OrderedDict(list(model._modules.items())[start:end]))
    stage.training = model.training
    return stage


def _check_count(stages: int, blocks: int) -> int:
    try:
        stages = operator.index(stages)
    except TypeError:
        raise InputError(f"{stages!r} stages: write a whole number from 1 to {blocks}") from None
    if not 1 <= stages <= blocks:
        raise InputError(
            f"{stages} stages of a model with {blocks} blocks: write a number of stages from 1 to {blocks}"
        )
    return stages


def _check_cuts(cuts: Sequence[int], stages: int, blocks: int) -> tuple[int, ...]:
    advice = f"write {stages - 1} increasing whole numbers from 1 to {blocks - 1}"
    try:
        found = tuple(operator.index(cut) for cut in cuts)
    except TypeError:
        raise InputError(f"cuts {cuts!r} are not block indices: {advice}") from None
    if len(found) != stages - 1:
        raise InputError(f"{len(found)} cuts make {len(found) + 1} stages, not {stages}: {advice}")
    if any(b <= a for a, b in itertools.pairwise(found)):
        raise InputError(f"cuts {found} do not increase: {advice}")
    if any(not 1 <= cut < blocks for cut in found):
        raise InputError(f"cuts {found} do not lie inside a model of {blocks} blocks: {advice}")
    return found


def _check_tied(model: nn.Sequential, cuts: tuple[int, ...]) -> None:
    first: dict[Tensor, tuple[int, str]] = {}
    for i, (key, block) in enumerate(model._modules.items()):
        assert block is not None
        for weight, parameter in block.named_parameters():
            j, shared = first.setdefault(parameter, (i, f"{key}.{weight}"))
            if bisect_right(cuts, j) != bisect_right(cuts, i):
                raise InputError(
                    f"{name(j, model[j])} and {name(i, block)} share the parameter {shared!r} across a cut: "
                    "move the cut so that both are in one stage, or use another K"
                )


def _check_state(i: int, block: nn.Module, output: Tensor, samples: int) -> None:
    if not output.is_floating_point():
        raise InputError(
            f"{name(i, block)} returns {output.dtype} at a cut, and a state needs gradients: cut behind the "
            "next block that returns floating point numbers"
        )
    if output.dim() == 0 or len(output) != samples:
        raise InputError(
            f"{name(i, block)} returns the shape {tuple(output.shape)} for {samples} samples at a cut: keep the "
            "samples along dimension 0, or cut elsewhere"
        )
