"""Stages side by side on one GPU: a stream for each, joined by events. On other devices everything runs in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch


@final
class Lanes:
    """Streams that leave the current one together and come back together.

    Tensors that cross from one lane to another must live until the lanes have come back: only then may their memory
    be used again. Inside a recorded step the lanes become branches of the graph.
    """

    def __init__(self, count: int, device: torch.device | None) -> None:
        """`device` is the GPU that all lanes are on; None where there is no such one."""
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device else []  # type: ignore[no-untyped-call]

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """The lanes begin where the current stream is now, which waits for all of them at the end."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        yield
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    @contextmanager
    def lane(self, k: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[k]):
            yield

    def after(self, k: int, earlier: int) -> None:
        """Lane k goes on when lane `earlier` has done what it has been given so far."""
        if self._streams:
            self._streams[k].wait_stream(self._streams[earlier])
