"""The training run: phases, steps, records, checkpoints. It knows the schedule; the engine knows the stages.

    stages, loss, method, schedule ─► Trainer.fit(train, test) ─► Result (an ordinary model again) and a run folder
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parlay import checkpoint, evaluate, stores
from parlay.coupling import AugmentedLagrangian, Coupling
from parlay.data import Split, as_split, batches
from parlay.engines.base import Batch, Totals
from parlay.engines.in_process import InProcess
from parlay.errors import Diverged, InputError
from parlay.feed import Augment, Feed, Prepare
from parlay.filters import downsample
from parlay.interface import Interface
from parlay.interrupt import Interrupt
from parlay.partitioning import Partition
from parlay.progress import Progress, for_terminal
from parlay.rates import Rate
from parlay.records import Record, Records, environment, write_json
from parlay.schedule import PARALLEL, SERIAL, Schedule
from parlay.stage import MakeOptimizer, Stage

JUDGED = 10_000  # training samples that the training loss and the batch statistics are taken from
JUDGED_AT_ONCE = 500
STARTS = ("outputs", "adjoints")
PHASE_NAMES = {PARALLEL: "parallel", SERIAL: "serial"}


def sgd(weights: Any) -> torch.optim.Optimizer:
    """The paper's optimiser: SGD, rate 0.1, momentum 0.9; weight decay as is usual for these networks."""
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=5e-4)


@dataclass
class Result:
    """What became of a run."""

    status: str
    """finished, diverged, interrupted or failed."""
    model: nn.Sequential
    """The network, ordinary again, on the CPU."""
    records: list[Record]
    summary: dict[str, Any]
    message: str = ""


