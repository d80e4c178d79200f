"""Mixed precision: which one a stage works in, and copies of its weights in that precision."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import torch
from torch import Tensor, nn

from parlay.errors import InputError

CONVERTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers whose weights autocast takes in the low precision


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The low precision that `--precision` stands for on this device; None for full precision."""
    if precision not in ("auto", "float32", "bfloat16"):
        raise InputError(f"unknown precision '{precision}': write auto, float32 or bfloat16")
    # older GPUs only imitate bfloat16
    pays = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and pays) else None


def chosen_device(asked: str | torch.device) -> torch.device:
    """Of a process that trains by itself."""
    if isinstance(asked, torch.device):
        return asked
    if asked not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device '{asked}': write auto, cpu or cuda")
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise InputError("no GPU to be found: write --device cpu")
    return torch.device("cuda", 0) if there and asked != "cpu" else torch.device("cpu")


def mixed_precision(precision: str, device: torch.device) -> torch.autocast:
    """The context in which a stage on this device works."""
    low = autocast_dtype(precision, device)
    return torch.autocast(device.type, low, enabled=low is not None)


def in_full(output: Any) -> Any:
    """What a network puts out, one tensor or several, as losses want it: mixed precision ends here."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, tuple | list):
        return tuple(in_full(part) for part in output)
    return output


@final
class LowPrecision:
    """Copies of the weights that autocast would convert, but for those that several layers share.

    One kernel makes all copies, and one their gradients on the way back; autocast makes them one by one. The numbers
    are the same.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = parameters
        layers = {f"{name}." if name else "": layer for name, layer in module.named_modules()}
        converted = {
            f"{prefix}{name}": weight
            for prefix, layer in layers.items()
            if type(layer) in CONVERTED
            for name, weight in layer.named_parameters(recurse=False)
        }
        uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
        weights = {name: weight for name, weight in converted.items() if uses[id(weight)] == 1}
        self.copies = {name: w.detach().to(dtype).requires_grad_(w.requires_grad) for name, w in weights.items()}
        self.fresh = False
        """Are they those of the weights of now?"""

    def of_now(self) -> dict[str, Tensor]:
        """Renewed after the weights have changed; not between micro-batches, which need them for their backward."""
        if not self.fresh:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), [self.parameters[name] for name in self.copies])
            self.fresh = True
        return dict(self.copies)

    def collect(self) -> None:
        """The gradients of the copies become those of the weights."""
        found = {name: copy.grad for name, copy in self.copies.items() if copy.grad is not None}
        if not found:
            return
        weights = [self.parameters[name] for name in found]
        gradients = [torch.empty_like(weight) for weight in weights]
        with torch.no_grad():
            torch._foreach_copy_(gradients, list(found.values()))
        for name, weight, gradient in zip(found, weights, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient  # where several are added up
            self.copies[name].grad = None
