"""The run seen from outside: K x R ranks started, watched, signalled, restarted.

The ranks train and write everything that a run leaves. The launcher knows what none of them can know: which one died
first. It waits for their ends in the kernel, so a death is noticed at once, and looks at their heartbeats.

torch.distributed.elastic starts the processes and keeps their log files and exit reports. Its `wait` is not used: that
gives survivors 30 s to end, and it cannot tell a rank that hangs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import multiprocessing as elastic

from parlay import signs
from parlay.config.recipe import Recipe
from parlay.errors import InputError
from parlay.launch.cause import Failure, first_cause
from parlay.launch.heartbeat import Beat, BeatFile, CpuClock
from parlay.launch.rank import HEARTBEATS, ExitReport, Position, read_report
from parlay.launch.slow import SlowRanks
from parlay.process import LAUNCHER, SIGNALS, Interrupt
from parlay.run import checkpoints

PROGRAM = (sys.executable, "-m", "parlay.cli")
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


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    status: str
    """finished, diverged, interrupted or failed; empty for wrong input."""
    message: str = ""
    whole: bool = False
    """Rank 0 ended in order: what it wrote stands."""
    slow: tuple[dict[str, Any], ...] = ()
    """Stages that took far longer than the others."""


class _Signals(Interrupt):
    """The launcher outlives the second signal: it has to say what became of the run."""

    def _on_signal(self, *_: object) -> None:
        self.count += 1


def run(launch: Launch) -> Outcome:
    """Start the ranks, again where they were lost and restarts are left, and return when all have ended."""
    attempt = 0
    with _Signals() as signals:
        while True:
            outcome = _Attempt(launch, attempt, signals).run()
            if outcome.status != "failed" or attempt >= launch.max_restarts or signals.count:
                return outcome
            attempt += 1
            print(f"{outcome.message}; restart {attempt} of {launch.max_restarts}", file=sys.stderr, flush=True)


@final
class _Rank:
    """One process of the run, in a session of its own: a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self, position: Position, context: elastic.SubprocessContext, now: float) -> None:
        self.position = position
        self._handler = context.subprocess_handlers[position.rank]
        self._log, self._report = context.stderrs[position.rank], Path(context.error_files[position.rank])
        self.process = self._handler.proc
        self.pidfd = os.pidfd_open(self.process.pid)  # can be read when it has ended
        self.ended_at: float | None = None
        self.report: ExitReport | None = None
        self.beat, self.heard_at = Beat(), now
        self.cpu = CpuClock(self.process.pid)
        self.stuck = ""
        """Why it was ended, where it was for giving no sign of life."""

    @property
    def lost(self) -> bool:
        """Has it ended without being done?"""
        return self.ended_at is not None and not (self.report and self.report.status)

    def hear(self, beat: Beat, now: float) -> None:
        if beat.at != self.beat.at:
            self.beat, self.heard_at = beat, now

    def send(self, number: signal.Signals) -> None:
        """To the rank; SIGKILL to whatever it has started itself, too."""
        if self.ended_at is None:
            with suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def end(self, now: float) -> None:
        """It has ended, or does now, with whatever it has left running; its log file is closed."""
        if self.ended_at is None:
            with suppress(ProcessLookupError):
                self._handler.close(signal.SIGKILL)
            self.process.wait()
            os.close(self.pidfd)
            self.ended_at, self.report = now, read_report(self._report)

    def failure(self) -> Failure:
        pid, code, at, line = self.process.pid, self.process.returncode, self.ended_at or 0.0, _last_line(self._log)
        return Failure(self.position, pid, code, at, self.beat.step, self.report, line, self.stuck)


