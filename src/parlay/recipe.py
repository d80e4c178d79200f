"""What to run: typed, frozen, checked, from TOML and flags. Every key has its default and its reason here.

No torch in this room: the command line answers `--help` and wrong input from it at once.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from parlay.errors import InputError
from parlay.files import read_bounded
from parlay.rates import Rate
from parlay.schedule import Schedule

DATASETS = ("digits", "mnist", "cifar10", "cifar100", "synthetic")
LIMIT = 2**20  # bytes of a recipe
AUTO = "auto"  # in the place of a number of stages: it is measured before there is a recipe
STREAMING = ("replay", "delayed", "local", "dni", "auxnet")
"""Methods whose states live a few steps."""
ASIDE = ("out", "data_dir", "checkpoint_every", "checkpoint_states", "judge_every", "timeline", "tensorboard")
"""Keys that do not change what is trained: where things lie, and what is written down."""
METHODS = ("serial", "penalty", "al", *STREAMING)


def option(default: Any, text: str, choices: Iterable[Any] = (), form: str = "") -> Any:
    """A key of the recipe: its help, the values it takes, or the form of its value."""
    return field(default=default, metadata={"help": text, "choices": tuple(choices), "form": form})


@dataclass(frozen=True)
class Recipe:
    """One training run. A field `batch_size` is the flag `--batch-size` and the TOML key `batch-size`."""

    dataset: str = option("digits", "data set; digits is embedded, the others lie in --data-dir", DATASETS)
    data_dir: str = option("data", "folder of the data sets", form="DIR")
    model: str = option(
        "resnet20", "resnet20, resnet110, wrn-40-10, resnet-vae, ... (depths 6n+2 and 6n+4)", form="NAME"
    )
    method: str = option("al", "how neighbouring stages are joined; serial: not cut at all", METHODS)
    stages: int = option(3, "number of stages; auto: the fastest on this GPU", form="K")
    partition: str = option(
        "even", "even, cost (measured time per block), or the cuts themselves, as in 4,7", form="HOW"
    )
    downsample: int = option(1, "factor r of the states' side: they take 1/r² of the memory", (1, 2, 4))
    schedule: str = option(
        "alternate:4:1", "parallel, serial, alternate:M:N, tail:M:N or adaptive[:COSINE]", form="WHEN"
    )
    epochs: int = option(30, "epochs", form="E")
    batch_size: int = option(128, "samples per step", form="B")
    lr: float = option(0.1, "initial learning rate of the weights", form="LR")
    seed: int = option(0, "seed of weights, order and augmentation", form="N")
    device: str = option("auto", "where to train; cuda spreads the stages over all GPUs", ("auto", "cpu", "cuda"))
    engine: str = option(
        "auto",
        "one process for all stages, or one for each; auto: one for each where torchrun has started them",
        ("auto", "in-process", "distributed"),
    )
    replicas: int = option(1, "processes of each stage, which share its batches (distributed)", form="R")
    serial_phase: str = option(
        "auto",
        "how the processes do a serial epoch (distributed): one after the other, as in a single process, or as a "
        "pipeline of micro-batches, over each of which batch norm then runs; auto: pipeline, with replicas sequential",
        ("auto", "pipeline", "sequential"),
    )
    micro_batches: int = option(
        0, "parts of a batch in that pipeline, at least as many as stages; 0: about twice that", form="M"
    )
    timeline: int = option(0, "steps at the start of each epoch that go into timeline.json (distributed)", form="N")
    out: str | None = option(None, "run folder; a new one under runs/ where none is given", form="DIR")

    beta: float | None = option(None, "weight of the penalty; the method's own default where none is given", form="B")
    beta_final: float | None = option(None, "weight in the last epoch: it grows geometrically", form="B")
    form: str | None = option(None, "scale of the penalty", ("relative", "mean", "sum"))
    state_step: float | None = option(None, "share of the way to its minimiser that a state goes", form="A")
    state_rate: float | None = option(None, "learning rate of the states, in place of --state-step", form="LR")
    trust: float | None = option(None, "largest displacement of a state, in units of the features", form="T")
    shrink: float | None = option(None, "factor on an adjoint that crosses an interface", form="F")
    detail: float | None = option(
        None,
        "weight of what downsampling leaves out; 1 is the paper's, 0.3 the default from 8 x 8 kept pixels on",
        form="W",
    )
    order: str | None = option(None, "who uses a state when (penalty)", ("red-black", "joint"))
    multiplier: str | None = option(None, "update of the multipliers (al)", ("hestenes", "printed"))
    multiplier_step: float | None = option(None, "step or rate of the multipliers (al)", form="A")
    reach: float | None = option(
        None, "how far from its state, in units of it, an output still has its multiplier in full (al)", form="R"
    )
    condition: str | None = option(None, "what predicts adjoints beside features (dni)", ("labels", "none"))
    predict: float | None = option(
        None, "share of its delay by which a forward pass looks ahead along the momentum (replay, delayed)", form="F"
    )
    compensate: float | None = option(
        None, "share of its delay that the momentum makes up for at once (replay, delayed)", form="F"
    )
    accumulate: int | None = option(None, "batches whose gradients make one update (replay, delayed)", form="N")
    slow_start: float | None = option(
        None,
        "epochs until a stage has its full learning rate, at first divided by its delay (replay, delayed)",
        form="E",
    )

    optimizer: str = option("sgd", "optimiser of every stage", ("sgd", "adam"))
    momentum: float = option(0.9, "momentum of sgd", form="M")
    weight_decay: float = option(5e-4, "weight decay", form="W")
    lr_schedule: str = option(
        "cosine",
        "cosine, to zero; step, a tenth after each quarter; constant; hold, or a share (hold:0.3), until a serial tail "
        "begins, and to zero over that",
        form="HOW",
    )
    warmup: float = option(0.0, "epochs over which the learning rate rises", form="E")
    clip: float | None = option(None, "largest norm of a stage's gradient", form="C")
    augment: str = option(
        "auto",
        "none, random (serial phases; always with streaming methods), or N fixed copies per image; auto: as is usual",
        form="HOW",
    )

    train_samples: int = option(0, "train on so many of the training samples, the first ones; 0: on all", form="N")

    store: str = option("auto", "where states are kept; auto: the first that fits", ("auto", "device", "host", "file"))
    store_dtype: str = option("float32", "type of what is kept", ("float32", "bfloat16", "float16"))
    precision: str = option(
        "auto", "of forward and backward; auto: bfloat16 on GPUs that have it", ("auto", "float32", "bfloat16")
    )
    capture: str = option("auto", "record steps as CUDA graphs where possible", ("auto", "off"))
    compile: str = option("auto", "compile recorded steps; auto: from 20,000 steps on", ("auto", "on", "off"))
    tensorboard: bool = option(False, "write scalars for TensorBoard into the run folder")
    judge_every: int = option(
        1,
        "epochs between two judgements of the whole network, one of them after the last; adaptive needs all",
        form="E",
    )
    checkpoint_every: int = option(1, "epochs between checkpoints; 0: only at the end and when interrupted", form="E")
    checkpoint_states: str = option(
        "on", "keep states and multipliers in checkpoints; off: they are set anew where a run goes on", ("on", "off")
    )
    synthetic_shape: str = option("3,32,32", "channels, height, width of the synthetic images", form="C,H,W")
    synthetic_classes: int = option(10, "classes of the synthetic set", form="N")
    synthetic_samples: int = option(2048, "training samples of the synthetic set", form="N")

    def __post_init__(self) -> None:
        for key in fields(self):
            _check(key.name, getattr(self, key.name), str(key.type), key.metadata["choices"])
        Schedule.parse(self.schedule)
        Rate(self.lr_schedule)
        at_least_one = ("epochs", "batch_size", "synthetic_classes", "synthetic_samples", "replicas", "judge_every")
        for name in at_least_one:  # stages: once blocks are known
            if getattr(self, name) < 1:
                raise InputError(f"{flag(name)} is {getattr(self, name)}: write a number of at least 1")
        at_least_zero = ("momentum", "weight_decay", "warmup", "checkpoint_every", "seed", "micro_batches", "timeline")
        for name in (*at_least_zero, "train_samples"):
            if getattr(self, name) < 0:
                raise InputError(f"{flag(name)} is {getattr(self, name)}: write a number of at least 0")
        if self.seed >= 1 << 63:
            raise InputError(f"seed is {self.seed}: write a number below 2 to the 63rd")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"{flag(name)} is {value}: write a number greater than 0")
        if self.augment not in ("auto", "none", "random") and not self.augment.isdecimal():
            raise InputError(f"augment is '{self.augment}': write auto, none, random or a number of copies per image")
        if self.engine == "in-process" and (self.replicas > 1 or self.serial_phase == "pipeline"):
            wrong = "replicas" if self.replicas > 1 else "serial-phase pipeline"
            raise InputError(f"{wrong} needs a process for each: write --engine distributed, or leave it out")
        if self.replicas > 1 and self.method in STREAMING:
            raise InputError(f"method {self.method} takes no replicas: write replicas 1, or method al")
        if self.replicas > 1 and self.serial_phase == "pipeline":
            raise InputError(
                "a pipeline takes no replicas, whose shares of a batch differ: write serial-phase sequential"
            )
        self.shape()
        if self.partition not in ("even", "cost"):
            self.cuts()

    def shape(self) -> tuple[int, int, int]:
        numbers = self.synthetic_shape.split(",")
        if len(numbers) != 3 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise InputError(f"synthetic-shape is '{self.synthetic_shape}': write channels,height,width as in 3,32,32")
        c, h, w = map(int, numbers)
        return c, h, w

    def cuts(self) -> str | list[int]:
        """How to cut: the word, or the places."""
        if self.partition in ("even", "cost"):
            return self.partition
        parts = self.partition.split(",")
        if not all(part.isdecimal() for part in parts):
            raise InputError(f"unknown partition '{self.partition}': write even, cost, or the cuts, as in 4,7")
        if len(parts) != self.stages - 1:
            raise InputError(
                f"{len(parts)} cuts make {len(parts) + 1} stages, not {self.stages}: "
                "write one cut fewer than stages, or partition even"
            )
        return [int(part) for part in parts]

    def toml(self) -> str:
        """The recipe as TOML, without its run folder: it runs again from there, into another one."""
        values = {flag(key.name): getattr(self, key.name) for key in fields(self) if key.name != "out"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
        return "\n".join(lines) + "\n"


def flag(name: str) -> str:
    return name.replace("_", "-")


def read_recipe(path: Path, beside: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of a TOML recipe, checked against those there are, by field name; and those that may stand beside."""
    try:
        content = tomllib.loads(read_bounded(path, LIMIT).decode())
    except FileNotFoundError:
        raise InputError(f"no recipe at {path}: write the path of a TOML file") from None
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} is not a TOML recipe ({error}): write lines such as `stages = 3`") from None
    return by_field(content, str(path), beside)


