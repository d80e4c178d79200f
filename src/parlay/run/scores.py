"""Losses and accuracy of the whole network after an epoch, with batch statistics that belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from parlay.config.schedule import PARALLEL, SERIAL
from parlay.data.batches import drawn, mixed_seed
from parlay.data.feed import Feed
from parlay.engine.engine import Engine
from parlay.engine.evaluate import estimate_statistics, unchanged_buffers
from parlay.errors import InputError
from parlay.run.options import RunOptions

JUDGED = 5_000  # training samples that the training loss and the batch statistics are taken from
AT_ONCE = 500

Scored = dict[str, float | None]
UNASKED: Scored = dict.fromkeys(("train_loss", "test_loss", "test_accuracy"))
"""Of an epoch between those that are evaluated."""


class Scores:
    def __init__(self, options: RunOptions, engine: Engine, train: Feed, test: Feed | None) -> None:
        self.options, self.engine, self.train, self.test = options, engine, train, test

    def of(self, phases: str, epoch: int) -> Scored:
        """After this epoch. Batch statistics are estimated for the whole network where stages were trained apart.

        After the last epoch they stay: they belong to the model that is saved.
        """
        # Running statistics are those of the stages' states, and a short serial phase does not wash that out.
        if self.options.stages == 1 or PARALLEL not in phases[: epoch + 1]:
            return self._evaluated()
        with nullcontext() if epoch + 1 == len(phases) else unchanged_buffers(self.engine.model):
            estimate_statistics(self.engine.model, self.engine.forward, self._inputs(phases, epoch))
            return self._evaluated()

    def _inputs(self, phases: str, epoch: int) -> Iterator[Tensor]:
        """As training has seen them: unchanged images cost a network trained on augmented ones two points.

        A single serial epoch between parallel ones does not count: their weights belong to unchanged images.
        """
        augmented = self.options.method.fresh_inputs or set(phases[max(epoch - 1, 0) : epoch + 1]) == {SERIAL}
        random = torch.Generator().manual_seed(mixed_seed("statistics", self.options.seed, epoch))
        parts = torch.split(self._drawn(), self.options.batch_size)
        for part in parts:
            if len(part) == len(parts[0]):
                yield self.train.batch(part, self.train.draw(len(part), random) if augmented else None)[0]

    def _evaluated(self) -> Scored:
        train = self.engine.evaluate(_batches(self.train, self._drawn()))
        if self.test is None:
            return {**UNASKED, "train_loss": train["loss"]}
        test = self.engine.evaluate(_batches(self.test, torch.arange(len(self.test))), self.options.test_loss)
        return {"train_loss": train["loss"], "test_loss": test["loss"], "test_accuracy": test.get("accuracy")}

    def _drawn(self) -> Tensor:
        return drawn(len(self.train), JUDGED, self.options.seed)


def _batches(feed: Feed, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return (feed.batch(part) for part in torch.split(ids, AT_ONCE))


def refuse_a_lone_sample(options: RunOptions, engine: Engine, train: Feed, phases: str) -> None:
    """A batch norm over a single value has no variance. Known now, and not at the first epoch's last batch."""
    apart = PARALLEL in phases and options.stages > 1

    def leaves_one(batch_size: int) -> bool:
        """Is there a step in which a stage computes a single sample?"""
        sizes = {min(batch_size, len(train)), len(train) % batch_size or batch_size}
        batches = [torch.arange(size) for size in sizes]
        shares = [options.method.share(ids, 0, k) for ids in batches for k in (0, 1)] if apart else []
        return any(len(part) == 1 for part in (*batches, *shares) if part is not None)

    if not leaves_one(options.batch_size):
        return
    try:
        with unchanged_buffers(engine.model), torch.no_grad():
            engine.model.train()
            engine.try_one(train.batch(torch.zeros(1, dtype=torch.int64))[0])
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        larger = range(options.batch_size + 1, options.batch_size + 100)
        better = next((size for size in larger if not leaves_one(size)), None)
        raise InputError(
            f"with batch-size {options.batch_size} of {len(train)} samples a stage meets a batch of one, "
            "and a batch norm cannot normalise a single value: "
            + (f"write --batch-size {better}" if better else "pass more samples")
        ) from None