@dataclass
class _Position:
    """Where a run stands: the next step to do, and the sums of the epoch that it stands in."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    """Of this epoch, so far."""
    total_seconds: float = 0.0
    refresh_seconds: float = 0.0
    entry: list[float] | None = None
    totals: Totals = field(default_factory=Totals)


class Trainer:
    """Trains the stages of a partition by one method and schedule."""

    def __init__(
        self,
        stages: Partition,
        loss: evaluate.Loss,
        method: Coupling | None = None,
        schedule: str | Schedule = "alternate:4:1",
        *,
        optimizer: MakeOptimizer = sgd,
        rate: Rate | None = None,
        clip: float | None = None,
        inner_steps: int = 1,
        downsample: int = 1,
        start: str = "outputs",
        store: str = "auto",
        store_dtype: str = "float32",
        batch_size: int = 128,
        seed: int = 0,
        device: str | Sequence[str | torch.device] = "auto",
        precision: str = "auto",
        prepare: Prepare | None = None,
        augment: Augment | None = None,
        reconstruct: bool = False,
        test_loss: evaluate.Loss | None = None,
        out: str | Path | None = None,
        checkpoint_every: int = 1,
        progress: Progress | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """`prepare` and `augment` stand between the data and the network; `out` is the run folder, None for none.

        `start`: states begin at the "outputs" of a forward pass (the paper), or displaced by the "adjoints" of a
        backward pass as well. `about` goes into the summary.
        """
        if batch_size < 1:
            raise InputError(f"batch-size is {batch_size}: write a number of at least 1")
        if start not in STARTS:
            raise InputError(f"unknown start '{start}': write {' or '.join(STARTS)}")
        if store_dtype not in stores.DTYPES:
            raise InputError(f"unknown store-dtype '{store_dtype}': write one of {', '.join(stores.DTYPES)}")
        self.partition = stages
        self.loss = loss
        self.method = method or AugmentedLagrangian()
        self.schedule = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        self.optimizer = optimizer
        self.rate = rate or Rate()
        self.clip = clip
        self.inner_steps = inner_steps
        self.downsample = downsample
        self.start = start
        self.store = store
        self.store_dtype = store_dtype
        self.batch_size = batch_size
        self.seed = seed
        self.devices = spread(device, len(stages))
        self.autocast = _autocast(precision, self.devices)
        self.prepare = prepare
        self.augment = augment
        self.reconstruct = reconstruct
        self.test_loss = test_loss or loss
        self.out = Path(out) if out is not None else None
        self.checkpoint_every = checkpoint_every
        self.progress = progress or for_terminal()
        self.about = dict(about or {})

    def fit(self, train: Any, test: Any = None, epochs: int = 30, resume: bool = False) -> Result:
        """Train on data of (input, target) pairs. With `resume`, go on from the newest checkpoint of the run folder."""
        if epochs < 1:
            raise InputError(f"epochs is {epochs}: write a number of at least 1")
        first, last = self.devices[0], self.devices[-1]
        feed = Feed(as_split(train), self.prepare, self.augment, self.reconstruct).placed(first, last)
        judge = None
        if test is not None:
            judge = Feed(as_split(test), self.prepare, None, self.reconstruct).placed(first, last)
        folder = self.out or Path(tempfile.mkdtemp(prefix="parlay-"))
        folder.mkdir(parents=True, exist_ok=True)
        # the random numbers of a step are seeded by its number; the caller's own stream is left as it was
        with checkpoint.FolderLock(folder), torch.random.fork_rng(devices=_cuda(self.devices)), Interrupt() as interrupt:
            run = _Run(self, feed, judge, epochs, folder, interrupt)
            try:
                return run.go(resume)
            finally:
                run.engine.close()
                self.progress.end()


class _Run:
    """One call of `fit`."""

    def __init__(
        self, trainer: Trainer, feed: Feed, judge: Feed | None, epochs: int, folder: Path, interrupt: Interrupt
    ) -> None:
        self.trainer, self.feed, self.judge, self.epochs, self.folder = trainer, feed, judge, epochs, folder
        self.interrupt = interrupt
        self.phases = trainer.schedule.phases(epochs)
        self.steps = -(-len(feed) // trainer.batch_size)
        self.engine = _engine(trainer, feed, folder if trainer.out else Path(tempfile.mkdtemp(prefix="parlay-")))
        self.records = Records(trainer.out / "records.jsonl" if trainer.out else None)
        self.position = _Position()
        self.began = time.perf_counter()
        self.earlier_seconds = 0.0

    def go(self, resume: bool) -> Result:
        if not (resume and self._resume()):
            self.records.restart(0)
        self.trainer.progress.begin(self.epochs * self.steps, self._step_number())
        try:
            for epoch in range(self.position.epoch, self.epochs):
                if not self._epoch(epoch):
                    self._save()
                    return self._result("interrupted", f"interrupted in epoch {epoch}, step {self.position.step}")
        except Diverged as error:
            return self._result("diverged", str(error))
        return self._result("finished")

    def _epoch(self, epoch: int) -> bool:
        """One epoch, or what is left of it. False where a signal has ended it."""
        now, engine = self.position, self.engine
        parallel = self.phases[epoch] == PARALLEL
        began = time.perf_counter() - now.seconds
        engine.totals = now.totals
        if parallel and engine.interfaces and (not engine.filled or (now.step == 0 and self._after_serial(epoch))):
            now.entry = engine.refresh(self._steps(epoch), self.interrupt.requested)
            now.refresh_seconds = time.perf_counter() - began
        if not self.interrupt.requested():
            for batch in self._steps(epoch, now.step):
                for _ in range(self.trainer.inner_steps if parallel else 1):
                    (engine.parallel_step if parallel else engine.serial_step)(batch)
                now.step += 1
                self.trainer.progress.step(f"epoch {epoch + 1} {PHASE_NAMES[self.phases[epoch]]}")
                if self.interrupt.requested():
                    break
        engine.drain()
        now.seconds = time.perf_counter() - began
        if now.step < self.steps:
            return False
        self._record(epoch)
        self.position = _Position(epoch + 1)
        if self._due(epoch):
            self._save()
        return True

    def _after_serial(self, epoch: int) -> bool:
        return epoch == 0 or self.phases[epoch - 1] == SERIAL

    def _steps(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        trainer = self.trainer
        ids = batches(len(self.feed), trainer.batch_size, trainer.seed, epoch)
        beta = trainer.method.beta_at(epoch, self.epochs)
        for step in range(first, len(ids)):
            rate = trainer.rate.at(epoch + step / len(ids), self.epochs)
            following = ids[step + 1] if step + 1 < len(ids) else None
            yield Batch(ids[step], epoch, step, rate, beta, trainer.seed, following)

    def _record(self, epoch: int) -> None:
        now = self.position
        totals = self.engine.totals
        parallel = self.phases[epoch] == PARALLEL
        self.records.append(
            {
                "epoch": epoch,
                "phase": PHASE_NAMES[self.phases[epoch]],
                "losses": totals.means(totals.loss),
                **self._judge(estimate=parallel, keep=epoch + 1 == self.epochs),
                "violation": totals.means(totals.violation) if parallel else None,
                "violation_at_entry": now.entry,
                "seconds": now.seconds,
                "refresh_seconds": now.refresh_seconds,
                "learning_rate": self._learning_rate(),
                "beta": self.trainer.method.beta_at(epoch, self.epochs) if parallel else None,
            }
        )
        self.trainer.progress.epoch(self.records.rows[-1], self.epochs)

    def _learning_rate(self) -> float | None:
        optimizer = next((stage.optimizer for stage in self.engine.stages if stage.optimizer), None)
        return float(optimizer.param_groups[0]["lr"]) if optimizer else None

    def _judge(self, estimate: bool, keep: bool) -> dict[str, float | None]:
        """Losses and accuracy through the whole network; after a parallel phase with statistics estimated for it.

        They are put back afterwards, but kept (`keep`) at the end of training: they belong to the model that is saved.
        """
        engine, feed = self.engine, self.feed
        ids = torch.arange(len(feed))[:: -(-len(feed) // JUDGED)]
        saved = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
        if estimate:
            whole = [part for part in ids.split(self.trainer.batch_size) if len(part) == min(self.trainer.batch_size, len(ids))]
            evaluate.estimate_statistics(engine.model, engine.forward, (feed.batch(part)[0] for part in whole))
        result: dict[str, float | None] = {"train_loss": engine.evaluate(_batches(feed, ids))["loss"]}
        if self.judge is not None:
            test = engine.evaluate(_batches(self.judge, torch.arange(len(self.judge))), self.trainer.test_loss)
            result |= {"test_loss": test["loss"], "test_accuracy": test.get("accuracy")}
        if not keep:
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)
        return result

    def _due(self, epoch: int) -> bool:
        every = self.trainer.checkpoint_every
        return every > 0 and ((epoch + 1) % every == 0 or epoch + 1 == self.epochs)

    def _step_number(self) -> int:
        return self.position.epoch * self.steps + self.position.step

    def _save(self) -> None:
        """A checkpoint; with the states only where the next step needs them."""
        if self.trainer.out is None:
            return
        now = self.position
        going_on = now.epoch < self.epochs and self.phases[now.epoch] == PARALLEL
        with_states = going_on and (now.step > 0 or not self._after_serial(now.epoch))
        meta = {**asdict(now), "total_seconds": self._total_seconds(), **self._identity()}
        meta["totals"] = asdict(self.engine.totals if now.step else now.totals)
        checkpoint.save(self.trainer.out / "checkpoints", self._step_number(), self.engine.parts(with_states), meta)

    def _identity(self) -> dict[str, int]:
        """What must be the same for the order of the samples to be the same."""
        return {"samples": len(self.feed), "batch-size": self.trainer.batch_size, "seed": self.trainer.seed}

    def _resume(self) -> bool:
        if self.trainer.out is None:
            raise InputError("resume needs a run folder: give `out`")
        found = checkpoint.newest(self.trainer.out / "checkpoints", self.trainer.progress.line)
        if found is None:
            self.trainer.progress.line(f"no checkpoint in {self.trainer.out}: training starts at the beginning")
            return False
        meta = dict(found.meta)
        for name, value in self._identity().items():
            if meta.pop(name) != value:
                raise InputError(f"the checkpoint has {name} {found.meta[name]}, not {value}: write {name} {found.meta[name]}")
        self.position = _Position(**{**meta, "totals": Totals(**meta["totals"])})
        self.earlier_seconds = self.position.total_seconds
        self.engine.load({name: found.part(name) for name in found.parts})
        if any(name.startswith("interface-") for name in found.parts) and not self.engine.filled:
            self.trainer.progress.line("the checkpoint's states are of another cut or method: they are set anew")
        self.records.restart(self.position.epoch)
        return True

    def _total_seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    def _result(self, status: str, message: str = "") -> Result:
        model = self.engine.model.to("cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        summary = self._summary(status, message)
        if self.trainer.out is not None:
            if status == "finished":
                save_model(model, self.trainer.out / "model.safetensors")
            write_json(self.trainer.out / "summary.json", summary)
        return Result(status, model.eval(), self.records.rows, summary, message)

    def _summary(self, status: str, message: str) -> dict[str, Any]:
        trainer, rows = self.trainer, self.records.rows
        last: Record = rows[-1] if rows else {}
        violation = next((row["violation"] for row in reversed(rows) if row["violation"]), [])
        return {
            "status": status,
            "message": message,
            "method": type(trainer.method).__name__,
            "model": type(trainer.partition.model).__name__,
            "dataset": None,
            "stages": len(trainer.partition),
            "cuts": list(trainer.partition.cuts),
            "schedule": str(trainer.schedule),
            "downsample": trainer.downsample,
            "epochs": len(rows),
            "seed": trainer.seed,
            "parameters": sum(w.numel() for w in trainer.partition.model.parameters()),
            "test_accuracy": last.get("test_accuracy"),
            "test_loss": last.get("test_loss"),
            "train_loss": last.get("train_loss"),
            "auxiliary_bytes": self.engine.auxiliary_bytes,
            "seconds": {
                "total": self._total_seconds(),
                "serial_epoch": _mean_seconds(rows, "serial"),
                "parallel_epoch": _mean_seconds(rows, "parallel"),
            },
            "violation": violation,
            "environment": environment([_name(device) for device in trainer.devices]),
            **trainer.about,
        }


def spread(device: str | Sequence[str | torch.device], stages: int) -> list[torch.device]:
    """A device for every stage: contiguous stages share one where there are fewer devices than stages."""
    if not isinstance(device, str):
        if len(device) != stages:
            raise InputError(f"{len(device)} devices for {stages} stages: give one for each stage")
        return [torch.device(d) for d in device]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return [torch.device("cpu")] * stages
    if device != "cuda":
        raise InputError(f"unknown device '{device}': write auto, cpu or cuda")
    count = torch.cuda.device_count()
    if count == 0:
        raise InputError("no GPU to be found: write --device cpu")
    return [torch.device("cuda", k * min(count, stages) // stages) for k in range(stages)]


def save_model(model: nn.Module, path: Path) -> None:
    """The weights under their ordinary names; plain PyTorch loads them into the plain network."""
    scratch = path.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, scratch)
    scratch.replace(path)


def _engine(trainer: Trainer, feed: Feed, folder: Path) -> InProcess:
    make = zip(trainer.partition.stages, trainer.devices, strict=True)
    stages = [Stage(module, trainer.optimizer, device, trainer.autocast) for module, device in make]
    return InProcess(
        trainer.partition,
        stages,
        _interfaces(trainer, feed, folder),
        trainer.loss,
        feed,
        clip=trainer.clip,
        adjoints_at_start=trainer.start == "adjoints",
    )


def _interfaces(trainer: Trainer, feed: Feed, folder: Path) -> list[Interface]:
    if PARALLEL not in trainer.schedule.phases(1 << 10):  # serial training keeps no states
        return []
    reduce, dtype, multipliers = downsample(trainer.downsample), stores.DTYPES[trainer.store_dtype], trainer.method.keeps_multipliers
    shapes = [reduce.shape(shape) for shape in trainer.partition.shapes]
    needed = stores.store_bytes(len(feed), shapes, dtype, multipliers)
    kind = stores.place(trainer.store, needed, trainer.devices[-1], folder)

    def store(k: int, what: str) -> stores.Store:
        path = folder / "stores" / f"{what}-{k}.bin"
        return stores.make_store(kind, len(feed), shapes[k - 1], dtype, trainer.devices[k], path)

    return [
        Interface(shape, reduce, trainer.method, store(k, "states"), store(k, "multipliers") if multipliers else None)
        for k, shape in enumerate(trainer.partition.shapes, 1)
    ]


def _batches(feed: Feed, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return (feed.batch(part) for part in ids.split(JUDGED_AT_ONCE))


def _autocast(precision: str, devices: list[torch.device]) -> torch.dtype | None:
    if precision not in ("auto", "float32", "bfloat16"):
        raise InputError(f"unknown precision '{precision}': write auto, float32 or bfloat16")
    on_gpu = all(device.type == "cuda" for device in devices)
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and on_gpu) else None


def _mean_seconds(rows: list[Record], phase: str) -> float | None:
    seconds = [row["seconds"] for row in rows if row["phase"] == phase]
    return sum(seconds) / len(seconds) if seconds else None


def _cuda(devices: list[torch.device]) -> list[torch.device]:
    return sorted({device for device in devices if device.type == "cuda"}, key=str)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


__all__ = ["Result", "Split", "Trainer", "sgd"]
