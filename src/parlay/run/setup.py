"""From a recipe to a run folder: data, model, partition and method put together and trained."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parlay import data, methods, models
from parlay.config.rates import Rate
from parlay.config.recipe import Recipe
from parlay.data import CropAndFlip, Split, expand, normalise
from parlay.engine.world import Processes, started
from parlay.errors import InputError
from parlay.methods.method import Method
from parlay.models.resnet_vae import Reconstruction, ReconstructionAndKL
from parlay.partitioning import Partition, partition
from parlay.run.outcome import Result
from parlay.run.progress import Progress
from parlay.run.trainer import Trainer
from parlay.stage.precision import chosen_device, mixed_precision


@dataclass(frozen=True)
class Setup:
    """What a recipe stands for, before any data is read."""

    recipe: Recipe
    """Resolved: every key that the method fills in has its value."""
    facts: data.Facts
    partition: Partition
    method: Method | None


def set_up(recipe: Recipe) -> Setup:
    """The model, built from the seed and then cut, so that every K starts from the same weights."""
    if recipe.method == "serial":  # one stage without states; a method with a serial schedule is cut, but never apart
        recipe = replace(recipe, stages=1, partition="even", schedule="serial")
    facts = _with_samples(recipe, data.facts(recipe.dataset, _synthetic(recipe)))
    device = _device(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = models.build(recipe.model, facts.shape, facts.classes)
        # a cut by cost is measured with a batch; for shapes two samples do (WRN-40-10 on a CPU: 0.9 s in place of 11)
        example = torch.randn(min(recipe.batch_size, 128 if recipe.partition == "cost" else 2), *facts.shape)
    # channels last and in mixed precision, as stages train: a cut by cost is then one by the costs that they will have
    model = model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = example.to(device).contiguous(memory_format=torch.channels_last)
    method = make_method(recipe)
    # a stage that replays has a second forward pass, the last one has not
    work = [method.work(k, recipe.stages) for k in range(recipe.stages)] if method else None
    with mixed_precision(recipe.precision, device):
        cut = partition(model, recipe.stages, example, recipe.cuts(), work)
    return Setup(_resolve(recipe, cut, method), facts, cut, method)


def _device(recipe: Recipe) -> torch.device:
    """Where the model is built and measured: of several processes, each on its own GPU."""
    device = chosen_device(recipe.device)
    if device.type == "cpu" or not started():
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def make_method(recipe: Recipe) -> Method | None:
    """The method with the keys that the recipe gives; its own defaults for the others."""
    method: Method | None = methods.make(recipe.method, recipe.options)
    if recipe.replicas > 1 and method is not None and not method.takes_replicas:
        raise InputError(f"method {recipe.method} takes no replicas: write replicas 1, or method al")
    return method


def train(recipe: Recipe, out: Path, resume: bool, progress: Progress) -> Result:
    """Train as the recipe says, into the run folder `out`."""
    setup = set_up(_measured_once(recipe))
    recipe = setup.recipe
    loaded = data.load(recipe.dataset, recipe.data_dir, _synthetic(recipe))
    train_set = loaded.train
    if recipe.train_samples:
        train_set = Split(*(tensor[: recipe.train_samples] for tensor in (train_set.inputs, train_set.targets)))
    if recipe.augment.isdecimal():
        train_set = expand(train_set, int(recipe.augment), recipe.seed)
    return make_trainer(setup, out, progress).fit(train_set, loaded.test, recipe.epochs, resume)


def _measured_once(recipe: Recipe) -> Recipe:
    """Each of several processes would measure other costs, and cut elsewhere: one measures for all."""
    apart = recipe.engine == "distributed" or (recipe.engine == "auto" and started())
    if recipe.partition != "cost" or recipe.stages == 1 or not apart:
        return recipe
    world = Processes(recipe.stages, recipe.replicas)
    world.open(world.device(recipe.device))
    try:
        return replace(recipe, partition=world.by_leader(lambda: set_up(recipe).recipe.partition))
    finally:
        world.close()


SAME = (
    *("clip", "downsample", "store", "store_dtype", "batch_size", "seed", "device", "precision", "engine", "replicas"),
    *("serial_phase", "timeline", "judge_every", "checkpoint_every"),
)
"""Keys that a trainer takes as they are."""


def make_trainer(setup: Setup, out: Path | None, progress: Progress) -> Trainer:
    """The trainer that the recipe stands for. It has seen no data yet."""
    recipe, vae = setup.recipe, models.is_vae(setup.recipe.model)
    augment = setup.facts.augment if recipe.augment == "auto" else recipe.augment == "random"
    return Trainer(
        setup.partition,
        ReconstructionAndKL() if vae else nn.CrossEntropyLoss(),
        setup.method,
        recipe.schedule,
        **{name: getattr(recipe, name) for name in SAME},
        optimizer=partial(_optimizer, recipe),
        rate=Rate(recipe.lr_schedule, recipe.warmup),
        capture=recipe.capture == "auto",
        compile=None if recipe.compile == "auto" else recipe.compile == "on",
        prepare=partial(normalise, mean=setup.facts.mean, std=setup.facts.std),
        augment=CropAndFlip() if augment else None,
        reconstruct=vae,
        test_loss=Reconstruction() if vae else None,
        out=out,
        tensorboard=recipe.tensorboard and out is not None,
        checkpoint_states=recipe.checkpoint_states == "on",
        progress=progress,
        about={key: getattr(recipe, key) for key in ("method", "model", "dataset", "optimizer")},
        recipe=recipe.toml(),
    )


def _resolve(recipe: Recipe, cut: Partition, method: Method | None) -> Recipe:
    options = {name: getattr(method, name) for name in methods.option_names(recipe.method)}
    if recipe.partition == "cost" and cut.cuts:  # measured: another run would measure, and maybe cut, otherwise
        recipe = replace(recipe, partition=",".join(map(str, cut.cuts)))
    return replace(recipe, options=options)


def _synthetic(recipe: Recipe) -> data.Synthetic:
    n = recipe.synthetic_samples
    return data.Synthetic(recipe.shape(), recipe.synthetic_classes, n, max(n // 4, 1))


def _with_samples(recipe: Recipe, facts: data.Facts) -> data.Facts:
    """Of a data set of which only the first samples are trained on."""
    if recipe.train_samples > facts.train_size:
        raise InputError(
            f"train-samples is {recipe.train_samples}, and {recipe.dataset} has {facts.train_size}: write a number up "
            "to that, or 0 for all"
        )
    return replace(facts, train_size=recipe.train_samples or facts.train_size)


def _optimizer(recipe: Recipe, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    kept: list[Tensor] = list(weights)
    on_gpu = kept[0].is_cuda
    common: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "fused": on_gpu or None}
    if recipe.optimizer == "adam":
        return torch.optim.Adam(kept, capturable=on_gpu, **common)
    return torch.optim.SGD(kept, momentum=recipe.momentum, **common)
