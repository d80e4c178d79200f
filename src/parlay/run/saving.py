"""What a checkpoint of a run holds and when it needs the states; how a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from parlay import signs
from parlay.config.schedule import PARALLEL, SERIAL
from parlay.engine.engine import Engine
from parlay.engine.losses import Totals
from parlay.engine.parts import stage_tensors, without_states
from parlay.errors import InputError
from parlay.run import checkpoints
from parlay.run.checkpoint import Checkpoint
from parlay.run.options import RunOptions
from parlay.run.records import wrong_key

Parts = Mapping[str, dict[str, Tensor]]


@dataclass
class Cursor:
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

    @classmethod
    def of(cls, position: Mapping[str, Any]) -> Cursor:
        """As a checkpoint has it, of this version or another, which may have had other keys."""

        def known(kind: type[Cursor | Totals], content: Mapping[str, Any]) -> dict[str, Any]:
            return {key.name: content[key.name] for key in fields(kind) if content.get(key.name) is not None}

        return cls(**{**known(cls, position), "totals": Totals(**known(Totals, position["totals"]))})


TOTALS = ("loss", "violation", "counts")
META: dict[str, Any] = {
    "position": {
        **dict.fromkeys(("epoch", "step"), int),
        **dict.fromkeys(("seconds", "refresh_seconds"), (float, None)),
        **dict.fromkeys(("violation_at_entry", "cosines"), ([float], None)),
        "totals": {"samples": int, **dict.fromkeys(TOTALS, ([float], None))},
    },
    "phases": (str, None),
    "total_seconds": float,
    "made_with": dict,
    "cuts": [int],
    "without_states": (bool, None),
}
"""The schema of a checkpoint's meta."""


class Saver:
    """Writes the checkpoints of one run, and takes one up."""

    def __init__(self, options: RunOptions, engine: Engine, samples: int) -> None:
        self.options, self.engine, self.samples = options, engine, samples
        self.world = engine.world
        self.root = options.out / "checkpoints" if options.out is not None else None
        self.newest: Path | None = None

    def save(self, cursor: Cursor, step: int, phases: str, total_seconds: float) -> None:
        """A checkpoint; with the states only where the next step needs them.

        Between two parallel phases they would only say how far the network has moved from them, `violation_at_entry`,
        and make the checkpoint many times as large. So it is null in the record of a phase that a resume came before.
        """
        if self.root is None:
            return
        parallel = cursor.epoch < len(phases) and phases[cursor.epoch] == PARALLEL
        needed = parallel and (cursor.step > 0 or phases[: cursor.epoch].endswith(PARALLEL))
        with_states = needed and (self.options.checkpoint_states or self.options.method.fresh_inputs)
        meta = {
            "position": asdict(cursor),
            "phases": phases,
            "total_seconds": total_seconds,
            "made_with": self._made_with(),
            "cuts": list(self.options.partition.cuts),
            "without_states": needed and not with_states,
        }
        parts = self.engine.parts(with_states)
        self.newest = checkpoints.save(self.root, step, parts, meta, world=self.world, stages=self.engine.here)

    def _made_with(self) -> dict[str, Any]:
        """What must be the same for the weights to fit and for the order of the samples to be the same."""
        options = self.options
        about = {key: options.about[key] for key in ("model", "dataset", "optimizer") if key in options.about}
        return {**about, "batch-size": options.batch_size, "seed": options.seed, "training samples": self.samples}

    def resume(self, phases: str, steps: int) -> tuple[Cursor, str, float] | None:
        """Load the newest checkpoint into the engine: where it stands, the phases as decided then, seconds so far.

        None where there is none. What does not fit is refused before anything is changed.
        """
        root, say = self.root, self.options.progress.line
        assert root is not None
        with signs.blocked():  # a large one takes its time to be verified
            found = self.world.by_leader(lambda: checkpoints.newest(root, say, _wrong_meta))
        if found is None:
            say(f"no checkpoint in {self.options.out}: training starts at the beginning")
            return None
        meta = found.meta
        self._check_resumable(found, stage_tensors(found), len(phases), steps)
        cursor = Cursor.of(meta["position"])
        if self.options.schedule.kind == "adaptive" and meta.get("phases"):  # as decided then
            phases = (meta["phases"][: cursor.epoch + 1] + PARALLEL * len(phases))[: len(phases)]
        self.newest = found.path
        moved = meta["cuts"] != list(self.options.partition.cuts)
        self.engine.load(without_states(found) if moved else found)
        if moved:
            say(f"the checkpoint was cut at {meta['cuts']}: the states are set anew")
            cursor.totals, cursor.violation_at_entry = Totals(), None  # of other stages
        elif any(name.startswith(("link-", "interface-")) for name in found) and not self.engine.filled:
            say("the checkpoint's states are of another filter, type or method: they are set anew")
        elif meta.get("without_states") and phases[cursor.epoch :].startswith(PARALLEL):
            say("the checkpoint was made without states: they are set anew")
        if not self._continues(cursor.totals, phases[cursor.epoch : cursor.epoch + 1] == PARALLEL):
            cursor.totals = Totals()
        return cursor, phases, meta["total_seconds"]

    def _continues(self, totals: Totals, parallel: bool) -> bool:
        """Are these sums of an epoch of this method and phase?"""
        losses = self.options.stages if parallel else 1
        violations = self.options.stages - 1 if parallel and self.options.method.keeps else 0
        return len(totals.loss) in (0, losses) and len(totals.violation) in (0, violations)

    def _check_resumable(self, found: Checkpoint, kept: dict[str, Tensor], epochs: int, steps: int) -> None:
        then, now = found.meta["made_with"], self._made_with()
        for name in then:
            if name in now and then[name] != now[name]:
                write = "the data set of that run" if " " in name else f"--{name} {then[name]}"
                raise InputError(f"the checkpoint was made with {name} {then[name]}, not {now[name]}: write {write}")
        shapes = {key: value.shape for key, value in kept.items()}
        for name, value in self.engine.model.state_dict().items():
            if shapes.get(f"weights/{name}") != value.shape:
                raise InputError(f"{found.path} is of another network ({name} differs): give the model of that run")
        epoch, step = found.meta["position"]["epoch"], found.meta["position"]["step"]
        done = epoch + (step > 0)
        if done > epochs:
            raise InputError(f"the checkpoint is in epoch {done}, past {epochs}: write --epochs {done} or more")
        if step >= steps:
            raise InputError(f"{found.path} is at step {step} of an epoch of {steps}: write the data set of that run")


def _wrong_meta(meta: dict[str, Any]) -> str | None:
    """The first key of a checkpoint's meta that is not what a run writes there."""
    if (key := wrong_key(meta, META)) is not None:
        return key
    totals, stages = meta["position"]["totals"], len(meta["cuts"]) + 1
    lengths = ((0, 1, stages), (0, stages - 1), (0, 1, stages))
    wrong = [n for n, fit in zip(TOTALS, lengths, strict=True) if len(totals.get(n) or []) not in fit]
    if set(meta.get("phases") or "") - {PARALLEL, SERIAL}:
        wrong.append("phases")
    return wrong[0] if wrong else None
