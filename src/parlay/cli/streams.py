"""Standard output and standard error that cannot end a run: whoever reads them may leave, and a disk may be full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class Forgiving:
    """A stream that is written to as long as somebody takes it. After the first failure it goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self) -> None:
        """What is still buffered goes nowhere either: the interpreter writes it out when it ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)


@contextmanager
def forgiving_streams() -> Iterator[None]:
    """Inside, both streams forgive; a closed one is there again, and goes nowhere."""
    before = sys.stdout, sys.stderr
    closed = [open(os.devnull, "w") if stream is None else None for stream in before]  # noqa: SIM115
    streams = [stream or other for stream, other in zip(before, closed, strict=True)]
    sys.stdout, sys.stderr = (cast(TextIO, Forgiving(cast(TextIO, stream))) for stream in streams)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
        for other in closed:
            if other is not None:
                other.close()
