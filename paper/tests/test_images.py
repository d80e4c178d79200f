"""What a VAE makes of test images, from the model that its run has saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parlay.data import facts, load, normalise
from parlay.models import build
from parlay_paper import images
from runs import train


class Doubled(nn.Module):
    """An auto-encoder of several outputs, whose first is twice the image."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x


def test_bytes_go_from_the_least_to_the_greatest_value_of_the_images() -> None:
    made = images.rebuilt(Doubled(), torch.tensor([0.0, 0.25, 0.5, 1.0]).reshape(1, 1, 2, 2))
    assert made["images"].flatten().tolist() == [0, 64, 128, 255]
    assert made["reconstructions"].flatten().tolist() == [0, 128, 255, 255]  # what is beyond is cut off
    assert made["images"].dtype == torch.uint8


def test_the_images_of_a_run_are_made_by_its_saved_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--model", "resnet8-vae", "--dataset", "digits", "--optimizer", "adam", "--lr", 0.01)
    assert train(run, *flags, "--stages", 2, "--epochs", 1, "--batch-size", 256) == 0
    assert images.of_run(tmp_path, "data") is None
    made = images.of_run(run, "data")
    assert made is not None
    model = build("resnet8-vae", (1, 8, 8), 10)
    model.load_state_dict(load_file(run / "model.safetensors"))
    digits = normalise(load("digits", "").test.inputs[: images.COUNT], facts("digits").mean, facts("digits").std)
    with torch.no_grad():
        rebuilt = (model.eval()(digits)[0] - digits.min()) / (digits.max() - digits.min())
    assert torch.from_numpy(made["reconstructions"]).float() == pytest.approx((255 * rebuilt).clamp(0, 255), abs=1)
    (run / "model.safetensors").unlink()
    assert (images.of_run(run, "data") or {})["images"].tolist() == made["images"].tolist()  # kept beside the run
