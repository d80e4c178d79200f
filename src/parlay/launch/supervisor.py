"""The run seen from outside: K x R ranks started, watched, signalled, restarted, and told about.

The ranks train and write everything that a run leaves. The supervisor knows what none of them can know: which one died
first. It waits for their ends in the kernel, so a death is noticed at once, and looks at their heartbeats.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from parlay.errors import InputError
from parlay.interrupt import SIGNALS
from parlay.launch import blame, heartbeat, places, worker
from parlay.launch.ranks import Rank
from parlay.launch.slow import SlowRanks
from parlay.recipe import Recipe
from parlay.run import checkpoints

LOOPBACK = "127.0.0.1"
SHOW_CURSOR = "\x1b[?25h"
TICK = 0.1  # seconds between two looks at heartbeats and signals; ends of ranks are noticed at once
SETTLE = 1.0  # seconds that survivors have to end by themselves once one rank is lost: their errors may be the cause
LINGER = 10.0  # seconds for the others to end after rank 0, which ends last
PATIENT = 20  # timeouts of silence that are given to a rank that computes, or that waits for all others in one call


@dataclass(frozen=True)
class Launch:
    """What to start."""

    recipe: Recipe
    """Resolved, but for a cut that is still to be measured."""
    out: Path
    resume: bool = False
    port: int | None = None
    """Of the store where the ranks meet; a free one where none is given."""
    max_restarts: int = 0
    program: tuple[str, ...] = (sys.executable, "-m", "parlay.cli")

    @property
    def ranks(self) -> int:
        return self.recipe.stages * self.recipe.replicas


@dataclass(frozen=True)
class Ending:
    """What became of it."""

    status: str
    """finished, diverged, interrupted or failed; empty for wrong input."""
    message: str = ""
    whole: bool = False
    """Rank 0 ended in order: what it wrote stands."""
    slow: tuple[dict[str, Any], ...] = ()
    """Stages that took far longer than the others."""


def run(launch: Launch) -> Ending:
    """Start the ranks, again where they were lost and restarts are left, and return when all have ended."""
    attempt = 0
    with _Signals() as signals:
        while True:
            ending = _Attempt(launch, attempt, signals).run()
            if ending.status != "failed" or attempt >= launch.max_restarts or signals.count:
                return ending
            attempt += 1
            print(f"{ending.message}; restart {attempt} of {launch.max_restarts}", file=sys.stderr, flush=True)


@final
class _Signals:
    """Counts Ctrl-C and SIGTERM."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.count += 1


