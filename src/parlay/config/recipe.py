"""What to run: typed, frozen, checked, from TOML and flags. Every key has its default and its reason here.

The keys of a method are the fields of its own dataclass (`methods.options`); a recipe carries them in `options`.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from parlay.config.datasets import DATASETS
from parlay.config.keys import FOLDER, check_fields, check_retired, flag, nearest, option, said
from parlay.config.rates import Rate
from parlay.config.schedule import Schedule
from parlay.errors import InputError
from parlay.files import read_bounded

AUTO = "auto"  # in the place of a number of stages: it is measured before there is a recipe
ASIDE = ("out", "data_dir", "checkpoint_every", "checkpoint_states", "judge_every", "timeline", "tensorboard")
"""Keys that do not change what is trained: where things lie, and what is written down."""
MILLION = 1_000_000
LARGEST = 1e30  # float32 ends at 3e38
COPIES = 100  # of each image, with augment N
PIXELS, SYNTHETIC_BYTES = 1 << 20, 1 << 32  # of a synthetic image, channels included; of the whole set
RECIPE_BYTES = 1 << 16


@dataclass(frozen=True)
class Recipe:
    """One training run. A field `batch_size` is the flag `--batch-size` and the TOML key `batch-size`."""

    dataset: str = option("digits", "digits, mnist, cifar10, cifar100 or synthetic", DATASETS, "NAME", short=True)
    data_dir: str = option("data", "folder of the data sets", form=FOLDER, short=True)
    model: str = option("resnet20", "resnet20, resnet110, wrn-40-10, resnet-vae, ...", form="NAME", short=True)
    method: str = option("al", "how stages are joined; serial: uncut", form="NAME", short=True)
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """The keys of the method that were given, by the names of its fields."""
    stages: int = option(3, "number of stages", form="K", short=True, most=10_000)
    partition: str = option("even", "even, cost (measured), or cuts, as in 4,7", form="HOW", short=True)
    downsample: int = option(1, "factor on the states' side: 2 takes a quarter", (1, 2, 4), short=True)
    schedule: str = option("alternate:4:1", "also parallel, serial, tail:4:1, adaptive", form="WHEN", short=True)
    epochs: int = option(30, "passes over the training set", form="E", short=True, least=1, most=MILLION)
    batch_size: int = option(128, "samples per step", form="B", short=True, least=1, most=MILLION)
    lr: float = option(0.1, "initial learning rate", form="LR", short=True, above=0, most=LARGEST)
    optimizer: str = option("sgd", "optimiser of every stage", ("sgd", "adam"), short=True)
    weight_decay: float = option(5e-4, "weight decay", form="W", short=True, least=0, most=MILLION)
    seed: int = option(0, "seed of weights and sample order", form="N", short=True, least=0, most=(1 << 63) - 1)
    device: str = option("auto", "where to train", ("auto", "cpu", "cuda"), short=True)
    engine: str = option(
        "auto",
        "in-process; distributed: a process a stage",
        ("auto", "in-process", "distributed"),
        "HOW",
        short=True,
    )
    out: str | None = option(None, "run folder [a new one under runs]", form=FOLDER, short=True)

    momentum: float = option(0.9, "momentum of sgd", form="M", least=0, most=1)
    lr_schedule: str = option(
        "cosine",
        "cosine, to zero; step, a tenth after each quarter; constant; hold, or a share (hold:0.3), until a serial tail "
        "begins, and to zero over that",
        form="HOW",
    )
    warmup: float = option(0.0, "epochs over which the learning rate rises", form="E", least=0, most=MILLION)
    clip: float | None = option(None, "largest norm of a stage's gradient", form="C", above=0, most=LARGEST)
    augment: str = option(
        "auto",
        "none, random (serial phases; always with streaming methods), or N fixed copies per image; auto: as is usual",
        form="HOW",
    )
    train_samples: int = option(
        0, "train on the first N of the training samples; 0: on all", form="N", least=0, most=1 << 40
    )

    store: str = option("auto", "where states are kept; auto: the first that fits", ("auto", "device", "host", "file"))
    store_dtype: str = option("float32", "type of what is kept", ("float32", "bfloat16", "float16"))
    precision: str = option(
        "auto", "of forward and backward; auto: bfloat16 on GPUs that have it", ("auto", "float32", "bfloat16")
    )
    capture: str = option("auto", "capture steps as CUDA graphs where possible", ("auto", "off"))
    compile: str = option("auto", "compile captured steps; auto: from 20,000 steps on", ("auto", "on", "off"))
    replicas: int = option(
        1, "processes of each stage, which share its batches (distributed)", form="R", least=1, most=10_000
    )
    serial_phase: str = option(
        "auto",
        "how the processes do a serial epoch (distributed): one after the other, as in a single process, or as a "
        "pipeline of micro-batches, over each of which batch norm then runs; auto: pipeline, with replicas sequential",
        ("auto", "pipeline", "sequential"),
    )

    judge_every: int = option(
        1, "epochs between two evaluations of the whole network; adaptive needs all", form="E", least=1, most=MILLION
    )
    checkpoint_every: int = option(
        1, "epochs between checkpoints; 0: only at the end and when interrupted", form="E", least=0, most=MILLION
    )
    checkpoint_states: str = option(
        "on", "keep states and multipliers in checkpoints; off: they are set anew where a run goes on", ("on", "off")
    )
    timeline: int = option(
        0, "steps at the start of each epoch that go into timeline.json (distributed)", form="N", least=0, most=MILLION
    )
    tensorboard: bool = option(False, "write scalars for TensorBoard into the run folder")
    synthetic_shape: str = option("3,32,32", "channels, height, width of the synthetic images", form="C,H,W")
    synthetic_classes: int = option(10, "classes of these images", form="N", least=1, most=10_000)
    synthetic_samples: int = option(2048, "training samples of it", form="N", least=1, most=100 * MILLION)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dataset == "synthetic":
            self._check_synthetic()
        Schedule.parse(self.schedule)
        Rate(self.lr_schedule)
        if len(self.model) > 60 or any(len(number) > 4 for number in re.findall("[0-9]+", self.model)):
            raise InputError(f"model '{said(self.model)}' cannot be built: write numbers below 10000, as in resnet110")
        if self.augment not in ("auto", "none", "random") and not _is_number(self.augment, COPIES):
            raise InputError(
                f"augment is '{said(self.augment)}': write auto, none, random or a number of copies per image, up to "
                f"{COPIES}"
            )
        if self.engine == "in-process" and (self.replicas > 1 or self.serial_phase == "pipeline"):
            wrong = "replicas" if self.replicas > 1 else "serial-phase pipeline"
            raise InputError(f"{wrong} needs a process for each: write --engine distributed, or leave it out")
        if self.replicas > 1 and self.serial_phase == "pipeline":
            raise InputError(
                "a pipeline takes no replicas, whose shares of a batch differ: write serial-phase sequential"
            )
        self.cuts()

    def shape(self) -> tuple[int, int, int]:
        """Of a synthetic image."""
        numbers = self.synthetic_shape.split(",")
        if len(numbers) != 3 or not all(_is_number(n, PIXELS) and int(n) > 0 for n in numbers):
            raise InputError(
                f"synthetic-shape is '{said(self.synthetic_shape)}': write channels,height,width as in 3,32,32"
            )
        c, h, w = map(int, numbers)
        return c, h, w

    def _check_synthetic(self) -> None:
        pixels = math.prod(self.shape())
        if pixels > PIXELS:
            raise InputError(f"synthetic-shape {self.synthetic_shape} has {pixels} numbers: write at most {PIXELS}")
        # images are bytes; the pattern of each class is made of floats of four
        if pixels * (1.25 * self.synthetic_samples + 4 * self.synthetic_classes) > SYNTHETIC_BYTES:
            raise InputError(
                f"{self.synthetic_samples} synthetic images of {self.synthetic_shape} in {self.synthetic_classes} "
                f"classes take more than {SYNTHETIC_BYTES >> 30} GiB: write smaller numbers"
            )

    def cuts(self) -> str | list[int]:
        """How to cut: the word, or the places."""
        if self.partition in ("even", "cost"):
            return self.partition
        parts = self.partition.split(",")
        if not all(_is_number(part, MILLION) for part in parts):
            raise InputError(f"unknown partition '{said(self.partition)}': write even, cost, or the cuts, as in 4,7")
        if len(parts) != self.stages - 1:
            raise InputError(
                f"{len(parts)} cuts make {len(parts) + 1} stages, not {self.stages}: "
                "write one cut fewer than stages, or partition even"
            )
        return [int(part) for part in parts]

    def values(self) -> dict[str, Any]:
        """All keys that have a value, those of the method among them, by the names of their fields."""
        own = {key.name: getattr(self, key.name) for key in KEYS}
        return {name: value for name, value in {**own, **self.options}.items() if value is not None}

    def toml(self) -> str:
        """The recipe as TOML, without its run folder: it runs again from there, into another one."""
        return "".join(f"{flag(k)} = {json.dumps(v)}\n" for k, v in self.values().items() if k != "out")


KEYS = tuple(key for key in fields(Recipe) if key.metadata)
"""What every recipe has, whatever its method."""


def make_recipe(base: Mapping[str, Any], given: Mapping[str, Any]) -> Recipe:
    """A recipe from a file's keys and flags, those of its method among them; flags win."""
    keys, names = {**base, **given}, {key.name for key in KEYS}
    options = {name: value for name, value in keys.items() if name not in names and value is not None}
    return Recipe(**{name: value for name, value in keys.items() if name in names}, options=options)


