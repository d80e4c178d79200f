"""In rounds, as between GPUs, a process per stage trains as one process does. Here gloo carries them, on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from parlay.engines.links import Rounds
from parlay.engines.world import World
from ranks import together
from test_distributed import (
    FOUR,
    HYBRID,
    LAST_OF_ONE,
    RED_BLACK,
    REPLICAS,
    ROUNDING,
    STOPPED,
    THREE,
    Case,
    Ran,
    Spoiler,
    assert_same,
    off,
)

CASES: dict[int, dict[str, Case]] = {
    2: {
        "al, downsampled, hybrid": Case(epochs=5, options={**HYBRID, "downsample": 2}),
        "al, bfloat16": Case(options={"store_dtype": "bfloat16"}),
        "red-black, last batch of one": Case(method=RED_BLACK, **LAST_OF_ONE),
    },
    3: THREE,
    4: {name: FOUR[name] for name in ("al, no batch norm, hybrid", "red-black")},
}


def in_rounds(ranks: int) -> dict[str, Ran]:
    World.rounds = lambda self: Rounds(dist.new_group(list(range(self.size))), self.stage)  # type: ignore[method-assign]
    options: dict[str, Any] = {"replicas": 2} if ranks == 4 else {}
    found = {name: case.run("distributed", **options) for name, case in CASES[ranks].items()}
    if ranks == 2:
        found |= {how: STOPPED.run("distributed", loss=Spoiler(8, how)) for how in ("signal", "nan")}
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_processes_that_exchange_in_rounds_train_as_one_process(ranks: int) -> None:
    answers = together(ranks, in_rounds, ranks, timeout=90)
    for name, case in CASES[ranks].items():
        rounded = case.options.get("store_dtype") == "bfloat16"
        assert_same(
            answers[0][name], case.run(), REPLICAS if ranks == 4 else ROUNDING, records=1e-2 if rounded else 1e-3
        )
    if ranks == 2:
        assert answers[0]["signal"].status == "interrupted"
        diverged, alone = answers[0]["nan"], STOPPED.run(loss=Spoiler(8, "nan"))
        assert (diverged.status, diverged.message) == ("diverged", alone.message)
        assert off(diverged, alone) < ROUNDING
