"""One training run: epochs, phases, steps, and how it ends. It knows the schedule; the engine knows the stages.

go      refuse, resume or begin          epoch    refresh, steps, finish, record, save
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from parlay import faults, signs
from parlay.batch import Batch
from parlay.config.schedule import PARALLEL, SERIAL, adapted, healthy
from parlay.data.batches import batches
from parlay.data.feed import Feed
from parlay.engine.engine import Engine
from parlay.errors import Diverged, InputError
from parlay.run.options import RunOptions
from parlay.run.outcome import End, Result, leave, summary_of
from parlay.run.records import MOST_EPOCHS, SUMMARY, Record, Records, counted, is_begun, write_json
from parlay.run.saving import Cursor, Saver
from parlay.run.scores import UNASKED, Scores, refuse_a_lone_sample

PHASE_NAMES = {PARALLEL: "parallel", SERIAL: "serial"}


class Run:
    """One call of `fit`."""

    def __init__(
        self,
        options: RunOptions,
        engine: Engine,
        train: Feed,
        test: Feed | None,
        epochs: int,
        stop: Callable[[], bool],
    ) -> None:
        if epochs > MOST_EPOCHS:
            raise InputError(f"epochs is {epochs}: write a number of at most {MOST_EPOCHS}")
        self.options, self.engine, self.train, self.test, self.stop = options, engine, train, test, stop
        self.epochs, self.steps = epochs, -(-len(train) // options.batch_size)
        self.phases = options.schedule.phases(epochs)
        self.adapts = options.schedule.kind == "adaptive"
        self.world = engine.world
        """The processes that run this loop. The leader writes into the run folder; of a checkpoint, each its part."""
        self.callbacks = options.callbacks() if self.world.leads else []
        self.records = Records(options.out if self.world.leads else None)
        self.scores = Scores(options, engine, train, test)
        self.saver = Saver(options, engine, len(train))
        self.cursor = Cursor()
        self.began = time.perf_counter()

    def go(self, resume: bool) -> Result:
        """Whatever can be refused is refused before anything in the run folder is changed."""
        refuse_a_lone_sample(self.options, self.engine, self.train, self.phases)
        if resume:
            self._resume()
        else:
            self.world.by_leader(self._refuse_a_second_run)
        self.records.rows = self.world.by_leader(lambda: self.records.begin(self.cursor.epoch, self.options.recipe))
        for callback in self.callbacks:
            callback.begin(self.cursor.epoch)
        try:
            return self._epochs()
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            for callback in self.callbacks:
                callback.end()

    def _resume(self) -> None:
        resumed = self.saver.resume(self.phases, self.steps)
        if resumed is not None:
            self.cursor, self.phases, before = resumed
            self.began -= before

    def _refuse_a_second_run(self) -> None:
        if self.options.out is not None and is_begun(self.options.out):
            raise InputError(f"{self.options.out} holds a run already: resume it, or give another folder")

    def _epochs(self) -> Result:
        progress, saver = self.options.progress, self.saver
        if self.cursor.epoch == self.epochs:
            progress.line(f"all {self.epochs} epochs are done: nothing is trained")
        progress.begin(self.epochs * self.steps, self._step_number())
        try:
            for epoch in range(self.cursor.epoch, self.epochs):
                if not self._epoch(epoch):
                    self._save()
                    done = f"after {self.cursor.step} of {self.steps} steps"
                    return self._end("interrupted", f"interrupted in {counted(epoch, self.epochs)}, {done}")
        except Diverged as error:
            kept = f"the last checkpoint is {saver.newest}" if saver.newest else "there is no checkpoint yet"
            return self._end("diverged", f"{error}; {kept}")
        return self._end("finished")

    def _end(self, status: str, message: str = "") -> Result:
        return leave(self.options, self.engine, self.records.rows, self._ended(status, message))

    def _ended(self, status: str, message: str) -> End:
        return End(status, message, time.perf_counter() - self.began, self.steps, self.test)

    def _note_failure(self, error: Exception) -> None:
        """The summary says what happened, as far as a full disk or a lost device still allows."""
        end = self._ended("failed", " ".join(f"{type(error).__name__}: {error}".split()))
        if self.options.out is not None and self.world.leads:
            with suppress(OSError, RuntimeError):
                summary = summary_of(self.options, self.engine, self.records.rows, end)
                write_json(self.options.out / SUMMARY, summary)

    def _epoch(self, epoch: int) -> bool:
        """One epoch, or what is left of it. False where a signal has ended it."""
        now, engine, phase = self.cursor, self.engine, self.phases[epoch]
        began = time.perf_counter() - now.seconds
        engine.totals = now.totals
        entered = now.step == 0 and not self.phases[:epoch].endswith(PARALLEL)
        if phase == PARALLEL and (not engine.filled or entered):
            self._refresh(epoch)
        step = engine.parallel_step if phase == PARALLEL else engine.serial_step
        for batch in self._batches(epoch, now.step):
            if engine.agreed(self.stop()):
                break
            signs.beat(self._step_number())
            faults.reach(self._step_number(), engine.here)
            step(batch)
            now.step += 1
            self.options.progress.step(f"{counted(epoch, self.epochs)}, {PHASE_NAMES[phase]}")
        engine.drain()
        if now.step == self.steps:
            self._finish_phase(epoch)
            if self.adapts and phase == PARALLEL:
                # at the epoch's first samples: their states are an epoch old by now, as states are when they are used
                now.cosines = engine.cosines(replace(next(self._batches(epoch)), epoch=epoch + 1, following=()))
        now.seconds = time.perf_counter() - began
        if now.step < self.steps:
            return False
        self._end_epoch(epoch, phase)
        return True

    def _refresh(self, epoch: int) -> None:
        now, began = self.cursor, time.perf_counter()
        moved = self.engine.refresh(self._batches(epoch), self.stop)
        if now.step == 0:  # else they are set anew inside an epoch, and how it was entered is known
            now.violation_at_entry = moved
        now.refresh_seconds += time.perf_counter() - began

    def _finish_phase(self, epoch: int) -> None:
        """A parallel phase ends with its last batches, as far as is known which epoch is its last."""
        if self.phases[epoch] == PARALLEL and not self.phases[epoch + 1 :].startswith(PARALLEL):
            self.engine.finish()

    def _end_epoch(self, epoch: int, phase: str) -> None:
        record = self._record(epoch)
        self.world.gather(lambda: self._keep(record))
        self.options.progress.epoch(record, self.epochs)
        if record["train_loss"] is None or not math.isfinite(record["train_loss"]):
            self._refuse_spoiled_weights(epoch)
        if self.adapts and phase == PARALLEL:  # all processes do what the leader's record says
            self.phases = self.world.by_leader(lambda: adapted(self.phases, epoch, record["healthy"]))
            self._finish_phase(epoch)
        self.cursor = Cursor(epoch + 1)
        every = self.options.checkpoint_every
        if epoch + 1 == self.epochs or (every > 0 and (epoch + 1) % every == 0):
            self._save()

    def _refuse_spoiled_weights(self, epoch: int) -> None:
        """A loss can be finite where its gradient is not. Of the last step of an epoch no later loss tells, and a
        checkpoint would hold what is left of the weights.
        """
        trained = {f"weights/{name}" for name, _ in self.engine.model.named_parameters()}

        def spoiled() -> list[str]:
            parts = self.engine.parts(with_states=False)
            found = {name: [part[key] for key in part.keys() & trained] for name, part in parts.items()}
            return [name for name, weights in found.items() if not all(bool(w.isfinite().all()) for w in weights)]

        stages = sorted(name.replace("-", " ") for found in self.world.gather(spoiled) for name in found)
        if stages:
            whose = f"{' and '.join(stages)} of {self.options.stages}"
            raise Diverged(f"the weights of {whose} are not finite after epoch {epoch + 1}")

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        for callback in self.callbacks:
            callback.epoch(record)

    def _batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        options = self.options
        ids = batches(len(self.train), options.batch_size, options.seed, epoch)
        weight, tail = options.method.weight(epoch, self.epochs), options.schedule.tail_epochs(self.epochs)
        for step in range(first, len(ids)):
            when = epoch + step / len(ids)
            rate = options.rate.at(when, self.epochs, tail)
            yield Batch(ids[step], epoch, step, rate, options.seed, weight or 0.0, tuple(ids[step + 1 : step + 3]))

    def _record(self, epoch: int) -> Record:
        now, totals, parallel = self.cursor, self.engine.totals, self.phases[epoch] == PARALLEL
        asked = epoch + 1 == self.epochs or self.adapts or (epoch + 1) % self.options.judge_every == 0
        record = {
            "epoch": epoch,
            "phase": PHASE_NAMES[self.phases[epoch]],
            "losses": totals.losses(),
            **(self.scores.of(self.phases, epoch) if asked else UNASKED),
            "violation": totals.violations() if parallel else None,
            "violation_at_entry": now.violation_at_entry,
            "seconds": now.seconds,
            "refresh_seconds": now.refresh_seconds,
            "learning_rate": self.engine.learning_rate,
            "beta": self.options.method.weight(epoch, self.epochs) if parallel else None,
        }
        return {**record, **self._health(record)} if self.adapts else record

    def _health(self, record: Record) -> Record:
        """What the adaptive schedule has looked at after a parallel epoch, and what it makes of it."""
        if record["phase"] == PHASE_NAMES[SERIAL]:
            return {"cosine": None, "stage_cosines": None, "healthy": None}
        probed = self.cursor.cosines
        cosine, stages = (probed[0], probed[1:]) if probed else (None, None)
        well = healthy(record["train_loss"], record["losses"][-1], cosine, self.options.schedule.threshold)
        return {"cosine": cosine, "stage_cosines": stages, "healthy": well}

    def _step_number(self) -> int:
        return self.cursor.epoch * self.steps + self.cursor.step

    def _save(self) -> None:
        self.saver.save(self.cursor, self._step_number(), self.phases, time.perf_counter() - self.began)
