"""What capturing asks of the process that has all stages: windows of states in host memory, compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from parlay.batch import Batch
from parlay.engine.evaluate import unchanged_buffers
from parlay.engine.own import Own
from parlay.link.states import StateLink
from parlay.stage.compiled import CompiledBlocks, compiled
from parlay.stage.precision import in_full
from parlay.stores.host import HostMemory
from parlay.stores.window import Windows


@final
class Captures:
    def __init__(self, own: Own, compile: bool) -> None:
        """`compile`: captured steps run compiled blocks and links."""
        self.own = own
        self.batch: Batch | None = None
        """Of this step."""
        self._links = [link for link in own.links if isinstance(link, StateLink)]
        self._unchecked = compile
        self._windows: Windows | None = None
        on_host = [store for link in self._links for store in link.stores() if isinstance(store, HostMemory)]
        if on_host:
            self._windows = windows = Windows(on_host, own.batch_size)
            for link in self._links:
                link.through(windows)
        if compile:
            for link in self._links:
                link.speed_up(compiled)
            for stage in own.stages:
                stage.speed_up(CompiledBlocks(stage.module))

    @contextmanager
    def through_windows(self) -> Iterator[None]:
        """Copies this batch's states to the GPU before a captured step, and back to the host after it."""
        windows, batch = self._windows, self.batch
        if windows is None or batch is None:
            yield
            return
        windows.bring(batch.ids)
        if batch.following:
            windows.prefetch(batch.following[0])
        yield
        windows.carry(batch.ids)

    def check_compiled(self, batch: Batch | None) -> None:
        """One pass forward and backward that changes nothing; where the compiler fails, blocks are not compiled."""
        if not self._unchecked or batch is None:
            return
        self._unchecked = False
        own = self.own
        try:
            with unchanged_buffers(own.model):
                x, targets = own.feed.batch(batch.ids)
                for stage in own.stages:
                    x = stage.forward(x, compiled=True)
                own.loss(in_full(x), targets).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may fail in any way
            reason = str(error).strip().partition("\n")[0]
            own.say(f"blocks are not compiled: {reason}")
            for link in self._links:
                link.slow_down()
            for stage in own.stages:
                stage.speed_up(None)
        own.forget()

    def close(self) -> None:
        if self._windows is not None:
            self._windows.close()
