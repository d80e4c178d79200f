"""Images as images: a row of them becomes one PNG that lies in the page itself."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE = "reconstructions.safetensors"
GAP = 1  # pixels between two images, through which the page shows

Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Reconstructions:
    """Of a run: some test images and what it makes of them, (count, channels, height, width) in bytes."""

    shape: tuple[int, ...]
    images: bytes
    rebuilt: bytes

    @property
    def first_row(self) -> Images:
        return np.frombuffer(self.images, np.uint8).reshape(self.shape)

    @property
    def second_row(self) -> Images:
        return np.frombuffer(self.rebuilt, np.uint8).reshape(self.shape)


def read(path: Path) -> Reconstructions:
    """Raises ValueError where the file is not what `parlay.reconstructions` writes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        content = load_file(path)
        images, rebuilt = content["images"], content["reconstructions"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"no images, {error}") from None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError("no images of one or three channels")
    if (rebuilt.dtype, rebuilt.shape) != (images.dtype, images.shape) or images.size == 0:
        raise ValueError("not as many reconstructions as images")
    return Reconstructions(images.shape, images.tobytes(), rebuilt.tobytes())


def strip(images: Images) -> bytes:
    """A PNG of the images side by side."""
    from matplotlib.image import imsave

    count, channels, height, width = images.shape
    row = np.zeros((height, count * (width + GAP) - GAP, 4), np.uint8)
    for n, image in enumerate(images):
        at = n * (width + GAP)
        row[:, at : at + width, :3] = image.transpose(1, 2, 0) if channels == 3 else image[0, :, :, None]
        row[:, at : at + width, 3] = 255
    out = io.BytesIO()
    imsave(out, row, format="png")
    return out.getvalue()


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode()
