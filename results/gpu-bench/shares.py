"""K virtual GPUs: K processes, each with 1/K of the multiprocessors of one GPU (MPS), one stage each.

    nvidia-cuda-mps-control -d
    python results/gpu-bench/shares.py [--stages 2 3 4] [--methods al replay] [--out FOLDER]

Each process has the recorded step of its stage. AL: gather of states and multipliers, forward, local loss, backward,
optimiser, new states and multipliers, scatter. Replay: forward of one batch, kept input of another, forward and
backward of that, optimiser. Outputs, and the states and multipliers of the next batch or the adjoints of the last, are
copied into memory of the neighbour's process inside that step (CUDA IPC), in the type of the store. Nobody waits for a
neighbour: the slowest process sets the pace, and its time per step is told. Against it: the serial step, recorded,
alone on one share. The bandwidth of the GPU's memory is not divided by MPS: the serial process has all of it. Cuts by
cost are made of times that were taken on such a share: of a whole GPU they differ less from block to block.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from parlay.bench.cuda import Engined
from parlay.coupling import Pair
from parlay.engines.base import Batch
from parlay.engines.graphs import Graphed, Inputs
from parlay.engines.stream import Mail
from parlay.recipe import Recipe
from parlay.run import records
from parlay.run.setup import set_up

HERE = Path(__file__).parent
STEPS, ROUNDS = 40, 5
LEFT_OUT = ("replay", "even")  # its first stages have a forward pass more: an even cut is not for it
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
class Letters:
    """The same for a stage of a streaming method."""

    features: Tensor | None
    adjoint: Tensor | None


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
        processes = [
            context.Process(target=work, args=(recipe, k, mail, barrier, go, ready, found), daemon=True)
            for k in range(recipe.stages)
        ]
        with on_shares(row["share"]):
            for process in processes:
                process.start()
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
    ask.add_argument("--methods", nargs="*", default=["al", "replay"])
    ask.add_argument("--out", type=Path, default=HERE)
    given = ask.parse_args()
    kinds = [(method, part) for method in given.methods for part in ("even", "cost") if (method, part) != LEFT_OUT]
    about = in_a_process(environment)
    groups = []
    for stages in given.stages:
        share = 100 / stages
        with on_shares(share):
            cuts = in_a_process(looked_up, stages, kinds)
        serial = replace(COMMON, stages=1, partition="even", schedule="serial")
        row = {"stages": stages, "method": "serial", "partition": "serial", "share": share}
        groups.append(Group.started(row, serial))
        for method, partition in kinds:
            places = ",".join(map(str, cuts[method, partition]))
            row = {"stages": stages, "method": method, "partition": partition, "share": share, "cuts": places}
            groups.append(Group.started(row, replace(COMMON, method=method, stages=stages, partition=places)))
    for group in groups:
        group.wait()
    rows = [group.timed() for group in groups]
    serial_ms = {row["stages"]: row["step_ms"] for row in rows if row["method"] == "serial"}
    for row in rows:
        if row["method"] != "serial":
            row["speedup"] = serial_ms[row["stages"]] / row["step_ms"]
        print({key: row[key] for key in row if key != "rounds_ms"}, flush=True)
    told = {"rows": rows, "steps": STEPS, "environment": about, "command": "python results/gpu-bench/shares.py"}
    records.write_json(given.out / "shares.json", told)


def in_a_process(what: Any, *args: Any) -> Any:
    """This process must not touch the GPU: its share would be the whole."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(what, args)


@contextmanager
def on_shares(percent: float) -> Iterator[None]:
    """Processes that begin here have so much of the GPU."""
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{percent:g}"
    try:
        yield
    finally:
        del os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]


