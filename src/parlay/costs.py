"""What each block of a network costs, measured alone; and walks through a network that leave it as found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parlay.errors import InputError
from parlay.lanes import Lanes, lanes_of


def block_costs(model: nn.Sequential, example: Tensor, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each block alone, in train mode: the least of `repeats`, after a warm-up.

    The first block needs no gradient of its input, all others do. Each repeat goes over all blocks, so that a slow
    moment of the machine does not fall on one block only.
    """
    check_model(model, example)
    if repeats < 1:
        raise InputError(f"{repeats} repeats measure nothing: write at least 1")
    lanes = lanes_of(example.device)
    with left_as_found(model, example):
        model.train()
        inputs = [x for _, x, _ in walk(model, example)]
        rounds = [
            [_seconds(block, x, lanes, i > 0) for i, (block, x) in enumerate(zip(model, inputs, strict=True))]
            for _ in range(repeats + 1)
        ]
    return [min(of_block) for of_block in zip(*rounds[1:], strict=True)]  # the first is the warm-up


def _seconds(block: nn.Module, x: Tensor, lanes: Lanes, input_gradient: bool) -> float:
    leaf = x.detach().requires_grad_(input_gradient and x.is_floating_point())
    leaves = [p for p in block.parameters() if p.requires_grad] + [leaf] * leaf.requires_grad
    copy = leaf.clone()  # a block may work in place, and must find the same input the next time

    def forward_and_backward() -> None:
        with torch.enable_grad():
            outputs = [y for y in _tensors(block(copy)) if y.requires_grad]
        if outputs and leaves:
            # not backward(): this leaves the gradients that the model holds alone
            torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)

    return lanes.seconds(forward_and_backward)


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in what a block returns, which for the last block may be anything."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def walk(model: nn.Sequential, example: Tensor) -> Iterator[tuple[int, Tensor, object]]:
    """Number, input and output of every block in turn, without gradients."""
    x = example
    for i, block in enumerate(model):
        output = _forward(i, block, x)
        if i + 1 < len(model) and not isinstance(output, Tensor):
            raise InputError(
                f"{name(i, block)} returns a {type(output).__name__}, not a tensor: write it so that it takes and "
                "returns one tensor, or join it and the next block in one nn.Sequential"
            )
        yield i, x, output
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
            f"{name(i, block)} cannot take the example, there of shape {tuple(x.shape)}: give a batch that the model "
            f"takes ({reason})"
        ) from error


@contextmanager
def left_as_found(model: nn.Module, example: Tensor) -> Iterator[None]:
    """Puts back train or eval mode, buffers and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
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
            for module, key, buffer, value in buffers:
                module._buffers[key] = buffer.copy_(value)


def name(i: int, block: nn.Module) -> str:
    return f"block {i} ({type(block).__name__})"


def check_model(model: nn.Sequential, example: Tensor) -> None:
    """Can it be cut, and does the example show how?"""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        flaw = "has a forward of its own" if isinstance(model, nn.Sequential) else "is not an nn.Sequential"
        raise InputError(
            f"the model ({type(model).__name__}) {flaw}: write it as nn.Sequential(*blocks), the blocks in the "
            "order they run in"
        )
    if not isinstance(example, Tensor) or example.dim() == 0 or len(example) == 0:
        raise InputError("the example is no batch: give a tensor of at least one input, samples along dimension 0")
