"""How fast the rows are: measured on the devices at hand, and projected for a device per stage. Never mixed.

Measured: the time of a parallel step against that of a serial one, both by Parlay's engine in this process, in turn,
with nothing beside them. In one process on CPU cores K stages share the cores, and the ratio would say nothing.

Projected (eq. 9, with the measured stages in the place of (t_f + t_b) / K): every stage is timed alone, with its local
loss; what crosses its interfaces in a step takes bytes / speed of a link, nothing overlapped. The slowest stage counts.
Not in it: the states' own update, a few operations per element.

A hybrid's ratio is eq. (11), by the phases that its schedule has.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import final

import torch

from parlay.bench import processor, side_by_side
from parlay.bench.core import LAYER_PARALLEL, SERIAL, Problem, Result, Say, System, interleaved, quartiles
from parlay.bench.cuda import EngineSystem, serial
from parlay.config.recipe import Recipe
from parlay.plan import hybrid_speedup
from parlay.run.records import environment, write_json
from parlay.run.setup import set_up
from parlay.stage.precision import chosen_device
from parlay_paper.isolated import Isolated, link_speed

ROUNDS = 5
STEPS = {"cuda": 20, "cpu": 1}  # of one timing; on the CPU a step of these networks takes a second


@final
@dataclass(frozen=True)
class Timing:
    """Of one kind of row: a method at one K and r, at the cuts that its runs have."""

    serial_ms: float
    stage_ms: list[float]
    """Of a step of each stage alone, with as many samples as it computes in a step."""
    exchange_bytes: list[int]
    link_bytes_per_second: float
    measured: float | None
    """Serial step over parallel step, the median of the rounds; None on the CPU."""
    measured_low: float | None = None
    measured_high: float | None = None

    @property
    def message_ms(self) -> list[float]:
        return side_by_side.message_ms(self.exchange_bytes, self.link_bytes_per_second)

    @property
    def projected(self) -> float:
        return self.serial_ms / side_by_side.step_ms(self.stage_ms, self.exchange_bytes, self.link_bytes_per_second)


@final
class Timings:
    """What has been timed, kept in a file beside the runs: from it a table can be written again on any machine.

    What is missing is timed. Not where the rest was timed on other hardware: a table has one kind of device.
    """

    def __init__(self, path: Path, device: str) -> None:
        """`device` is that of the recipes: auto, cpu or cuda."""
        self.path = path
        self.kind = chosen_device(device).type
        self.here = _name(self.kind)
        self.kept: dict[str, Timing] = {}
        self.device, self.environment = self.here, environment([self.here])
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            device, about = content["device"], content["environment"]
            self.kept = {key: Timing(**value) for key, value in content["timings"].items()}
            self.device, self.environment = device, about

    def of(self, recipe: Recipe) -> Timing | None:
        return self.kept.get(_key(recipe))

    def add(self, recipes: Sequence[Recipe], say: Say) -> None:
        """Time what is not known yet. The recipes are those of the runs, with their cuts."""
        wanted = {_key(recipe): recipe for recipe in recipes if recipe.method != "serial"}
        if wanted.keys() <= self.kept.keys():
            return
        if self.kept and self.device != self.here:
            say(f"{self.path} is of {self.device}; what it lacks is not timed: delete it to time all on {self.here}")
            return
        self.device, self.environment = self.here, environment([self.here])
        missing = {key: recipe for key, recipe in wanted.items() if key not in self.kept}
        speed = link_speed(self.kind)
        for key, recipe in missing.items():
            say(f"timing {key}")
            try:
                self.kept[key] = _timed(recipe, speed)
            except RuntimeError as error:  # out of memory, say: the other rows can be timed all the same
                say(f"{key} could not be timed: {str(error).strip().partition(chr(10))[0]}")
                continue
            timings = {name: asdict(timing) for name, timing in self.kept.items()}
            write_json(self.path, {"device": self.device, "timings": timings, "environment": self.environment})


def speedups(timing: Timing | None, phases: str) -> tuple[float | None, float | None]:
    """(measured, projected) over these phases."""
    if timing is None or not phases:
        return None, None
    measured = hybrid_speedup(timing.measured, phases) if timing.measured else None
    return measured, hybrid_speedup(timing.projected, phases)


def _timed(recipe: Recipe, link: float) -> Timing:
    setup = set_up(replace(recipe, engine="in-process", compile="on", schedule="parallel"))
    recipe, count = setup.recipe, setup.recipe.stages
    kind = chosen_device(recipe.device).type
    stages = [Isolated(recipe, k) for k in range(count)]
    whole = [EngineSystem(LAYER_PARALLEL, recipe, f"K = {count}")] if kind == "cuda" else []
    systems: list[System] = [EngineSystem(SERIAL, serial(recipe), ""), *stages, *whole]
    with ExitStack() as held:
        held.callback(_free)
        for system in systems:
            held.callback(system.close)
        rows = interleaved(systems, Problem(recipe.model, recipe.batch_size), ROUNDS, STEPS[kind], lambda _: None)
    assert setup.method is not None
    stage_ms = [_least(row) * setup.method.work(k, count) for k, row in enumerate(rows[1 : 1 + count])]
    share = stages[0].rows / recipe.batch_size
    crossing = [math.ceil(share * each) for each in side_by_side.exchanged(setup)]
    low, middle, high = [one / rows[-1].share for one in quartiles(rows[-1].speedups)] if whole else [None] * 3
    return Timing(_least(rows[0]), stage_ms, crossing, link, middle, low, high)


def _least(row: Result) -> float:
    """Of all rounds: what disturbs only adds, and a sum of medians is not the median of a sum."""
    return 1000 * min(row.seconds)


def _free() -> None:
    gc.collect()  # captured steps and stages hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _key(recipe: Recipe) -> str:
    """What a time depends on."""
    cut = f"r={recipe.downsample} cuts={recipe.partition} batch={recipe.batch_size} model={recipe.model}"
    return f"{recipe.method} K={recipe.stages} {cut}"


def _name(kind: str) -> str:
    if kind == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return processor() or "cpu"
