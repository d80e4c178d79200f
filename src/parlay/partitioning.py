"""Cuts a network into K contiguous stages, evenly or by measured cost.

In: any `nn.Sequential` and an example batch. Out: a `Partition`: the cuts, the stages as slices of the model, and the
shape of a sample's state at every interface. The model itself is left as found.
"""

import difflib
import itertools
import math
import operator
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parlay.errors import InputError

WAYS = ("even", "cost")


@dataclass(frozen=True)
class Partition:
    """A model and the places where it is cut."""

    model: nn.Sequential
    cuts: tuple[int, ...]
    """K-1 indices into the model's blocks: stage k is model[cuts[k-1]:cuts[k]]."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of one sample at every interface, K-1 of them."""

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
    _check_sequential(model)
    _check_example(example)
    stages = _check_count(stages, len(model))
    cuts = _choose_cuts(model, stages, example, by, work)
    if not cuts:
        return Partition(model, (), ())
    _check_tied(model, cuts)
    return Partition(model, cuts, _interface_shapes(model, cuts, example))


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
    dearest = _least_maximum(prefix, factors)
    return _least_squares(prefix, factors, dearest)


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


def block_costs(model: nn.Sequential, example: Tensor, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each block alone, in train mode: the least of `repeats`, after a warm-up.

    The first block needs no gradient of its input, all others do. Each repeat goes over all blocks, so that a slow
    moment of the machine does not fall on one block only.
    """
    _check_sequential(model)
    _check_example(example)
    if repeats < 1:
        raise InputError(f"{repeats} repeats measure nothing: write at least 1")
    clock = partial(_cuda_seconds, example.device) if example.is_cuda else _cpu_seconds
    with _left_as_found(model, example):
        model.train()
        inputs = [x for _, _, x, _ in _walk(model, example)]
        costs = [math.inf] * len(model)
        for repeat in range(repeats + 1):
            for i, (block, x) in enumerate(zip(model, inputs, strict=True)):
                seconds = _time(block, x, clock, input_gradient=i > 0)
                if repeat > 0:  # the first is the warm-up
                    costs[i] = min(costs[i], seconds)
    return costs


def _time(block: nn.Module, x: Tensor, clock: Callable[[Callable[[], None]], float], input_gradient: bool) -> float:
    leaf = x.detach().requires_grad_(input_gradient and x.is_floating_point())
    leaves = [p for p in block.parameters() if p.requires_grad] + [leaf] * leaf.requires_grad
    copy = leaf.clone()  # a block may work in place, and must find the same input the next time

    def forward_and_backward() -> None:
        with torch.enable_grad():
            outputs = [y for y in _tensors(block(copy)) if y.requires_grad]
        if outputs and leaves:
            # Not backward(): this leaves the gradients that the model holds alone.
            torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)

    return clock(forward_and_backward)


def _cpu_seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cuda_seconds(device: torch.device, work: Callable[[], None]) -> float:
    with torch.cuda.device(device):  # events are recorded on the current device, which may be another than the model's
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # Small blocks take longer to launch than to run. While the device sleeps (a few milliseconds) the launches
        # queue up, and the events then see what a captured graph would take.
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in what a block returns, which for the last block may be anything."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _choose_cuts(
    model: nn.Sequential, stages: int, example: Tensor, by: str | Sequence[int], work: Sequence[float] | None
) -> tuple[int, ...]:
    if not isinstance(by, str):
        return _check_cuts(by, stages, len(model))
    if by not in WAYS:
        near = difflib.get_close_matches(by, WAYS, n=1, cutoff=0.0)[0]
        raise InputError(f"unknown partition {by!r}: write {near!r} (one of {', '.join(WAYS)}), or the cuts themselves")
    if stages == 1:
        return ()
    return even_cuts(len(model), stages) if by == "even" else cost_cuts(block_costs(model, example), stages, work)


def _interface_shapes(model: nn.Sequential, cuts: tuple[int, ...], example: Tensor) -> tuple[tuple[int, ...], ...]:
    shapes = []
    with _left_as_found(model, example):
        model.eval()
        for i, block, _, output in _walk(model, example):
            if i + 1 in cuts:
                assert isinstance(output, Tensor)  # _walk checks it for all blocks but the last
                _check_state(i, block, output, len(example))
                shapes.append(tuple(output.shape[1:]))
    return tuple(shapes)


def _walk(model: nn.Sequential, example: Tensor) -> Iterator[tuple[int, nn.Module, Tensor, object]]:
    """(index, block, input, output) of every block in turn, without gradients."""
    x = example
    for i, block in enumerate(model):
        output = _forward(i, block, x)
        if i + 1 < len(model) and not isinstance(output, Tensor):
            raise InputError(
                f"{_name(i, block)} returns a {type(output).__name__}, not a tensor: write it so that it takes and "
                "returns one tensor, or join it and the next block in one nn.Sequential"
            )
        yield i, block, x, output
        if isinstance(output, Tensor):
            x = output


def _forward(i: int, block: nn.Module, x: Tensor) -> object:
    try:
        with torch.no_grad():
            return block(x.clone())  # a block may work in place, on the caller's example too
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{_name(i, block)} cannot take the example, there of shape {tuple(x.shape)}: give a batch that the model "
            f"takes ({reason})"
        ) from error


@contextmanager
def _left_as_found(model: nn.Module, example: Tensor) -> Iterator[None]:
    """Puts back train or eval mode, buffers and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {t.device for t in (example, *model.parameters()) if t.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)


def _slice(model: nn.Sequential, start: int, end: int) -> nn.Sequential:
    # Not model[start:end]: that calls the constructor of the model's class, which may be a user's with other arguments.
    stage = nn.Sequential(OrderedDict(list(model._modules.items())[start:end]))
    stage.training = model.training
    return stage


def _name(i: int, block: nn.Module) -> str:
    return f"block {i} ({type(block).__name__})"


def _check_sequential(model: nn.Sequential) -> None:
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        flaw = "has a forward of its own" if isinstance(model, nn.Sequential) else "is not an nn.Sequential"
        raise InputError(
            f"the model ({type(model).__name__}) {flaw}: write it as nn.Sequential(*blocks), the blocks in the "
            "order they run in"
        )


def _check_example(example: Tensor) -> None:
    if not isinstance(example, Tensor) or example.dim() == 0 or len(example) == 0:
        raise InputError("the example is no batch: give a tensor of at least one input, samples along dimension 0")


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
        for name, parameter in block.named_parameters():
            j, shared = first.setdefault(parameter, (i, f"{key}.{name}"))
            if bisect_right(cuts, j) != bisect_right(cuts, i):
                raise InputError(
                    f"{_name(j, model[j])} and {_name(i, block)} share the parameter {shared!r} across a cut: "
                    "move the cut so that both are in one stage, or use another K"
                )


def _check_state(i: int, block: nn.Module, output: Tensor, samples: int) -> None:
    if not output.is_floating_point():
        raise InputError(
            f"{_name(i, block)} returns {output.dtype} at a cut, and a state needs gradients: cut behind the "
            "next block that returns floating point numbers"
        )
    if output.dim() == 0 or len(output) != samples:
        raise InputError(
            f"{_name(i, block)} returns the shape {tuple(output.shape)} for {samples} samples at a cut: keep the "
            "samples along dimension 0, or cut elsewhere"
        )
