"""The benchmark of one GPU: its systems are the engine's own steps, and the fastest serial one is the measure."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor import select_algorithm
from torch._inductor.virtualized import V

from parlay import bench
from parlay.bench import core, cuda
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.stage import compiled

SMALL = Recipe(dataset="digits", model="resnet8", stages=2, batch_size=8, device="cpu", schedule="parallel")
gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("method", ["al", "penalty", "replay"])
def test_every_system_steps_and_tells_what_it_holds(device: str, method: str) -> None:
    recipe = Recipe(**{**vars(SMALL), "device": device, "method": method})
    layers = cuda.EngineSystem("layer-parallel", recipe, "K = 2")
    serial = cuda.EngineSystem("serial", cuda.serial(recipe), "eager")
    rows = core.interleaved([serial, layers], core.Problem("resnet8", 8), rounds=2, steps=2, say=str)
    assert [row.stages for row in rows] == [1, 2]
    assert all(row.step_ms > 0 for row in rows)
    assert [row.extra["auxiliary_mib_of_data_set"] > 0 for row in rows] == [False, True]
    assert rows[1].extra["cuts"] != []
    assert [row.samples_per_step for row in rows] == [8, 4 if method == "penalty" else 8]
    for system in (serial, layers):
        system.close()


def test_stores_in_files_lie_in_a_folder_that_nobody_can_guess_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    system = cuda.EngineSystem("layer-parallel", replace(SMALL, store="file"), "K = 2")
    system.time(1)
    assert list(tmp_path.glob("*/stores/*"))
    assert not (tmp_path / "stores").exists()
    system.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_timed_is_refused() -> None:
    with pytest.raises(InputError, match="resnet-vae"):
        cuda.systems(Recipe(model="resnet-vae"), str)
    with pytest.raises(InputError, match="--method"):
        cuda.systems(Recipe(method="serial"), str)


def test_only_a_gpu_has_a_step_compiled_in_one_piece() -> None:
    named = [[system.system for system in cuda.systems(SMALL, str, whole)[1]] for whole in (False, True)]
    assert [system for system in named[1] if system not in named[0]] == ["serial-whole"]
    assert "replay" in named[0]
    with pytest.raises(InputError, match="leave --whole out"):
        bench.run(SMALL, 1, 1, str, whole=True)


def test_the_compiler_tunes_without_printing_what_it_tries(capsys: pytest.CaptureFixture[str]) -> None:
    choice = Mock(description="a kernel")
    with inductor.patch(compiled.TUNED), V.set_debug_handler(Mock()):
        select_algorithm.AlgorithmSelectorCache.log_results("convolution", [], {choice: 1.0}, 0.1, 0.1)
        assert not inductor.max_autotune_report_choices_stats
    assert capsys.readouterr().err == ""
