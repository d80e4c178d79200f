"""What a run leaves: weights that plain PyTorch loads, shared ones too, readable by whom the umask says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import parlay
from problems import trainer


class Shared(nn.Module):
    """Two layers with the same weight, inside one block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    twice = Shared()
    return nn.Sequential(nn.Linear(4, 6), twice, twice, nn.Linear(6, 3))


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(24, 4, generator=random), torch.randint(3, (24,), generator=random)


def test_weights_shared_inside_a_stage_are_trained_and_saved_with_the_mode_of_the_umask(tmp_path: Path) -> None:
    cut = parlay.partition(network(), 2, data()[0][:4], by=[3])
    before = os.umask(0o027)
    try:
        result = trainer(cut, parlay.Replay(), schedule="parallel", batch_size=8, out=tmp_path).fit(data(), epochs=2)
    finally:
        os.umask(before)
    assert result.status == "finished"
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640
    plain = network()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(plain(data()[0]), result.model(data()[0]))
    assert not torch.equal(plain[1].first.weight, network()[1].first.weight)


def test_an_optimiser_that_asks_for_several_passes_is_refused_at_the_start(tmp_path: Path) -> None:
    cut = parlay.partition(network(), 2, data()[0][:4], by=[3])
    made = trainer(cut, parlay.Replay(), optimizer=lambda weights: torch.optim.LBFGS(list(weights)), out=tmp_path)
    with pytest.raises(parlay.InputError, match=r"LBFGS .* write SGD, Adam"):
        made.fit(data(), epochs=1)