def looked_up(stages: int, kinds: list[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """The places of all cuts, the same for all processes of a row."""
    recipes = {kind: replace(COMMON, stages=stages, method=kind[0], partition=kind[1]) for kind in kinds}
    return {kind: list(set_up(recipe).partition.cuts) for kind, recipe in recipes.items()}


def environment() -> dict[str, Any]:
    return records.environment([torch.cuda.get_device_name()])


def work(recipe: Recipe, k: int, mail: list[Any], barrier: Any, go: Any, ready: Any, found: Any) -> None:
    system = Engined("share", recipe, "")
    if recipe.stages == 1:
        system.time(3)
        ready.put(k)
        go.wait()
        system.time(STEPS)
        found.put((k, [1000 * system.time(STEPS) / STEPS for _ in range(ROUNDS)]))
        return
    step = (OneStage if recipe.method == "al" else Streamed)(system, k)
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


class Stepped:
    """The part of the engine's parallel step that belongs to stage k."""

    mailbox: Mailbox | Letters
    neighbours: dict[int, Any]

    def __init__(self, system: Engined, k: int) -> None:
        system.time(1)  # puts the engine together, with states, or batches on their way
        assert system._engine is not None
        assert system._bench is not None
        self.engine, self.bench, self.k = system._engine, system._bench, k
        self.steps = system.steps
        rows = self.bench.setup.recipe.batch_size
        self.graph = Graphed(
            self.step, lambda inputs: len(inputs["ids"]) == rows, self.engine._lanes, self.engine._forget, print
        )

    def step(self, inputs: Inputs, quick: bool = False) -> Tensor:
        raise NotImplementedError

    def inputs(self, batch: Batch) -> Inputs:
        raise NotImplementedError

    def time(self, steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.graph(self.engine._on_device(self.inputs(self.bench.batch(self.steps))))
            self.steps += 1
        torch.cuda.synchronize()
        return time.perf_counter() - began


class OneStage(Stepped):
    """With states and multipliers."""

    def __init__(self, system: Engined, k: int) -> None:
        super().__init__(system, k)
        first, last = k == 0, k == len(self.engine.stages) - 1
        ids = self.bench.batch(0).ids.to("cuda")
        outputs = None if first else self.engine.interfaces[k - 1].kept(ids).state.clone()
        pair = None if last else self.engine.interfaces[k].kept(ids).copy()
        self.mailbox: Mailbox = Mailbox(outputs, pair)

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
            self.neighbours[k + 1].outputs.copy_(engine.interfaces[k].down(x))
        engine.stages[k].set_rate(inputs["rate"])
        engine.stages[k].apply()
        if k > 0 and self.mailbox.outputs is not None:
            joints[k - 1].update(ids, pairs[k - 1], self.mailbox.outputs.float(), None, p, None, beta)
            following, theirs = engine.interfaces[k - 1].kept(inputs["following"]), self.neighbours[k - 1].pair
            theirs.state.copy_(following.state)
            if following.multiplier is not None and theirs.multiplier is not None:
                theirs.multiplier.copy_(following.multiplier)
        return loss.reshape(1)

    def inputs(self, batch: Batch) -> Inputs:
        assert batch.following is not None
        inputs = {"ids": batch.ids, "following": batch.following, "beta": torch.tensor(batch.beta)}
        return {**inputs, "rate": torch.tensor(batch.rate, dtype=torch.float64)}


class Streamed(Stepped):
    """With batches on their way: the engine has run until every stage has one."""

    def __init__(self, system: Engined, k: int) -> None:
        super().__init__(system, k)
        assert self.engine._stream is not None
        self.stream = self.engine._stream
        # memory of their own: other processes cannot have a piece of a recorded step's
        self.mailbox: Letters = Letters(*(_own(mail[k]) for mail in (self.stream.features, self.stream.adjoints)))

    def step(self, inputs: Inputs, quick: bool = False) -> Tensor:
        stream, k = self.stream, self.k
        station = stream.stations[k]
        station.begin(inputs["rates"][k], quick)
        sent = stream._station_step(k, station, inputs)
        station.update(stream.clip)
        if sent.output is not None and k + 1 in self.neighbours:
            self.neighbours[k + 1].features.copy_(sent.output)
        if sent.adjoint is not None and k - 1 in self.neighbours:
            self.neighbours[k - 1].adjoint.copy_(sent.adjoint)
        assert sent.loss is not None
        return sent.loss.reshape(1)

    def inputs(self, batch: Batch) -> Inputs:
        _, inputs = self.stream.enter(batch)
        assert self.stream.steady
        ours = {name: value for name, value in inputs.items() if name.partition("/")[0].endswith(f"-{self.k}")}
        return {**ours, "rates": inputs["rates"], "ids": batch.ids}


def _own(mail: Mail) -> Tensor | None:
    if mail.kept is not None:
        mail.kept = mail.kept.clone()
    return mail.kept


if __name__ == "__main__":
    main()
