"""The benchmark of one GPU: its systems are the engine's own steps, and the fastest serial one is the measure."""

import pytest
import torch

from parlay import bench
from parlay.bench import core, cuda
from parlay.config.recipe import Recipe
from parlay.errors import InputError

SMALL = Recipe(dataset="digits", model="resnet8", stages=2, batch_size=8, device="cpu", schedule="parallel")
gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("method", ["al", "penalty", "replay"])
def test_every_system_steps_and_tells_what_it_holds(device: str, method: str) -> None:
    recipe = Recipe(**{**vars(SMALL), "device": device, "method": method})
    layers = cuda.Engined("layer-parallel", recipe, "K = 2")
    serial = cuda.Engined("serial", cuda._serial(recipe), "eager")
    rows = core.interleaved([serial, layers], core.Problem("resnet8", 8), rounds=2, steps=2, say=str)
    assert [row.stages for row in rows] == [1, 2]
    assert all(row.step_ms > 0 for row in rows)
    assert rows[0].extra["auxiliary_mib_of_data_set"] == 0
    assert rows[1].extra["auxiliary_mib_of_data_set"] > 0
    assert rows[1].extra["cuts"] != []
    assert [row.samples_per_step for row in rows] == [8, 4 if method == "penalty" else 8]
    for system in (serial, layers):
        system.close()


def test_the_fastest_serial_system_is_what_all_are_held_against() -> None:
    class Clocked(core.Timed):
        def __init__(self, system: str, seconds: float, baseline: bool) -> None:
            self.system, self.stages, self.seconds, self.baseline = system, 1, seconds, baseline

        def time(self, steps: int) -> float:
            return self.seconds * steps

    systems = [
        Clocked("serial-eager", 4.0, True),
        Clocked("serial-graph", 1.0, True),
        Clocked("serial", 2.0, True),
        Clocked("layer-parallel", 0.5, False),
    ]
    rows = core.interleaved(systems, core.Problem("any", 1), rounds=3, steps=2, say=str)
    assert [row.speedup for row in rows] == [0.25, 1.0, 0.5, 2.0]


def test_what_cannot_be_timed_is_refused() -> None:
    with pytest.raises(InputError, match="resnet-vae"):
        cuda.resolved(Recipe(model="resnet-vae"))
    with pytest.raises(InputError, match="--method"):
        cuda.resolved(Recipe(method="serial"))


def test_only_a_gpu_has_a_step_compiled_in_one_piece() -> None:
    named = [[system.system for system in cuda.systems(SMALL, "cost", str, whole)] for whole in (False, True)]
    assert [system for system in named[1] if system not in named[0]] == ["serial-whole"]
    assert "replay" in named[0]
    with pytest.raises(InputError, match="leave --whole out"):
        bench.run(SMALL, 1, 1, str, whole=True)
