"""One training run: phases, steps, records, checkpoints. It knows the schedule; the engine knows the stages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from parlay import checkpoint, faults, timeline
from parlay.board import Board
from parlay.checkpoint import atomic_write
from parlay.coupling import Coupling, Streaming
from parlay.coupling.streaming import BESIDE
from parlay.data import batches
from parlay.data.batches import drawn, mixed_seed
from parlay.data.feed import Feed
from parlay.engines.base import Batch, Engine, Totals, stage_tensors
from parlay.errors import Diverged, InputError
from parlay.evaluate import estimate_statistics, unchanged_buffers
from parlay.interrupt import Interrupt
from parlay.launch import heartbeat
from parlay.progress import counted
from parlay.records import Record, Records, environment, write_json
from parlay.schedule import PARALLEL, SERIAL, adapted, healthy

if TYPE_CHECKING:
    from parlay.trainer import Trainer

JUDGED = 5_000  # training samples that the training loss and the batch statistics are taken from
JUDGED_AT_ONCE = 500
PHASE_NAMES = {PARALLEL: "parallel", SERIAL: "serial"}


@dataclass
class Result:
    """What became of a run."""

    status: str
    """finished, diverged or interrupted."""
    model: nn.Sequential
    """The network, ordinary again, on the CPU."""
    records: list[Record]
    summary: dict[str, Any]
    message: str = ""


@dataclass
class Position:
    """Where a run stands: the next step to do, and the sums of the epoch that it stands in."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    """Of this epoch, so far."""
    refresh_seconds: float = 0.0
    violation_at_entry: list[float] | None = None
    """How far the network had moved from its old states when a parallel phase began; None where none were left."""
    cosines: list[float] | None = None
    """Between parallel and true gradients: of the whole network and of every stage. Probed by an adaptive schedule."""
    totals: Totals = field(default_factory=Totals)


class Run:
    """One call of `fit`."""

    def __init__(
        self, trainer: Trainer, engine: Engine, feed: Feed, judge: Feed | None, epochs: int, interrupt: Interrupt
    ) -> None:
        self.trainer, self.engine, self.feed, self.judge, self.epochs = trainer, engine, feed, judge, epochs
        self.interrupt = interrupt
        self.phases = trainer.schedule.phases(epochs)
        self.steps = -(-len(feed) // trainer.batch_size)
        self.crew = engine.crew
        """The processes that run this loop. The leader writes into the run folder; of a checkpoint, each its part."""
        self.records = Records(trainer.out / "records.jsonl" if trainer.out and self.crew.leads else None)
        self.position = Position()
        self.saved: Path | None = None
        """The newest checkpoint."""
        self.board: Board | None = None
        self.began = time.perf_counter()

    def go(self, resume: bool) -> Result:
        """Whatever can be refused is refused before anything in the run folder is changed."""
        self._refuse_a_lone_sample()
        self.crew.led(lambda: None if resume else self._refuse_a_second_run())
        if not (resume and self._resume()):
            self._restart_records(0)
        self.crew.led(self._write_recipe)
        if self.trainer.tensorboard and self.trainer.out is not None and self.crew.leads:
            self.board = Board(self.trainer.out, self.position.epoch)
        try:
            return self._train()
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            if self.board is not None:
                self.board.close()

    def _refuse_a_second_run(self) -> None:
        if self.records.path is not None and self.records.path.exists():
            raise InputError(f"{self.trainer.out} holds a run already: resume it, or give another folder")

    def _write_recipe(self) -> None:
        if self.trainer.out is not None and self.trainer.recipe is not None:
            atomic_write(self.trainer.out / "recipe.toml", self.trainer.recipe)

    def _train(self) -> Result:
        if self.position.epoch == self.epochs:
            self.trainer.progress.line(f"all {self.epochs} epochs are done: nothing is trained")
        self.trainer.progress.begin(self.epochs * self.steps, self._step_number())
        try:
            for epoch in range(self.position.epoch, self.epochs):
                if not self._epoch(epoch):
                    self._save()
                    done = f"after {self.position.step} of {self.steps} steps"
                    return self._result("interrupted", f"interrupted in {counted(epoch, self.epochs)}, {done}")
        except Diverged as error:
            kept = f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
            return self._result("diverged", f"{error}; {kept}")
        return self._result("finished")

    def _note_failure(self, error: Exception) -> None:
        """The summary says what happened, as far as a full disk or a lost device still allows."""
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if self.trainer.out is not None and self.crew.leads:
            with suppress(OSError, RuntimeError):
                write_json(self.trainer.out / "summary.json", self._summary("failed", message))

    def _epoch(self, epoch: int) -> bool:
        """One epoch, or what is left of it. False where a signal has ended it."""
        now, engine, phase = self.position, self.engine, self.phases[epoch]
        began = time.perf_counter() - now.seconds
        engine.totals = now.totals
        if phase == PARALLEL and (not engine.filled or (now.step == 0 and self._after_serial(epoch))):
            refresh_began = time.perf_counter()
            moved = engine.refresh(self._steps(epoch), self.interrupt.requested)
            if now.step == 0:  # else they are set anew inside an epoch, and how it was entered is known
                now.violation_at_entry = moved
            now.refresh_seconds += time.perf_counter() - refresh_began
        step = engine.parallel_step if phase == PARALLEL else engine.serial_step
        for batch in self._steps(epoch, now.step):
            if engine.agreed(self.interrupt.requested()):
                break
            heartbeat.beat(self._step_number())
            faults.reach(self._step_number(), engine.here)
            step(batch)
            now.step += 1
            self.trainer.progress.step(f"{counted(epoch, self.epochs)}, {PHASE_NAMES[phase]}")
        engine.drain()
        if now.step == self.steps and self._ends_here(epoch):
            engine.finish()
        if self._adapts and phase == PARALLEL and now.step == self.steps:
            now.cosines = engine.cosines(self._next_visit(epoch))
        now.seconds = time.perf_counter() - began
        if now.step < self.steps:
            return False
        record = self._record(epoch)
        self.crew.gathered(lambda: self._keep(record))
        self.trainer.progress.epoch(record, self.epochs)
        if record["train_loss"] is None or not math.isfinite(record["train_loss"]):
            self._refuse_spoiled_weights(epoch)
        if self._adapts and phase == PARALLEL:  # all processes do what the leader's record says
            self.phases = self.crew.led(lambda: adapted(self.phases, epoch, record["healthy"]))
            if self._ends_here(epoch):
                engine.finish()
        self.position = Position(epoch + 1)
        if self._due(epoch):
            self._save()
        return True

    def _refuse_spoiled_weights(self, epoch: int) -> None:
        """A loss can be finite where its gradient is not. Of the last step of an epoch no later loss tells, and a
        checkpoint would hold what is left of the weights.
        """
        trained = {f"weights/{name}" for name, _ in self.engine.model.named_parameters()}

        def spoiled() -> list[str]:
            parts = self.engine.parts(with_states=False)
            found = {name: [part[key] for key in part.keys() & trained] for name, part in parts.items()}
            return [name for name, weights in found.items() if not all(bool(w.isfinite().all()) for w in weights)]

        stages = sorted(name.replace("-", " ") for found in self.crew.gathered(spoiled) for name in found)
        if stages:
            whose = f"{' and '.join(stages)} of {len(self.trainer.partition)}"
            raise Diverged(f"the weights of {whose} are not finite after epoch {epoch + 1}")

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        if self.board is not None:
            self.board.add(record)

    @property
    def _adapts(self) -> bool:
        return self.trainer.schedule.kind == "adaptive"

    def _ends_here(self, epoch: int) -> bool:
        """Is this the last epoch of a parallel phase, as far as is known?"""
        following = self.phases[epoch + 1] if epoch + 1 < self.epochs else SERIAL
        return self.phases[epoch] == PARALLEL and following == SERIAL

    def _after_serial(self, epoch: int) -> bool:
        return epoch == 0 or self.phases[epoch - 1] == SERIAL

    def _steps(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        trainer = self.trainer
        ids = batches(len(self.feed), trainer.batch_size, trainer.seed, epoch)
        beta, tail = self._beta(epoch), trainer.schedule.tail_epochs(self.epochs)
        for step in range(first, len(ids)):
            when = epoch + step / len(ids)
            rate = trainer.rate.at(when, self.epochs, tail)
            following = ids[step + 1] if step + 1 < len(ids) else None
            yield Batch(ids[step], epoch, step, rate, beta or 0.0, trainer.seed, following, when)

    def _beta(self, epoch: int) -> float | None:
        """None for methods without a penalty."""
        method = self.trainer.method
        return method.beta_at(epoch, self.epochs) if isinstance(method, Coupling) else None

    def _next_visit(self, epoch: int) -> Batch:
        """Of the epoch's first samples: their states are an epoch old now, as states are on average when used."""
        return replace(next(self._steps(epoch)), epoch=epoch + 1, following=None)

    def _record(self, epoch: int) -> Record:
        now, totals, parallel = self.position, self.engine.totals, self.phases[epoch] == PARALLEL
        record = {
            "epoch": epoch,
            "phase": PHASE_NAMES[self.phases[epoch]],
            "losses": totals.losses(),
            **self._judged(epoch),
            "violation": totals.means(totals.violation) if parallel else None,
            "violation_at_entry": now.violation_at_entry,
            "seconds": now.seconds,
            "refresh_seconds": now.refresh_seconds,
            "learning_rate": self.engine.learning_rate,
            "beta": self._beta(epoch) if parallel else None,
        }
        return {**record, **self._health(record)} if self._adapts else record

    def _health(self, record: Record) -> Record:
        """What the adaptive schedule has looked at after a parallel epoch, and what it makes of it."""
        if record["phase"] == PHASE_NAMES[SERIAL]:
            return {"cosine": None, "stage_cosines": None, "healthy": None}
        probed = self.position.cosines
        cosine, stages = (probed[0], probed[1:]) if probed else (None, None)
        well = healthy(record["train_loss"], record["losses"][-1], cosine, self.trainer.schedule.threshold)
        return {"cosine": cosine, "stage_cosines": stages, "healthy": well}

    def _judged(self, epoch: int) -> dict[str, float | None]:
        """Losses and accuracy through the whole network, with batch statistics estimated for it where it was apart.

        After the last epoch they stay: they belong to the model that is saved. None of them after an epoch between.
        """
        last = epoch + 1 == self.epochs
        if not (last or self._adapts or (epoch + 1) % self.trainer.judge_every == 0):
            return dict.fromkeys(("train_loss", "test_loss", "test_accuracy"))
        if not self._has_been_apart(epoch):
            return self._scores()
        with nullcontext() if last else unchanged_buffers(self.engine.model):
            self._estimate(epoch)
            return self._scores()

    def _has_been_apart(self, epoch: int) -> bool:
        """Then running statistics are those of the stages' states, and a short serial phase does not wash that out."""
        return len(self.trainer.partition) > 1 and PARALLEL in self.phases[: epoch + 1]

    def _estimate(self, epoch: int) -> None:
        """From inputs as training has seen them: with the statistics of unchanged images, a network trained on
        augmented ones is judged two points too low (ResNet-20 on CIFAR-10).

        A single serial epoch between parallel ones does not count: their weights belong to unchanged images (ResNet-8
        on 5,000 images, after the last epoch of alternate:4:1, training accuracy 50.1 with theirs, 48.1 with others).
        """
        serial = set(self.phases[max(epoch - 1, 0) : epoch + 1]) == {SERIAL}
        augmented = serial or isinstance(self.trainer.method, Streaming)
        random = torch.Generator().manual_seed(mixed_seed("statistics", self.trainer.seed, epoch))
        parts = torch.split(self._judged_ids(), self.trainer.batch_size)
        inputs = (
            self.feed.batch(part, self.feed.draw(len(part), random) if augmented else None)[0]
            for part in parts
            if len(part) == len(parts[0])
        )
        estimate_statistics(self.engine.model, self.engine.forward, inputs)

    def _scores(self) -> dict[str, float | None]:
        train = self.engine.evaluate(_batches(self.feed, self._judged_ids()))
        if self.judge is None:
            return {"train_loss": train["loss"], "test_loss": None, "test_accuracy": None}
        test = self.engine.evaluate(_batches(self.judge, torch.arange(len(self.judge))), self.trainer.test_loss)
        return {"train_loss": train["loss"], "test_loss": test["loss"], "test_accuracy": test.get("accuracy")}

    def _judged_ids(self) -> Tensor:
        return drawn(len(self.feed), JUDGED, self.trainer.seed)

    def _due(self, epoch: int) -> bool:
        every = self.trainer.checkpoint_every
        return epoch + 1 == self.epochs or (every > 0 and (epoch + 1) % every == 0)

    def _step_number(self) -> int:
        return self.position.epoch * self.steps + self.position.step

    def _save(self) -> None:
        """A checkpoint; with the states only where the next step needs them.

        Between two parallel phases they would only say how far the network has moved from them, `violation_at_entry`,
        and make the checkpoint many times as large. So it is null in the record of a phase that a resume came before.
        """
        if self.trainer.out is None:
            return
        now = self.position
        parallel = now.epoch < self.epochs and self.phases[now.epoch] == PARALLEL
        needed = parallel and (now.step > 0 or not self._after_serial(now.epoch))
        with_states = needed and (self.trainer.checkpoint_states or isinstance(self.trainer.method, Streaming))
        meta = {
            "position": asdict(now),
            "phases": self.phases,
            "total_seconds": self._total_seconds(),
            "made_with": self._made_with(),
            "cuts": list(self.trainer.partition.cuts),
            "without_states": needed and not with_states,
        }
        folder = self.trainer.out / "checkpoints"
        self.saved = self._saved(folder, self._step_number(), self.engine.parts(with_states), meta)

    def _saved(self, root: Path, step: int, parts: dict[str, dict[str, Tensor]], meta: dict[str, Any]) -> Path:
        """Each process writes its parts; the leader makes a checkpoint of them when all stand."""

        def write() -> checkpoint.Entries:
            heartbeat.beat()
            entries = checkpoint.write_parts(root, step, parts)
            faults.reach(None, self.engine.here, "save")
            return entries

        try:
            self.crew.led(lambda: checkpoint.begin(root, step, checkpoint.size(parts)))
            entries = {name: entry for part in self.crew.gathered(write) for name, entry in part.items()}
            return self.crew.led(lambda: checkpoint.finish(root, step, entries, meta))
        except BaseException:
            if self.crew.leads:
                checkpoint.give_up(root)
            raise

    def _made_with(self) -> dict[str, Any]:
        """What must be the same for the weights to fit and for the order of the samples to be the same."""
        trainer = self.trainer
        made_with = {key: trainer.about[key] for key in trainer.about if key in ("model", "dataset", "optimizer")}
        order = {"batch-size": trainer.batch_size, "seed": trainer.seed}
        return {**made_with, **order, "training samples": len(self.feed)}

    def _resume(self) -> bool:
        """Take up the newest checkpoint; False where there is none."""
        assert self.trainer.out is not None
        say = self.trainer.progress.line
        root = self.trainer.out / "checkpoints"
        with heartbeat.blocked():  # a large one takes its time to be verified
            found = self.crew.led(lambda: checkpoint.newest(root, say))
        if found is None:
            say(f"no checkpoint in {self.trainer.out}: training starts at the beginning")
            return False
        parts = found.content()
        self._check_resumable(found, stage_tensors(parts))
        kept = found.meta["position"]
        self.position = Position(**{**kept, "totals": Totals(**kept["totals"])})
        if self._adapts and "phases" in found.meta:  # as decided then
            self.phases = (found.meta["phases"][: self.position.epoch + 1] + PARALLEL * self.epochs)[: self.epochs]
        self.began -= found.meta["total_seconds"]
        self.saved = found.path
        moved = found.meta["cuts"] != list(self.trainer.partition.cuts)
        self.engine.load(_without_states(parts) if moved else parts)
        if moved:
            say(f"the checkpoint was cut at {found.meta['cuts']}: the states are set anew")
            self.position.totals, self.position.violation_at_entry = Totals(), None  # of other stages
        elif any(name.startswith("interface-") for name in found.parts) and not self.engine.filled:
            say("the checkpoint's states are of another filter, type or method: they are set anew")
        elif found.meta.get("without_states") and self.phases[self.position.epoch] == PARALLEL:
            say("the checkpoint was made without states: they are set anew")
        self._restart_records(self.position.epoch)
        return True

    def _restart_records(self, epoch: int) -> None:
        """The leader has the file; all have its rows."""

        def restart() -> list[Record]:
            self.records.restart(epoch)
            return self.records.rows

        self.records.rows = self.crew.led(restart)

    def _check_resumable(self, found: checkpoint.Checkpoint, kept: dict[str, Tensor]) -> None:
        then, now = found.meta["made_with"], self._made_with()
        for name in then:
            if name in now and then[name] != now[name]:
                write = "the data set of that run" if " " in name else f"--{name} {then[name]}"
                raise InputError(f"the checkpoint was made with {name} {then[name]}, not {now[name]}: write {write}")
        shapes = {key: value.shape for key, value in kept.items()}
        for name, value in self.engine.model.state_dict().items():
            if shapes.get(f"weights/{name}") != value.shape:
                raise InputError(f"{found.path} is of another network ({name} differs): give the model of that run")
        done = found.meta["position"]["epoch"] + (found.meta["position"]["step"] > 0)
        if done > self.epochs:
            raise InputError(f"the checkpoint is in epoch {done}, past {self.epochs}: write --epochs {done} or more")

    def _refuse_a_lone_sample(self) -> None:
        """A batch norm over a single value has no variance. Known now, and not at the first epoch's last batch."""
        if not self._leaves_one(self.trainer.batch_size):
            return
        try:
            with unchanged_buffers(self.engine.model), torch.no_grad():
                self.engine.model.train()
                self.engine.probe(self.feed.batch(torch.zeros(1, dtype=torch.int64))[0])
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            larger = range(self.trainer.batch_size + 1, self.trainer.batch_size + 100)
            better = next((size for size in larger if not self._leaves_one(size)), None)
            raise InputError(
                f"with batch-size {self.trainer.batch_size} of {len(self.feed)} samples a stage meets a batch of one, "
                "and a batch norm cannot normalise a single value: "
                + (f"write --batch-size {better}" if better else "pass more samples")
            ) from None

    def _leaves_one(self, batch_size: int) -> bool:
        """Is there a step in which a stage computes a single sample?"""
        for size in {min(batch_size, len(self.feed)), len(self.feed) % batch_size or batch_size}:
            ids = torch.arange(size)
            apart = PARALLEL in self.phases and len(self.trainer.partition) > 1
            method = self.trainer.method
            turns = [method.turn(ids, 0, k) for k in (0, 1)] if apart and isinstance(method, Coupling) else []
            if any(len(part) == 1 for part in (ids, *turns) if part is not None):
                return True
        return False

    def _total_seconds(self) -> float:
        return time.perf_counter() - self.began

    def _result(self, status: str, message: str = "") -> Result:
        model: nn.Sequential = self.trainer.partition.model
        model.to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.engine.assemble()
        summary, spans = self._summary(status, message, self.engine.waits()), self.engine.spans()
        if self.trainer.out is not None and self.crew.leads:
            if status == "finished":
                save_model(model, self.trainer.out / "model.safetensors")
            write_json(self.trainer.out / "summary.json", summary)
            if spans:
                timeline.write(self.trainer.out / timeline.FILE, spans, self.trainer.out.name)
        return Result(status, model.eval(), self.records.rows, summary, message)

    def _summary(self, status: str, message: str, waited: list[float] | None = None) -> dict[str, Any]:
        trainer, rows = self.trainer, self.records.rows
        last: Record = rows[-1] if rows else {}
        violation: list[float] = next((row["violation"] for row in reversed(rows) if row["violation"]), [])
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
            "steps_per_epoch": self.steps,
            "seed": trainer.seed,
            "parameters": sum(w.numel() for w in trainer.partition.model.parameters()),
            "test_samples": len(self.judge) if self.judge is not None else None,
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
            **self.engine.facts(),
            "waited_seconds": waited or [],
            "environment": environment([_name(device) for device in trainer.devices]),
            **trainer.about,
        }