@final
class _Attempt:
    """The ranks from their start to their ends."""

    def __init__(self, launch: Launch, number: int, signals: _Signals) -> None:
        self.launch, self.number, self.signals = launch, number, signals
        self.timeout = heartbeat.timeout()
        self.forwarded = 0
        self.ranks: list[Rank] = []
        self.slow = SlowRanks()
        self.folder = Path()
        self.beats: heartbeat.Beats

    def run(self) -> Ending:
        with tempfile.TemporaryDirectory(prefix="parlay-") as folder, _store(self.launch.port) as port:
            self.folder = Path(folder)
            (self.folder / "recipe.toml").write_text(self.launch.recipe.toml())
            self.beats = heartbeat.Beats(self.folder / heartbeat.FILE, self.launch.ranks)
            try:
                for rank in range(self.launch.ranks):
                    self.ranks.append(self._start(rank, port))
                self._watch()
                return self._ending()
            finally:
                for rank_ in self.ranks:
                    rank_.close()
                self.beats.close()
                if self.ranks and self.ranks[0].process.returncode < 0 and sys.stderr.isatty():
                    print(SHOW_CURSOR, file=sys.stderr, flush=True)  # its bar had no time to do so

    def _start(self, rank: int, port: int) -> Rank:
        launch = self.launch
        recipe = str(self.folder / "recipe.toml")
        command = [*launch.program, "train", "--recipe", recipe, "--out", str(launch.out)]
        if launch.resume or self.number > 0:
            command.append("--resume")
        ranks = launch.ranks
        environment = {
            "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // ranks, 1)),
            "GLOO_SOCKET_IFNAME": "lo",  # nobody outside this machine needs to connect
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and not in rank 0
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            worker.FOLDER: str(self.folder),
            worker.LAUNCHER: str(os.getpid()),
        }
        at = places.place(rank, launch.recipe.stages, launch.recipe.replicas)
        return Rank(at, command, environment, loud=os.environ.get("PARLAY_DEBUG") == "1")

    # --- watching

    def _watch(self) -> None:
        """Until all have ended. A loss, or a second signal, ends those that do not end by themselves."""
        with selectors.DefaultSelector() as selector:
            ends = {rank.place.rank: os.pidfd_open(rank.pid) for rank in self.ranks}
            try:
                for rank in self.ranks:
                    selector.register(ends[rank.place.rank], selectors.EVENT_READ, rank)
                    if rank.process.stdout is not None:
                        selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
                while any(rank.alive for rank in self.ranks):
                    for key, _ in selector.select(TICK):
                        self._hear(selector, key, ends)
                    self._forward_signals()
                    self._look_for_stuck()
                    self.slow.look(self._beats())
                    self._end_the_rest()
            finally:
                for end in ends.values():
                    os.close(end)

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, ends: dict[int, int]) -> None:
        rank: Rank = key.data
        if key.fd == ends[rank.place.rank]:
            if rank.look():
                selector.unregister(key.fd)
        elif not rank.read():
            selector.unregister(key.fileobj)

    def _forward_signals(self) -> None:
        """The first asks for a checkpoint at the next step; the second ends everything."""
        if self.signals.count > self.forwarded:
            self.forwarded = self.signals.count
            for rank in self.ranks:
                rank.send(signal.SIGTERM) if self.forwarded == 1 else rank.kill()

    def _look_for_stuck(self) -> None:
        """A rank that is silent and does not compute either is ended; of several the one that has been so longest."""
        if self._lost_at() is not None or any(rank.stuck for rank in self.ranks):
            return
        now = time.monotonic()
        silent = [(rank, why) for rank in self.ranks if rank.alive and (why := self._why_stuck(rank, now))]
        if silent:
            rank, why = min(silent, key=lambda found: (not found[0].cpu.stopped(), self._last_sign(found[0])))
            rank.stuck = why
            rank.kill()

    def _why_stuck(self, rank: Rank, now: float) -> str:
        beat = self.beats.read(rank.place.rank)  # once: it may go on between two looks
        silence = now - max(beat.at, rank.began)
        if silence <= 10 * TICK:  # cheap as long as it beats
            rank.cpu.restart(now)
            return ""
        if silence <= self.timeout:
            return ""
        if rank.cpu.stopped():
            return f"was stopped for {silence:.0f} s"
        computing = rank.cpu.busy(now)
        allowed = self.timeout * (PATIENT if computing or beat.blocked else 1 if beat.step >= 0 else heartbeat.STARTING)
        what = "computed without an end" if computing else "gave no sign of life"
        return f"{what} for {silence:.0f} s" if silence > allowed else ""

    def _last_sign(self, rank: Rank) -> float:
        return max(self.beats.read(rank.place.rank).at, rank.began)

    def _end_the_rest(self) -> None:
        now, lost, first = time.monotonic(), self._lost_at(), self.ranks[0]
        too_long = lost is not None and now > lost + SETTLE
        lingering = first.ended_at is not None and now > first.ended_at + LINGER
        if too_long or lingering:
            for rank in self.ranks:
                rank.kill()

    def _lost_at(self) -> float | None:
        """When the first rank ended that was not to end."""
        times = [rank.ended_at for rank in self.ranks if rank.ended_at is not None and not self._orderly(rank)]
        return min(times, default=None)

    def _orderly(self, rank: Rank) -> bool:
        word = worker.heard(self.folder, rank.place.rank)
        return word is not None and word.orderly

    # --- telling

    def _ending(self) -> Ending:
        words = [worker.heard(self.folder, rank.place.rank) for rank in self.ranks]
        first = words[0]
        ending = Ending("failed", slow=self.slow.found(self._beats()))
        lost = self._lost_at()
        if first is not None and first.orderly and (lost is None or lost > (self.ranks[0].ended_at or 0.0)):
            return replace(ending, status=first.status, whole=True)
        if self.forwarded > 1:
            return replace(ending, status="interrupted", message=f"ended by a second signal; {self._saved()}")
        wrong = next((word for word in words if word is not None and word.code == 2), None)
        if wrong is not None:
            return replace(ending, status="", message=wrong.error)
        ends = [self._end(rank, word) for rank, word in zip(self.ranks, words, strict=True) if not self._orderly(rank)]
        cause = blame.first_cause(ends)
        if self.forwarded and cause.code == -signal.SIGTERM:
            message = f"interrupted before it began to train; {self._saved()}"
            return replace(ending, status="interrupted", message=message)
        return replace(ending, message=f"{blame.describe(cause)}; {self._saved()}")

    def _end(self, rank: Rank, word: worker.Word | None) -> blame.End:
        step, at = self.beats.read(rank.place.rank).step, rank.ended_at or 0.0
        return blame.End(rank.place, rank.pid, rank.process.returncode, at, step, word, rank.last_words(), rank.stuck)

    def _saved(self) -> str:
        found = checkpoints.newest(self.launch.out / "checkpoints", lambda _: None)
        return f"the last checkpoint is {found.path}" if found else "there is no checkpoint yet"

    def _beats(self) -> dict[places.Place, heartbeat.Beat]:
        return {rank.place: self.beats.read(rank.place.rank) for rank in self.ranks}


@contextmanager
def _store(port: int | None) -> Iterator[int]:
    """Where the ranks meet, for this machine alone: the store would listen to the whole network by itself."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port or 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InputError(
            f"port {port} cannot be used ({error.strerror}): write another --port, or none for a free one"
        ) from None
    found: int = listener.getsockname()[1]
    # the store closes the socket that it is given
    store = TCPStore(LOOPBACK, found, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield found
    finally:
        del store
