"""K virtual GPUs: K processes, each with 1/K of the multiprocessors of one GPU (MPS), one stage each.

    nvidia-cuda-mps-control -d
    python results/gpu-bench/shares.py [--stages 2 3 4] [--out FOLDER]

Each process has the recorded, compiled step of its stage: gather of states and multipliers, forward, local loss,
backward, optimiser, new states and multipliers, scatter. Outputs, and the states and multipliers of the next batch, are
copied into memory of the neighbour's process inside that step (CUDA IPC), in the type of the store. Nobody waits for a
neighbour: the slowest process sets the pace, and its time per step is told. Against it: the serial step, recorded and
compiled, alone on one share. The bandwidth of the GPU's memory is not divided by MPS: the serial process has all of it.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from parlay import records
from parlay.bench.cuda import Engined
from parlay.coupling import Pair
from parlay.engines.graphs import Graphed, Inputs
from parlay.recipe import Recipe
from parlay.run import set_up

HERE = Path(__file__).parent
STEPS, ROUNDS = 40, 5
COMMON = Recipe(
    dataset="cifar10", model="resnet110", schedule="parallel", store_dtype="bfloat16", device="cuda", compile="on"
)


@dataclass(frozen=True)
class Mailbox:
    """What the neighbours write into this stage's memory."""

    outputs: Tensor | None
    """Of the stage before."""
    pair: Pair | None
    """States and multipliers of the interface behind."""


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--stages", type=int, nargs="*", default=[2, 3, 4])
    ask.add_argument("--out", type=Path, default=HERE)
    given = ask.parse_args()
    rows = []
    for stages in given.stages:
        share = 100 / stages
        serial = measured([Recipe(**{**vars(COMMON), "stages": 1, "partition": "even", "schedule": "serial"})], share)
        rows.append({"stages": stages, "partition": "serial", "share": share, **serial})
        for partition in ("even", "cost"):
            recipe = Recipe(**{**vars(COMMON), "stages": stages, "partition": partition})
            cuts = ",".join(map(str, in_a_process(cut, recipe)))  # the same in all processes
            parallel = measured([Recipe(**{**vars(recipe), "partition": cuts})] * stages, share)
            ratio = serial["step_ms"] / parallel["step_ms"]
            rows.append(
                {"stages": stages, "partition": partition, "share": share, "cuts": cuts, **parallel, "speedup": ratio}
            )
        for row in rows[-3:]:
            print({key: row[key] for key in row if key != "rounds_ms"}, flush=True)
    about = in_a_process(environment)
    told = {"rows": rows, "steps": STEPS, "environment": about, "command": "python results/gpu-bench/shares.py"}
    records.write_json(given.out / "shares.json", told)


def in_a_process(what: Any, *args: Any) -> Any:
    """This process must not touch the GPU: its share would be the whole."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(what, args)


def cut(recipe: Recipe) -> list[int]:
    return list(set_up(recipe).partition.cuts)


def environment() -> dict[str, Any]:
    return records.environment([torch.cuda.get_device_name()])


def measured(recipes: list[Recipe], share: float) -> dict[str, Any]:
    """One process per stage; medians over the rounds of every stage, and the slowest of them."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(len(recipes))
    mail = [context.Queue() for _ in recipes]
    found = context.Queue()
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share:g}"
    processes = [
        context.Process(target=work, args=(recipe, k, mail, barrier, found)) for k, recipe in enumerate(recipes)
    ]
    for process in processes:
        process.start()
    del os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    times = dict(found.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    stages = [statistics.median(times[k]) for k in range(len(recipes))]
    slowest = [max(times[k][n] for k in times) for n in range(ROUNDS)]
    return {"step_ms": statistics.median(slowest), "stage_ms": stages, "rounds_ms": slowest}


def work(recipe: Recipe, k: int, mail: list[Any], barrier: Any, found: Any) -> None:
    system = Engined("share", recipe, "")
    if recipe.stages == 1:
        system.time(3)
        found.put((k, [1000 * system.time(STEPS) / STEPS for _ in range(ROUNDS)]))
        return
    step = OneStage(system, k)
    for neighbour in {k - 1, k + 1} & set(range(recipe.stages)):
        mail[neighbour].put((k, step.mailbox))
    step.neighbours = dict(mail[k].get() for _ in {k - 1, k + 1} & set(range(recipe.stages)))
    times = []
    for turn in range(ROUNDS + 1):
        barrier.wait()
        seconds = step.time(STEPS if turn else 8)  # the first ones are recorded
        times.append(1000 * seconds / STEPS)
        barrier.wait()
    found.put((k, times[1:]))
    barrier.wait()  # memory that others write to must stay


class OneStage:
    """The part of the engine's parallel step that belongs to stage k."""

    def __init__(self, system: Engined, k: int) -> None:
        system.time(1)  # puts the engine together, with states
        assert system._engine is not None
        assert system._bench is not None
        self.engine, self.bench, self.k = system._engine, system._bench, k
        first, last = k == 0, k == len(self.engine.stages) - 1
        rows, steps = self.bench.setup.recipe.batch_size, self.bench.batch(0)
        ids = steps.ids.to("cuda")
        outputs = None if first else self.engine.interfaces[k - 1].kept(ids).state.clone()
        pair = None if last else self.engine.interfaces[k].kept(ids).copy()
        self.mailbox = Mailbox(outputs, pair)
        self.neighbours: dict[int, Mailbox] = {}
        self.steps = 0
        self.graph = Graphed(
            self.step, lambda inputs: len(inputs["ids"]) == rows, torch.device("cuda"), self.engine._forget, print
        )

    def step(self, inputs: Inputs, quick: bool = False) -> Tensor:
        engine, k, ids, beta = self.engine, self.k, inputs["ids"], inputs["beta"]
        joints = engine._quick_joints
        pairs: list[Any] = [None] * len(joints)
        if k > 0:
            pairs[k - 1] = joints[k - 1].gather(ids)
        if self.mailbox.pair is not None:
            pairs[k] = self.mailbox.pair.float()
        x, loss, p = engine._local_gradient(k, ids, None, pairs, beta, quick)
        if self.mailbox.pair is not None:
            self.neighbours[k + 1].outputs.copy_(engine.interfaces[k].down(x))  # type: ignore[union-attr]
        engine.stages[k].set_rate(inputs["rate"])
        engine.stages[k].apply()
        if k > 0 and self.mailbox.outputs is not None:
            joints[k - 1].update(ids, pairs[k - 1], self.mailbox.outputs.float(), None, p, None, beta)
            following, theirs = engine.interfaces[k - 1].kept(inputs["following"]), self.neighbours[k - 1].pair
            assert theirs is not None
            theirs.state.copy_(following.state)
            if following.multiplier is not None and theirs.multiplier is not None:
                theirs.multiplier.copy_(following.multiplier)
        return loss.reshape(1)

    def time(self, steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            batch = self.bench.batch(self.steps)
            self.steps += 1
            assert batch.following is not None
            inputs = {"ids": batch.ids, "following": batch.following, "beta": torch.tensor(batch.beta)}
            inputs["rate"] = torch.tensor(batch.rate, dtype=torch.float64)
            self.graph(self.engine._on_device(inputs))
        torch.cuda.synchronize()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