def _without_states(parts: Mapping[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """What is left of a checkpoint at other cuts, where states may have the same shapes and be those of other places.

    Of a streaming method the networks beside the stages are left, and how far its batches had come.
    """
    stations = {name: part for name, part in parts.items() if name.startswith("station-")}
    left = {
        name: {key: value for key, value in part.items() if key.startswith((BESIDE, "way/"))}
        for name, part in stations.items()
    }
    return {name: part for name, part in parts.items() if not name.startswith("interface-")} | left


def save_model(model: nn.Module, path: Path) -> None:
    """The weights under their ordinary names; plain PyTorch loads them into the plain network.

    Weights that several layers share stand there under each of their names, since the format holds no shared memory.
    """
    found: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, value in model.state_dict().items():
        own = value.untyped_storage().data_ptr()
        found[name] = value.clone() if own in memory else value.contiguous()
        memory.add(own)
    scratch = path.with_suffix(".partial")
    scratch.write_bytes(save(found))  # `save_file` makes a file that only its owner may read, whatever the umask says
    scratch.replace(path)


def _batches(feed: Feed, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return (feed.batch(part) for part in torch.split(ids, JUDGED_AT_ONCE))


def _mean_seconds(rows: list[Record], phase: str) -> float | None:
    """Of an epoch's steps; the pass that sets the states when a parallel phase begins stands in the records."""
    seconds = [row["seconds"] - row["refresh_seconds"] for row in rows if row["phase"] == phase]
    return sum(seconds) / len(seconds) if seconds else None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
