"""What a run's auto-encoder makes of some test images: grey values in bytes, (count, channels, height, width).

They are made from `model.safetensors` after the run, and kept in its folder as `reconstructions.safetensors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_weights
from safetensors.torch import save as packed
from torch import Tensor, nn

from parlay import data, models
from parlay_paper.runs import recipe_in

FILE = "reconstructions.safetensors"
COUNT = 10  # the first of the test set

Images = dict[str, NDArray[Any]]
"""`images` and `reconstructions`."""


def of_run(folder: Path, data_dir: str) -> Images | None:
    """None where neither images nor a model were kept."""
    if not (folder / FILE).is_file():
        if not (folder / "model.safetensors").is_file():
            return None
        recipe = recipe_in(folder)
        samples = recipe.synthetic_samples
        synthetic = data.Synthetic(recipe.shape(), recipe.synthetic_classes, samples, max(samples // 4, 1))
        found = data.load(recipe.dataset, data_dir, synthetic)
        model = models.build(recipe.model, found.facts.shape, found.facts.classes)
        model.load_state_dict(load_weights(folder / "model.safetensors"))
        images = data.normalise(found.test.inputs[:COUNT], found.facts.mean, found.facts.std)
        partial = folder / f"{FILE}.partial"
        partial.write_bytes(packed(rebuilt(model, images)))
        partial.replace(folder / FILE)
    return load_file(folder / FILE)


@torch.no_grad()
def rebuilt(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """From the least to the greatest value of the images. The first of several outputs is the reconstruction."""
    output = model.eval()(images)
    made: Tensor = output[0] if isinstance(output, tuple | list) else output
    low, high = float(images.min()), float(images.max())

    def in_bytes(x: Tensor) -> Tensor:
        return (255 * (x - low) / max(high - low, 1e-12)).clamp(0, 255).round().to(torch.uint8).contiguous()

    return {"images": in_bytes(images), "reconstructions": in_bytes(made)}
