"""Who did what when: spans of every rank, as a trace that Perfetto opens and as bars for a drawing. No torch here.

A rank records its spans with a `Recorder`; the spans of all ranks become one `timeline.json` in the trace-event format
(complete events, microseconds from the first one). The report reads that file back and draws its end.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from parlay.errors import InputError

FILE = "timeline.json"
NAMES = ("forward", "backward", "update", "send", "receive", "wait")
"""In the order of a legend; other names are drawn like the last but one."""
TICK = 1e-9  # seconds: what is shorter is rounding
KEPT = 4000  # spans of a rank: some hundred steps, and a file that a browser opens at once


class Span(NamedTuple):
    """Something that one rank did. Seconds since 1970, so that ranks of several hosts can be laid side by side."""

    rank: int
    name: str
    step: int
    begin: float
    end: float


class Recorder:
    """The newest spans of one rank. Off, it costs a comparison per span."""

    def __init__(self, rank: int, on: bool = True, kept: int = KEPT) -> None:
        self.rank = rank
        self.on = on
        self.spans: deque[Span] = deque(maxlen=kept)
        # one offset for the whole run: a clock that is set in the middle of it does not tear the timeline apart
        self._epoch = time.time() - time.perf_counter()

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        if not self.on:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, step, begin, time.perf_counter())

    def add(self, name: str, step: int, begin: float, end: float) -> None:
        """A span by two readings of `time.perf_counter`."""
        if self.on:
            self.spans.append(Span(self.rank, name, step, self._epoch + begin, self._epoch + end))


def trace(spans: Iterable[Span], title: str = "parlay", hosts: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The trace-event object: a process per host, a thread per rank, a complete event (`X`) per span."""
    spans = sorted(spans, key=lambda span: (span.begin, span.rank))
    ranks = sorted({span.rank for span in spans})
    names = [(hosts or {}).get(rank, "") for rank in ranks]
    host_ids = {host: n for n, host in enumerate(dict.fromkeys(names), 1)}
    pids = {rank: host_ids[host] for rank, host in zip(ranks, names, strict=True)}
    events: list[dict[str, Any]] = []
    for host, pid in host_ids.items():
        events.append(_named("process_name", pid, 0, " on ".join(part for part in (title, host) if part)))
    for rank in ranks:
        events.append(_named("thread_name", pids[rank], rank, f"stage {rank}"))
        events.append({**_named("thread_sort_index", pids[rank], rank, ""), "args": {"sort_index": rank}})
    origin = spans[0].begin if spans else 0.0
    for span in spans:
        events.append(
            {
                "name": span.name,
                "cat": "wait" if span.name == "wait" else "work",
                "ph": "X",
                "ts": round(1e6 * (span.begin - origin), 3),
                "dur": round(1e6 * max(span.end - span.begin, 0.0), 3),
                "pid": pids[span.rank],
                "tid": span.rank,
                "args": {"step": span.step},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(path: Path, spans: Iterable[Span], title: str = "parlay", hosts: Mapping[int, str] | None = None) -> None:
    path.write_text(json.dumps(trace(spans, title, hosts)))


def read(path: Path) -> list[Span]:
    """The spans of a trace that `write` wrote; seconds from the first one."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return [_span(event) for event in events if event["ph"] == "X"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, OverflowError):
        raise InputError(f"{path} is no timeline: delete it, or train again") from None


def window(spans: Sequence[Span], steps: int) -> list[Span]:
    """The last stretch of time, some steps long, in which all ranks were at work; cut at its edges, from zero on.

    Not the spans of the last steps: ranks do the same step at different times.
    """
    ends: dict[int, float] = {}
    starts: dict[int, dict[int, float]] = {}
    for span in spans:
        ends[span.rank] = max(span.end, ends.get(span.rank, span.end))
        own = starts.setdefault(span.rank, {})
        own[span.step] = min(span.begin, own.get(span.step, span.begin))
    if not ends:
        return []
    until = min(ends.values())
    pace = max(_pace(sorted(own.values())) for own in starts.values())
    since = until - steps * pace if pace > 0 else min(span.begin for span in spans)
    chosen = [span for span in spans if span.end > since + TICK and span.begin < until - TICK]
    return [span._replace(begin=max(span.begin, since) - since, end=min(span.end, until) - since) for span in chosen]


def _pace(starts: Sequence[float]) -> float:
    """Seconds from step to step: the median, since between epochs there are gaps."""
    return statistics.median(b - a for a, b in pairwise(starts)) if len(starts) > 1 else 0.0


def shares(spans: Sequence[Span]) -> dict[int, dict[str, float]]:
    """Of each rank: the share of the time, from the first span to the last, that each name takes."""
    length = max((span.end for span in spans), default=0.0) - min((span.begin for span in spans), default=0.0)
    found: dict[int, dict[str, float]] = {}
    for span in sorted(spans):
        own = found.setdefault(span.rank, {})
        own[span.name] = own.get(span.name, 0.0) + (span.end - span.begin) / (length or 1.0)
    return found


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """A metadata event: it gives a process or a thread its name."""
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(event: Mapping[str, Any]) -> Span:
    begin, duration = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    return Span(int(event["tid"]), str(event["name"]), int(event["args"]["step"]), begin, begin + duration)
