"""A run of an auto-encoder leaves some test images beside what it makes of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parlay import reconstructions
from parlay.data import as_split, facts, load, normalise
from parlay.data.feed import Feed
from parlay.models import build
from runs import train


class Doubled(nn.Module):
    """An auto-encoder of several outputs, whose first is twice the image."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x


def feed(images: Tensor) -> Feed:
    return Feed(as_split((images, torch.zeros(len(images)))), reconstruct=True)


def test_bytes_go_from_the_least_to_the_greatest_value_of_the_images(tmp_path: Path) -> None:
    images = torch.tensor([0.0, 0.25, 0.5, 1.0]).reshape(1, 1, 2, 2)
    reconstructions.save(Doubled(), feed(images), tmp_path / "r")
    kept = load_file(tmp_path / "r")
    assert kept["images"].flatten().tolist() == [0, 64, 128, 255]
    assert kept["reconstructions"].flatten().tolist() == [0, 128, 255, 255]  # what is beyond is cut off
    assert kept["images"].dtype == torch.uint8


def test_the_first_test_images_are_kept(tmp_path: Path) -> None:
    images = torch.rand(30, 3, 4, 4)
    reconstructions.save(nn.Identity(), feed(images), tmp_path / "r")
    kept = load_file(tmp_path / "r")
    assert kept["images"].shape == (reconstructions.COUNT, 3, 4, 4)
    assert torch.equal(kept["images"], kept["reconstructions"])


@pytest.mark.parametrize("samples", [torch.rand(5, 6), torch.rand(5, 1, 4, 4).long()])
def test_of_samples_that_are_no_images_nothing_is_kept(tmp_path: Path, samples: Tensor) -> None:
    reconstructions.save(nn.Identity(), feed(samples), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_run_of_the_vae_keeps_what_its_saved_model_makes_of_them_and_the_page_shows_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--model", "resnet8-vae", "--dataset", "digits", "--optimizer", "adam", "--lr", 0.01)
    assert train(run, *flags, "--stages", 2, "--epochs", 2, "--batch-size", 256) == 0
    kept = load_file(run / reconstructions.FILE)
    model = build("resnet8-vae", (1, 8, 8), 10)
    model.load_state_dict(load_file(run / "model.safetensors"))
    images = normalise(
        load("digits", "").test.inputs[: reconstructions.COUNT], facts("digits").mean, facts("digits").std
    )
    with torch.no_grad():
        rebuilt = (model.eval()(images)[0] - images.min()) / (images.max() - images.min())
    wanted = (255 * rebuilt).clamp(0, 255)
    assert (kept["reconstructions"].float() - wanted).abs().max() <= 1


def test_a_classifier_keeps_none(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--stages", 1, "--epochs", 1) == 0
    assert not (tmp_path / "run" / reconstructions.FILE).exists()