@final
class _Attempt:
    """The ranks from their start to their ends."""

    def __init__(self, launch: Launch, number: int, signals: Interrupt) -> None:
        self.launch, self.number, self.signals = launch, number, signals
        self.positions = [
            Position(rank, launch.recipe.stages, launch.recipe.replicas)
            for rank in range(launch.recipe.stages * launch.recipe.replicas)
        ]
        self.timeout, self.clock = signs.timeout(), signs.RunningClock()
        self.ranks: list[_Rank] = []
        self.slow = SlowRanks()
        self.forwarded = 0

    def run(self) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="parlay-") as name, _store(self.launch.port) as port:
            beats = BeatFile(Path(name) / "heartbeats", len(self.positions))
            try:
                context = self._start(Path(name), port)
                try:
                    self._watch(beats)
                    return self._outcome()
                finally:
                    for rank in self.ranks:
                        rank.end(self.clock())
                    context.close()
                    if self.ranks[0].process.returncode < 0 and sys.stderr.isatty():
                        print(SHOW_CURSOR, file=sys.stderr, flush=True)  # its bar had no time to do so
            except elastic.SignalException:  # while they were started
                return Outcome("interrupted", f"interrupted before it began to train; {self._saved()}")
            finally:
                beats.close()

    def _start(self, folder: Path, port: int) -> elastic.PContext:
        """Rank 0 has the terminal, the others write into log files."""
        recipe = folder / "recipe.toml"
        recipe.write_text(self.launch.recipe.toml())
        words = ["train", "--recipe", str(recipe), "--out", str(self.launch.out)]
        words += ["--resume"] if self.launch.resume or self.number > 0 else []
        logs = dict.fromkeys(range(1, len(self.positions)), elastic.Std.ERR)
        loud = logs if os.environ.get("PARLAY_DEBUG") == "1" else elastic.Std.NONE
        handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)}
        try:
            context = elastic.start_processes(
                "parlay",
                PROGRAM[0],
                {at.rank: (*PROGRAM[1:], *words) for at in self.positions},
                {at.rank: self._environment(at.rank, folder, port) for at in self.positions},
                elastic.DefaultLogsSpecs(str(folder / "logs"), logs, loud),
                {at.rank: f"[{at}] " for at in self.positions},
            )
        finally:
            for number, handler in handlers.items():  # torch's own handlers raise SignalException
                signal.signal(number, handler or signal.SIG_DFL)
        assert isinstance(context, elastic.SubprocessContext)
        self.ranks = [_Rank(at, context, self.clock()) for at in self.positions]
        return context

    def _environment(self, rank: int, folder: Path, port: int) -> dict[str, str]:
        threads = str(max((os.cpu_count() or 1) // len(self.positions), 1))
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # nobody outside needs to connect
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(self.positions))),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and not in rank 0
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            HEARTBEATS: str(folder / "heartbeats"),
            LAUNCHER: str(os.getpid()),
        }

    # --- watching

    def _watch(self, beats: BeatFile) -> None:
        """Until all have ended. A loss, or a second signal, ends those that do not end by themselves."""
        while alive := [rank for rank in self.ranks if rank.ended_at is None]:
            ended = wait([rank.pidfd for rank in alive], TICK)
            now = self.clock()
            for rank in alive:
                rank.hear(beats.read(rank.position.rank), now)
                if rank.pidfd in ended:
                    rank.end(now)
            self.slow.look({rank.position: rank.beat for rank in self.ranks})
            self._forward_signals()
            self._end_a_stuck_one(now)
            self._end_the_rest(now)

    def _forward_signals(self) -> None:
        """The first asks for a checkpoint at the next step; the second ends everything."""
        if self.signals.count > self.forwarded:
            self.forwarded = self.signals.count
            for rank in self.ranks:
                rank.send(signal.SIGTERM if self.forwarded == 1 else signal.SIGKILL)

    def _end_a_stuck_one(self, now: float) -> None:
        """A rank that is silent and does not compute either is ended; of several the one that has been so longest."""
        if self._lost_at() is not None or any(rank.stuck for rank in self.ranks):
            return
        silent = [(rank, why) for rank in self.ranks if rank.ended_at is None and (why := self._why_stuck(rank, now))]
        if silent:
            rank, why = min(silent, key=lambda found: (not found[0].cpu.stopped(), found[0].heard_at, found[0].beat.at))
            rank.stuck = why
            rank.send(signal.SIGKILL)

    def _why_stuck(self, rank: _Rank, now: float) -> str:
        silence = now - rank.heard_at
        if silence <= 10 * TICK:  # cheap as long as it beats
            rank.cpu.restart(now)
        if silence <= self.timeout:
            return ""
        if rank.cpu.stopped():
            return f"was stopped for {silence:.0f} s"
        computes = rank.cpu.busy(now)
        patient = PATIENT if computes or rank.beat.blocked else 1 if rank.beat.step >= 0 else signs.STARTING
        what = "computed without an end" if computes else "gave no sign of life"
        return f"{what} for {silence:.0f} s" if silence > self.timeout * patient else ""

    def _end_the_rest(self, now: float) -> None:
        lost, first = self._lost_at(), self.ranks[0].ended_at
        if (lost is not None and now > lost + SETTLE) or (first is not None and now > first + LINGER):
            for rank in self.ranks:
                rank.send(signal.SIGKILL)

    def _lost_at(self) -> float | None:
        """When the first rank ended that was not to end."""
        return min((rank.ended_at for rank in self.ranks if rank.lost and rank.ended_at is not None), default=None)

    # --- telling

    def _outcome(self) -> Outcome:
        first, lost_at = self.ranks[0], self._lost_at()
        outcome = Outcome("failed", slow=self.slow.found({rank.position: rank.beat for rank in self.ranks}))
        if first.report and not first.lost and (lost_at is None or lost_at >= (first.ended_at or 0.0)):
            return replace(outcome, status=first.report.status, whole=True)
        if self.forwarded > 1:
            return replace(outcome, status="interrupted", message=f"ended by a second signal; {self._saved()}")
        wrong = next((rank.report.message for rank in self.ranks if rank.report and rank.report.code == 2), None)
        if wrong is not None:
            return replace(outcome, status="", message=wrong)
        cause = first_cause([rank.failure() for rank in self.ranks if rank.lost])
        if self.forwarded and cause.code == -signal.SIGTERM:
            message = f"interrupted before it began to train; {self._saved()}"
            return replace(outcome, status="interrupted", message=message)
        return replace(outcome, message=f"{cause}; {self._saved()}")

    def _saved(self) -> str:
        found = checkpoints.newest(self.launch.out / "checkpoints", lambda _: None)
        return f"the last checkpoint is {found.path}" if found else "there is no checkpoint yet"


def _last_line(log: str) -> str:
    """The last line of a log file that says something."""
    if not log:
        return ""
    with open(log, "rb") as file:
        file.seek(max(os.path.getsize(log) - 4096, 0))
        return file.read().decode(errors="replace").rstrip().rpartition("\n")[2].strip()


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
        line = f"port {port} cannot be used ({error.strerror}): write another --port, or none for a free one"
        raise InputError(line) from None
    found: int = listener.getsockname()[1]
    # the store closes the socket that it is given
    store = TCPStore(LOOPBACK, found, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield found
    finally:
        del store
