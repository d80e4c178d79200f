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

from parlay.batch import Pass
from parlay.bench.cuda import EngineSystem
from parlay.config.recipe import Recipe
from parlay.engine.captured import Captured, Inputs
from parlay.link.link import Link
from parlay.link.queue import QueueLink, Slots
from parlay.link.states import Pair, StateLink
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
    """What the neighbours write into this stage's memory: of a stored method outputs, states and multipliers of one
    batch; of a streamed one the slots of outputs and of adjoints."""

    outputs: Tensor | None
    """Of the stage before."""
    state: Tensor | None
    """Of the link after, as all that follows."""
    multiplier: Tensor | None = None
    adjoints: Tensor | None = None


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
    system = EngineSystem("share", recipe, "")
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
    """The part of a parallel step that belongs to stage k, with all that crosses to its neighbours."""

    neighbours: dict[int, Mailbox]

    def __init__(self, system: EngineSystem, k: int) -> None:
        system.time(1)  # puts the engine together, with states, or batches on their way
        assert system.made is not None
        self.bench, engine = system.made
        self.own, self.parallel, self.k = engine.own, engine.steps.parallel, k
        self.steps, self.worker = system.steps, engine.own.workers[k]
        links: dict[int, Link] = {link.k: link for link in self.own.links}
        self.before, self.after = links.get(k), links.get(k + 1)
        self.captured = Captured(self.step, self.own.lanes, self.own.changed, self.own.forget, print)
        self.mailbox = self._mailbox()

    def _mailbox(self) -> Mailbox:
        """Memory of its own: other processes cannot have a piece of a captured step's."""
        if isinstance(self.before, QueueLink) or isinstance(self.after, QueueLink):
            outputs = _own(self.before.outputs) if isinstance(self.before, QueueLink) else None
            adjoints = _own(self.after.adjoints) if isinstance(self.after, QueueLink) else None
            return Mailbox(outputs, None, None, adjoints)
        places = self.bench.batch(0).ids.to(self.own.device)
        outputs = self.before._stored(places).state.clone() if isinstance(self.before, StateLink) else None
        pair = self.after._stored(places).copy() if isinstance(self.after, StateLink) else Pair(None, None)
        return Mailbox(outputs, *pair)

    def time(self, steps: int) -> float:
        self.own.lanes.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.parallel._turns = turns = self.parallel.clock.enter(self.bench.batch(self.steps))
            self.worker.seed(turns[self.k].forward, turns[self.k].backward)
            inputs = {**self.parallel._inputs(turns), "following": self.bench.ids(self.steps + 1)}
            if self.own.lanes.captures:
                self.captured(inputs, True)
            else:
                self.step(inputs)
            self.steps += 1
        self.own.lanes.synchronize()
        return time.perf_counter() - began

    def step(self, inputs: Inputs, compiled: bool = False) -> Tensor:
        worker, mailbox = self.worker, self.mailbox
        forward, backward = self.parallel._passes(inputs, compiled)[self.k]
        assert forward is not None
        assert backward is not None
        worker.begin(inputs["rate"])
        if self.before is not None:
            self.before.gather(forward)
        if isinstance(self.after, StateLink) and mailbox.state is not None:
            self.after._pair = Pair(mailbox.state, mailbox.multiplier).float()
        worker.forward(forward)
        self._send_output(forward)
        loss = worker.loss(backward)
        worker.backward(backward)
        worker.update(self.own.clip)
        if isinstance(self.before, StateLink) and mailbox.outputs is not None:
            self.before._output = mailbox.outputs
            self.before.renew(backward, backward)
        self._send_signal(inputs["following"], backward)
        return loss.reshape(1)

    def _send_output(self, p: Pass) -> None:
        if isinstance(self.after, StateLink):
            self.neighbours[self.k + 1].outputs.copy_(self.after._output)  # type: ignore[union-attr]
        elif isinstance(self.after, QueueLink) and self.after._output is not None:
            _put(self.after.outputs, self.neighbours[self.k + 1].outputs, p, self.after._output)

    def _send_signal(self, following: Tensor, p: Pass) -> None:
        theirs = self.neighbours.get(self.k - 1)
        if isinstance(self.before, StateLink) and theirs is not None:
            pair = self.before._stored(following)
            theirs.state.copy_(pair.state)  # type: ignore[union-attr]
            if pair.multiplier is not None and theirs.multiplier is not None:
                theirs.multiplier.copy_(pair.multiplier)
        elif isinstance(self.before, QueueLink) and theirs is not None and self.before._adjoint is not None:
            _put(self.before.adjoints, theirs.adjoints, p, self.before._adjoint)


def _own(slots: Slots) -> Tensor | None:
    if slots._memory is not None:
        slots._memory = slots._memory.clone()
    return slots._memory


def _put(like: Slots, memory: Tensor | None, p: Pass, x: Tensor) -> None:
    """Into the slots of a neighbour."""
    theirs = Slots(like.count, like.rows, like.fixed)
    theirs._memory = memory
    theirs.put(p, x)


if __name__ == "__main__":
    main()
