"""Time per sample trained on two cores, a process per stage: the systems of `parlay bench`, and every method at K = 2.

In: a problem. Out: `time-PROBLEM.json`. Every round times every system once, in rotating order, and a ratio to serial
training on one core is taken inside its round.

In the red-black order a stage of `penalty` computes half of the samples of a step, so times are per sample trained: a
sample counts when all stages have trained on it. A hybrid is timed over whole cycles of its schedule, four parallel
epochs and a serial one, in which the stages take turns as they do in the runs of the accuracies.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import home_queue
import home_rows

from parlay import methods
from parlay.bench import workers
from parlay.bench.core import Problem, Say, System, as_json, best, interleaved
from parlay.bench.cpu import MICRO_BATCHES, one_core
from parlay.bench.processes import BenchWorker, Pool, PoolSystem, Seat, cores
from parlay.config.recipe import Recipe
from parlay.config.schedule import PARALLEL, SERIAL, alternate
from parlay.engine.losses import Totals
from parlay.run.records import environment, write_json
from parlay.run.setup import set_up

STAGES = 2
CYCLE = "".join(letter for letter, _ in zip(alternate(4, 1), range(5), strict=False))
ROUNDS, STEPS = 11, 16


def file(out: Path, problem: str) -> Path:
    return out / f"time-{problem}.json"


def refused() -> str | None:
    found = len(cores()) or os.cpu_count() or 1
    return None if found >= STAGES else f"{found} core has no stages to time side by side: write --only accuracy"


def measure(problem: str, out: Path, say: Say, rounds: int = ROUNDS, steps: int = STEPS) -> None:
    """Time all systems of one problem; what is there is not timed again."""
    if file(out, problem).exists():
        return
    load, began = os.getloadavg()[0], time.monotonic()
    recipes = resolved(problem)
    pools: list[Pool] = []
    try:
        systems = _systems(recipes, pools, say)
        shape = Problem(recipes["al-k2"].model, recipes["al-k2"].batch_size)
        rows = best(interleaved(systems, shape, rounds, steps, say))
    finally:
        for pool in pools:
            pool.close()
    about = {**environment(["cpu"] * STAGES), **home_queue.about(), "load_before": load}
    cuts = {name: recipe.partition for name, recipe in recipes.items()}
    measured = {"rounds": rounds, "steps": steps, "cuts": cuts, "wall_seconds": time.monotonic() - began}
    out.mkdir(parents=True, exist_ok=True)
    write_json(file(out, problem), as_json(rows, about, "python results/laptop/run.py --only time", **measured))


def resolved(problem: str) -> dict[str, Recipe]:
    """Of every row at K = 2, cut by measured cost. Methods whose stages do the same work are cut at the same place."""
    found, cuts = dict[str, Recipe](), dict[str, str]()
    for name in (name for name, row in home_rows.ROWS.items() if row.stages == STAGES):
        recipe = Recipe(**home_rows.Job(problem, name, 0).keys(Path("data")))
        recipe = replace(recipe, precision="float32", serial_phase="sequential")
        work = recipe.method if methods.streams(recipe.method) else "stored"
        with one_core():
            found[name] = set_up(replace(recipe, partition=cuts.get(work, "cost"))).recipe
        cuts[work] = found[name].partition
    return found


def _systems(recipes: dict[str, Recipe], pools: list[Pool], say: Say) -> list[System]:
    plain = recipes["al-k2"]

    def pool(name: str, make: Any, size: int, threads: int = 1) -> Pool:
        say(f"starting {name}")
        pools.append(Pool(name, make, size, threads))
        pools[-1].ready()
        return pools[-1]

    whole = partial(workers.WholeNetwork, plain)
    systems: list[System] = [
        PoolSystem("serial", pool("serial", whole, 1), 1, "one core"),
        PoolSystem("serial-2-threads", pool("serial-2-threads", whole, 1, 2), 1, "two threads"),
    ]
    pipeline = pool("pipeline", partial(workers.Pipelined, plain), STAGES)
    for option in ((schedule, m) for schedule in workers.SCHEDULES for m in MICRO_BATCHES):
        systems.append(PoolSystem("pipeline", pipeline, STAGES, "{}, M = {}".format(*option), option))
    replicas = pool("data-parallel", whole, STAGES)
    systems.append(PoolSystem("data-parallel", replicas, STAGES, f"DDP, {STAGES} replicas"))
    for name, recipe in recipes.items():
        letters = CYCLE if home_rows.ROWS[name].hybrid else PARALLEL
        own = pool(name, partial(Scheduled, recipe, letters), STAGES)
        systems.append(PerSample(PoolSystem(name, own, STAGES), letters, recipe))
    return systems


@final
class PerSample(System):
    """A method, timed over whole cycles of its schedule; seconds are those of as many samples trained as in a batch."""

    def __init__(self, inner: PoolSystem, letters: str, recipe: Recipe) -> None:
        self.inner, self.system, self.stages = inner, inner.system, inner.stages
        share = 0.5 if recipe.method == "penalty" else 1.0
        self.trained = sum(share if letter == PARALLEL else 1.0 for letter in letters) / len(letters)
        self.cycle = len(letters) * workers.BATCHES
        self.note = f"{self.trained:g} of a batch trained a step"

    def time(self, steps: int) -> float:
        whole = self.cycle if self.cycle > workers.BATCHES else steps  # without a serial epoch all steps are alike
        return self.inner.time(whole) / whole / self.trained * steps

    def extra(self) -> dict[str, Any]:
        return {**self.inner.extra(), "trained_share": self.trained}


@final
class Scheduled(BenchWorker):
    """A stage at work as in a training run, epoch after epoch of a schedule, on the bench's synthetic images."""

    def __init__(self, recipe: Recipe, letters: str, seat: Seat) -> None:
        self.layers, self.letters = workers.LayerParallel(recipe, seat), letters

    def step(self, n: int, option: Any) -> None:  # noqa: ARG002
        engine, (epoch, step) = self.layers.engine, divmod(n, workers.BATCHES)
        before, letter, after = (self.letters[n % len(self.letters)] for n in (epoch - 1, epoch, epoch + 1))
        last = step == workers.BATCHES - 1
        if step == 0:
            engine.totals = Totals()
        if step == 0 and epoch > 0 and (before, letter) == (SERIAL, PARALLEL):
            engine.refresh((self._batch(epoch, n) for n in range(workers.BATCHES)), lambda: False)
        (engine.parallel_step if letter == PARALLEL else engine.serial_step)(self._batch(epoch, step))
        if last:
            engine.drain()
        if last and (letter, after) == (PARALLEL, SERIAL):
            engine.finish()

    def _batch(self, epoch: int, step: int) -> Any:
        """The last one of an epoch has none that follows, as in training."""
        batch = self.layers.bench.batch(step)
        return replace(batch, epoch=epoch, following=batch.following[: workers.BATCHES - 1 - step])

    def waited(self) -> float:
        return self.layers.waited()

    def close(self) -> None:
        self.layers.close()
