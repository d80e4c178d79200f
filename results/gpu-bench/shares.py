"""K virtual GPUs: K processes, each with 1/K of the multiprocessors of one GPU (MPS), one stage each.

    nvidia-cuda-mps-control -d
    python results/gpu-bench/shares.py [--stages 2 3 4] [--out FOLDER]

Each process has the recorded step of its stage: gather of states and multipliers, forward, local loss, backward,
optimiser, new states and multipliers, scatter. Outputs, and the states and multipliers of the next batch, are copied
into memory of the neighbour's process inside that step (CUDA IPC), in the type of the store. Nobody waits for a
neighbour: the slowest process sets the pace, and its time per step is told. Against it: the serial step, recorded,
alone on one share. The bandwidth of the GPU's memory is not divided by MPS: the serial process has all of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
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
PATIENCE = 300  # seconds
COMMON = Recipe(
    dataset="cifar10", model="resnet110", schedule="parallel", store_dtype="bfloat16", device="cuda", compile="off"
)


@dataclass(frozen=True)
class Mailbox:
    """What the neighbours write into this stage's memory."""

    outputs: Tensor | None
    """Of the stage before."""
    pair: Pair | None
    """States and multipliers of the interface behind."""


@dataclass(frozen=True)
class Group:
    """The processes of one row: those of all rows get ready at once, and are timed one row after the other."""

    row: dict[str, Any]
    processes: list[Any]
    go: Any
    ready: Any
    found: Any
    kept: tuple[Any, ...]
    """Locks and queues of the processes: without a name here they would be gone before a process has begun."""

    @classmethod
    def started(cls, row: dict[str, Any], recipe: Recipe) -> Group:
        context = mp.get_context("spawn")
        barrier, go = context.Barrier(recipe.stages), context.Event()
        mail = [context.Queue() for _ in range(recipe.stages)]
        ready, found = context.Queue(), context.Queue()
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{row['share']:g}"
        processes = [
            context.Process(target=work, args=(recipe, k, mail, barrier, go, ready, found), daemon=True)
            for k in range(recipe.stages)
        ]
        for process in processes:
            process.start()
        del os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
        return cls(row, processes, go, ready, found, (barrier, *mail))

    def wait(self) -> None:
        for _ in self.processes:
            self.ready.get(timeout=PATIENCE)

    def timed(self) -> dict[str, Any]:
        """Medians over the rounds of every stage, and of the slowest in each round."""
        self.go.set()
        times = dict(self.found.get(timeout=PATIENCE) for _ in self.processes)
        for process in self.processes:
            process.join()
        slowest = [max(rounds) for rounds in zip(*times.values(), strict=True)]
        stages = [statistics.median(times[k]) for k in sorted(times)]
        return {**self.row, "step_ms": statistics.median(slowest), "stage_ms": stages, "rounds_ms": slowest}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--stages", type=int, nargs="*", default=[2, 3, 4])
    ask.add_argument("--out", type=Path, default=HERE)
    given = ask.parse_args()
    cuts, about = in_a_process(looked_up, given.stages)
    groups = []
    for stages in given.stages:
        share = 100 / stages
        serial = replace(COMMON, stages=1, partition="even", schedule="serial")
        groups.append(Group.started({"stages": stages, "partition": "serial", "share": share}, serial))
        for partition in ("even", "cost"):
            places = ",".join(map(str, cuts[stages, partition]))
            row = {"stages": stages, "partition": partition, "share": share, "cuts": places}
            groups.append(Group.started(row, replace(COMMON, stages=stages, partition=places)))
    for group in groups:
        group.wait()
    rows = [group.timed() for group in groups]
    serial_ms = {row["stages"]: row["step_ms"] for row in rows if row["partition"] == "serial"}
    for row in rows:
        if row["partition"] != "serial":
            row["speedup"] = serial_ms[row["stages"]] / row["step_ms"]
        print({key: row[key] for key in row if key != "rounds_ms"}, flush=True)
    told = {"rows": rows, "steps": STEPS, "environment": about, "command": "python results/gpu-bench/shares.py"}
    records.write_json(given.out / "shares.json", told)


def in_a_process(what: Any, *args: Any) -> Any:
    """This process must not touch the GPU: its share would be the whole."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(what, args)


def looked_up(stages: list[int]) -> tuple[dict[tuple[int, str], list[int]], dict[str, Any]]:
    """The places of all cuts, the same for all processes of a row, and what runs here."""
    cuts = {
        (k, partition): list(set_up(replace(COMMON, stages=k, partition=partition)).partition.cuts)
        for k in stages
        for partition in ("even", "cost")
    }
    return cuts, records.environment([torch.cuda.get_device_name()])


def work(recipe: Recipe, k: int, mail: list[Any], barrier: Any, go: Any, ready: Any, found: Any) -> None:
    system = Engined("share", recipe, "")
    if recipe.stages == 1:
        system.time(3)
        ready.put(k)
        go.wait()
        system.time(STEPS)
        found.put((k, [1000 * system.time(STEPS) / STEPS for _ in range(ROUNDS)]))
        return
    step = OneStage(system, k)
    neighbours = {k - 1, k + 1} & set(range(recipe.stages))
    for neighbour in neighbours:
        mail[neighbour].put((k, step.mailbox))
    step.neighbours = dict(mail[k].get() for _ in neighbours)
    barrier.wait()
    step.time(8)  # the first ones are recorded
    ready.put(k)
    go.wait()
    times = []
    for _ in range(ROUNDS + 1):
        barrier.wait()
        times.append(1000 * step.time(STEPS) / STEPS)
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