def read_recipe(path: Path, more: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of a TOML recipe by field name. `more` names those that may stand there beside a recipe's own."""
    try:
        content = tomllib.loads(read_bounded(path, RECIPE_BYTES).decode())
    except FileNotFoundError:
        raise InputError(f"no recipe at {said(str(path))}: write the path of a TOML file") from None
    except (ValueError, RecursionError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else said(str(error))
        raise InputError(f"{said(str(path))} is not a TOML recipe ({why}): write lines such as `stages = 3`") from None
    return by_field(content, str(path), more)


def by_field(content: Mapping[str, Any], where: str, more: Iterable[str] = ()) -> dict[str, Any]:
    """Keys as TOML has them, by the names of the fields; without retired ones."""
    known = {flag(name): name for name in (*(key.name for key in KEYS), *more)}
    kept = {k: v for k, v in content.items() if not check_retired(k, v, content.get("method"))}
    for name in kept:
        if name not in known:
            near = nearest(flag(name), known)
            raise InputError(f"unknown key '{said(name)}' in {said(where)}: write '{near}'")
    return {known[name]: value for name, value in kept.items()}


def _is_number(text: str, most: int) -> bool:
    """A whole number in ordinary digits, up to this one."""
    return re.fullmatch("[0-9]{1,9}", text) is not None and int(text) <= most
