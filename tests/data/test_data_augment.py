"""Augmented images are windows of the originals, the same for the same generator and on every device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.data import Split, as_split, crop_and_flip, expand, normalise
from parlay.errors import InputError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, shape: tuple[int, int, int] = (3, 8, 6), dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(1, 256, (n, *shape), generator=generator(9)).to(dtype)


def windows(image: Tensor, pad: int, flip: bool) -> dict[tuple[int, int, bool], Tensor]:
    """All that may become of one image, by its shift and whether it is mirrored: written out as loops."""
    _, height, width = image.shape
    padded = F.pad(image, (pad, pad, pad, pad))
    made = {}
    for down in range(2 * pad + 1):
        for right in range(2 * pad + 1):
            window = padded[:, down : down + height, right : right + width]
            made[down, right, False] = window
            if flip:
                made[down, right, True] = window.flip(2)
    return made


def drawn(images: Tensor, results: Tensor, pad: int, flip: bool) -> list[tuple[int, int, bool]]:
    """What was drawn for each image; fails if a result is not one of its image's windows."""
    found = []
    for image, result in zip(images, results, strict=True):
        matches = [key for key, window in windows(image, pad, flip).items() if torch.equal(window, result)]
        assert len(matches) == 1
        found += matches
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("pad", "flip"), [(2, True), (2, False), (0, True), (9, False)])
def test_each_result_is_a_window_of_its_own_padded_image(dtype: torch.dtype, pad: int, flip: bool) -> None:
    images = noise(12, dtype=dtype)
    results = crop_and_flip(images, generator(), pad, flip)
    assert results.shape == images.shape
    assert results.dtype == dtype
    # beyond the image's side all windows are empty and cannot be told apart
    if pad <= 2:
        drawn(images, results, pad, flip)


def test_all_shifts_and_both_sides_are_drawn_evenly() -> None:
    images = noise(900, (1, 4, 4))
    found = drawn(images, crop_and_flip(images, generator(), pad=1), 1, True)
    for value in range(3):
        assert 240 < sum(down == value for down, _, _ in found) < 360
        assert 240 < sum(right == value for _, right, _ in found) < 360
    assert 390 < sum(mirrored for _, _, mirrored in found) < 510
    assert len(set(found)) == 18


def test_the_same_generator_gives_the_same_images() -> None:
    images = noise(32)
    assert torch.equal(crop_and_flip(images, generator(3)), crop_and_flip(images, generator(3)))
    assert not torch.equal(crop_and_flip(images, generator(3)), crop_and_flip(images, generator(4)))


def test_the_originals_are_left_as_they_are() -> None:
    images = noise(8)
    before = images.clone()
    crop_and_flip(images, generator())
    normalise(images, (0.5,) * 3, (0.25,) * 3)
    assert torch.equal(images, before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_makes_the_same_images_as_the_cpu() -> None:
    images = noise(32)
    assert torch.equal(crop_and_flip(images.cuda(), generator()).cpu(), crop_and_flip(images, generator()))


def test_normalise_is_the_formula_in_every_channel() -> None:
    images = noise(5)
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    expected = (images.double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(normalise(images, mean, std).double(), expected, atol=1e-5)


def test_normalise_refuses_floats_and_a_wrong_number_of_channels() -> None:
    with pytest.raises(InputError, match="uint8"):
        normalise(noise(2).float(), (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(InputError, match="3 channels, 1 means"):
        normalise(noise(2), (0.5,), (0.5,))


def test_what_is_no_batch_of_images_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(N, C, H, W\)"):
        crop_and_flip(torch.zeros(4, 4), generator())
    with pytest.raises(InputError, match="pad -1"):
        crop_and_flip(noise(2), generator(), pad=-1)


def test_expand_keeps_the_originals_and_adds_copies_with_their_labels() -> None:
    split = Split(noise(10), torch.arange(10))
    grown = expand(split, ratio=2, seed=0)
    assert len(grown) == 30
    assert grown.inputs.dtype == torch.uint8
    assert torch.equal(grown.inputs[:10], split.inputs)
    assert grown.targets.tolist() == 3 * list(range(10))
    for copy in (1, 2):
        drawn(split.inputs, grown.inputs[10 * copy : 10 * (copy + 1)], 4, True)
    assert not torch.equal(grown.inputs[10:20], grown.inputs[20:])


def test_expand_works_through_more_images_than_it_takes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.data.augment.CHUNK", 4)
    split = Split(noise(10), torch.arange(10))
    drawn(split.inputs, expand(split, 1, seed=0).inputs[10:], 4, True)


def test_expand_by_nothing_is_the_same_and_by_less_is_refused() -> None:
    split = as_split((noise(3), torch.arange(3)))
    assert expand(split, 0, seed=0) is split
    with pytest.raises(InputError, match="ratio -1"):
        expand(split, -1, seed=0)