def by_field(content: Mapping[str, Any], where: str, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Keys as TOML has them, by the names of the fields."""
    known = {flag(key.name): key.name for key in fields(Recipe)} | {name: name for name in beside}
    for name in content:
        if name not in known:
            raise InputError(f"unknown key '{name}' in {where}: write '{nearest(flag(name), known)}'")
    return {known[name]: value for name, value in content.items()}


def make_recipe(base: Mapping[str, Any], given: Mapping[str, Any]) -> Recipe:
    """A recipe from a file's keys and flags; flags win."""
    return Recipe(**{**base, **given})


def nearest(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(known), 1, 0.0)[0]


def _check(name: str, value: Any, kind: str, choices: tuple[Any, ...]) -> None:
    """Type and choices; an int is welcome where a float is asked for."""
    if value is None and "None" in kind:
        return
    kind = kind.split(" | ")[0]
    wanted: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    if not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "bool"):
        words = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise InputError(f"{flag(name)} is {value!r}: write {words}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{flag(name)} is {value}: write a finite number")
    if choices and value not in choices:
        hint = "" if not isinstance(value, str) else f" (nearest: {nearest(value, choices)})"
        raise InputError(f"unknown {flag(name)} '{value}': write one of {', '.join(map(str, choices))}{hint}")
