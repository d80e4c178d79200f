"""What this process owns of a run: some of the stages, or all, with their workers, links and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from parlay.data.feed import Feed
from parlay.engine.rows import Rows
from parlay.engine.world import World
from parlay.lanes import Lane, Lanes
from parlay.link.link import Link
from parlay.methods.method import Method
from parlay.stage.optimiser import Optimiser
from parlay.stage.stage import Stage
from parlay.stage.worker import Loss, Worker


@final
@dataclass
class Own:
    model: nn.Module
    """The whole network; in other processes' stages as it was at the start."""
    modules: list[nn.Sequential]
    """Of all stages."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the outputs at each cut, per sample."""
    method: Method
    loss: Loss
    feed: Feed
    world: World
    device: torch.device
    workers: dict[int, Worker]
    """By their stage."""
    links: list[Link]
    """Those with an end here, from the first to the last."""
    rows: Rows
    batch_size: int
    clip_at: float | None = None
    lanes: Lanes = field(default_factory=Lanes)
    """They capture where steps are to be captured."""
    say: Callable[[str], None] = print
    streams: list[Lane] = field(init=False)
    """A lane for each own stage."""

    def __post_init__(self) -> None:
        self.streams = [self.lanes.lane() for _ in self.workers]

    @property
    def range(self) -> range:
        return self.world.own

    @property
    def first(self) -> bool:
        """Is the network's first stage here?"""
        return self.range[0] == 0

    @property
    def last(self) -> bool:
        return self.range[-1] == self.world.stages - 1

    @property
    def stages(self) -> list[Stage]:
        return [worker.stage for worker in self.workers.values()]

    @property
    def optimisers(self) -> list[Optimiser]:
        return [part.optimiser for worker in self.workers.values() for part in worker.parts()]

    def train_mode(self) -> None:
        """`train()` visits every module, so it is called only when the mode has changed."""
        for stage in self.stages:
            if not all(part.training for part in (stage.module, *stage.module.children())):
                stage.module.train()

    def clip(self, gradients: list[Tensor]) -> None:
        if self.clip_at is not None:
            clip_gradients(gradients, self.clip_at)

    def forget(self) -> None:
        """Gradients of a step that was not made."""
        for worker in self.workers.values():
            worker.forget()

    def changed(self) -> None:
        """What is made of the weights is made anew."""
        for worker in self.workers.values():
            for part in worker.parts():
                part.changed()

    # Lanes: stages side by side. A tensor that crosses from one lane to another must live until the lanes have come
    # back: only then may its memory be used again. Inside a captured step the lanes become branches of the graph.

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """The lanes begin where the current one is now, which waits for all of them at the end."""
        for lane in self.streams:
            lane.follow(self.lanes.current)
        yield
        for lane in self.streams:
            self.lanes.current.follow(lane)

    def lane(self, k: int) -> Any:
        """Of an own stage."""
        return self.streams[k - self.range[0]]

    def after(self, k: int, earlier: int) -> None:
        """Lane k goes on when lane `earlier` has done what it has been given so far."""
        self.lane(k).follow(self.lane(earlier))


def clip_gradients(gradients: list[Tensor], largest: float, norm: Tensor | None = None) -> None:
    """Scale them down where their norm, or the given one that they are a part of, is above the largest."""
    if not gradients:
        return
    norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
    scale = (largest / (norm + 1e-6)).clamp_max(1.0)
    for gradient in gradients:
        gradient.mul_(scale)
