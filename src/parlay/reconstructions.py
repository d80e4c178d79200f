"""What an auto-encoder makes of some test images, kept in the run folder for the report to show.

`reconstructions.safetensors` holds `images` and `reconstructions`, both (count, channels, height, width) in bytes: the
grey values of the images as the network sees them, from their least to their greatest.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save as packed
from torch import Tensor, nn

from parlay.data.feed import Feed

FILE = "reconstructions.safetensors"
COUNT = 10  # the first of the test set: as many as fit side by side on a phone


@torch.no_grad()
def save(model: nn.Module, test: Feed, path: Path) -> None:
    """The model is whole and on the CPU; its output, or the first of several, is the reconstruction.

    Nothing is kept of samples that are no images, or of outputs that are none.
    """
    images = test.batch(torch.arange(min(COUNT, len(test))))[0].cpu()
    output = model.eval()(images)
    rebuilt = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(rebuilt, Tensor) or rebuilt.shape != images.shape:
        return
    if images.dim() != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
        return
    low, high = float(images.min()), float(images.max())
    scratch = path.with_suffix(".partial")
    scratch.write_bytes(packed({"images": _bytes(images, low, high), "reconstructions": _bytes(rebuilt, low, high)}))
    scratch.replace(path)


def _bytes(x: Tensor, low: float, high: float) -> Tensor:
    return (255 * (x - low) / max(high - low, 1e-12)).clamp(0, 255).round().to(torch.uint8).contiguous()
