"""Compiled code for recorded steps: torch.compile, with the convolutions of narrow networks tuned for the GPU at hand.

Of a narrow network (16 to 64 channels) the library's convolutions fill only a part of their tiles. Where a Triton
template measures better it is taken, and the gradient of a convolution's input, which is a convolution again, is
written as one so that it is tuned too. In a prototype tuning brought the serial step 5 % and six stages side by side
19 % (ResNet-110, batch 128, H200): small kernels leave room for each other. What compiling and tuning bring together is
in results/gpu-bench. Of WRN-40-10 (160 to 640 channels) the library's own were the fastest of all 3 x 3 convolutions
between wide maps, and finding that out took two minutes: wide blocks are compiled, not tuned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

P = ParamSpec("P")
T = TypeVar("T")

VARIANTS = 64  # of one kind of block that may be compiled: shapes, with and without a gradient of the input
TUNED: dict[str, Any] = {
    "max_autotune_gemm": True,
    "max_autotune_conv_backends": "ATEN,TRITON",
    "autotune_num_choices_displayed": 0,  # else tuning prints a table for every convolution
    "max_autotune_report_choices_stats": False,
}
NARROW = 64  # channels


def compiled(part: Callable[P, T]) -> Callable[P, T]:
    """The same function for the shapes that it sees first. Equal code of several blocks is made once."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(part, dynamic=False, backend=_backend)


@final
class CompiledBlocks(nn.Module):
    """The same blocks under the same names, compiled.

    Block by block, the code is made once per kind and shape, however many blocks there are. As a whole it takes
    minutes for a deep network.
    """

    def __init__(self, module: nn.Sequential, whole: bool = False) -> None:
        super().__init__()
        for name, block in module.named_children():
            self.add_module(name, block)
        self._calls: list[Callable[[Tensor], Tensor]] = [compiled(part) for part in ([module] if whole else module)]

    def forward(self, x: Tensor) -> Tensor:
        for call in self._calls:
            x = call(x)
        return x


def _backend(graph: GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx  # it takes seconds to import
    from torch._inductor.decomposition import select_decomp_table

    if not is_narrow(inputs):
        return compile_fx(graph, inputs)
    table = {**select_decomp_table(), torch.ops.aten.convolution_backward.default: _convolution_backward}
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
    # kernels that do not run on this GPU are tried and passed over: no reason for an error message
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    return compile_fx(graph, inputs, config_patches=TUNED if on_gpu else {}, decompositions=table)


def is_narrow(inputs: Iterable[Any]) -> bool:
    """Has no map, and no kernel, of what goes into a block more channels than `NARROW`?"""
    return all(value.shape[1] <= NARROW for value in inputs if isinstance(value, Tensor) and value.dim() == 4)


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """The gradient of the input as a convolution with the mirrored kernel, where the side stays the same."""
    sides = weight.shape[2:]
    same_side = all(2 * p == side - 1 for p, side in zip(padding, sides, strict=True))
    plain = not transposed and groups == 1 and set(stride) == {1} and set(dilation) == {1}
    if not (wanted[0] and same_side and plain and len(sides) == 2):
        return NotImplemented
    aten = torch.ops.aten
    mirrored = weight.transpose(0, 1).flip(2, 3)
    of_input = aten.convolution(gradient, mirrored, None, stride, padding, dilation, False, output_padding, 1)
    options = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    rest = aten.convolution_backward(gradient, x, weight, *options, [False, *wanted[1:]])
    return of_input, rest[1], rest[2]
