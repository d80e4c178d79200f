"""Spans of every rank become a trace that Perfetto opens, and bars on the page of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from parlay import timeline
from parlay.errors import InputError
from parlay.timeline import Recorder, Span, shares, trace, window

NUMBER = (int, float)
# the keys of an event by its phase: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
PHASES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
METADATA = {"process_name": {"name": str}, "thread_name": {"name": str}, "thread_sort_index": {"sort_index": int}}


def two_ranks(steps: int = 6) -> list[Span]:
    """Stage 0 computes for 8 ms and waits for 2, stage 1 computes for 10; step s begins at 100 + s/100 seconds."""
    spans = []
    for step in range(steps):
        at = 100 + step / 100
        spans += [
            Span(0, "forward", step, at, at + 0.003),
            Span(0, "send", step, at + 0.003, at + 0.0035),
            Span(0, "backward", step, at + 0.0035, at + 0.008),
            Span(0, "wait", step, at + 0.008, at + 0.01),
            Span(1, "forward", step, at, at + 0.004),
            Span(1, "backward", step, at + 0.004, at + 0.009),
            Span(1, "update", step, at + 0.009, at + 0.01),
        ]
    return spans


def check(content: dict[str, Any]) -> None:
    """Is this the JSON object form of the trace-event format?"""
    assert isinstance(content["traceEvents"], list)
    assert content.get("displayTimeUnit", "ms") in ("ms", "ns")
    for event in content["traceEvents"]:
        wanted = PHASES[event["ph"]]
        assert set(event) == {"ph", *wanted}
        for key, kind in wanted.items():
            assert isinstance(event[key], kind), (key, event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        else:
            form = METADATA[event["name"]]
            assert {key: type(value) for key, value in event["args"].items()} == form


def test_a_trace_has_the_form_that_perfetto_reads() -> None:
    content = json.loads(json.dumps(trace(two_ranks(), "resnet20", {0: "left", 1: "right"})))
    check(content)
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in content["traceEvents"] if e["ph"] == "M"}
    assert named["process_name", 1, 0]["name"] == "resnet20 on left"
    assert named["process_name", 2, 0]["name"] == "resnet20 on right"
    assert named["thread_name", 1, 0]["name"] == "stage 0"
    assert named["thread_name", 2, 1]["name"] == "stage 1"


def test_times_are_microseconds_from_the_first_span_and_in_order() -> None:
    events = [event for event in trace(two_ranks())["traceEvents"] if event["ph"] == "X"]
    assert events[0]["ts"] == 0
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    wait = next(e for e in events if e["name"] == "wait")
    assert (wait["ts"], wait["dur"]) == pytest.approx((8000, 2000), abs=0.1)
    assert (wait["cat"], wait["args"]) == ("wait", {"step": 0})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    timeline.write(tmp_path / timeline.FILE, two_ranks())
    found = timeline.read(tmp_path / timeline.FILE)
    wanted = sorted(two_ranks(), key=lambda span: (span.begin, span.rank))
    assert [span[:3] for span in found] == [span[:3] for span in wanted]
    assert [span.begin + 100 for span in found] == pytest.approx([span.begin for span in wanted], abs=1e-6)


def test_an_empty_trace_is_one_too(tmp_path: Path) -> None:
    check(trace([]))
    timeline.write(tmp_path / timeline.FILE, [])
    assert timeline.read(tmp_path / timeline.FILE) == []
    assert window([], 3) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', "\udcff"])
def test_a_file_that_is_no_timeline_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / timeline.FILE
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="is no timeline"):
        timeline.read(path)


def test_a_window_is_a_stretch_of_time_in_which_all_ranks_were_at_work() -> None:
    late = [span._replace(begin=span.begin + 0.015, end=span.end + 0.015) for span in two_ranks() if span.rank == 1]
    spans = [*(span for span in two_ranks() if span.rank == 0), *late]  # stage 0 ends 15 ms before stage 1
    chosen = window(spans, 2)
    assert min(span.begin for span in chosen) == pytest.approx(0, abs=1e-9)
    assert max(span.end for span in chosen) == pytest.approx(0.02, abs=1e-9)
    assert {span.step for span in chosen if span.rank == 0} == {4, 5}
    assert {span.step for span in chosen if span.rank == 1} == {2, 3, 4}  # 2 and 4 in part


def test_a_single_step_is_a_window_too() -> None:
    assert {span.name for span in window(two_ranks(1), 4)} == {"forward", "send", "backward", "wait", "update"}


def test_shares_are_of_each_ranks_own_time() -> None:
    found = shares(two_ranks())
    assert found[0]["wait"] == pytest.approx(0.2)
    assert found[1]["update"] == pytest.approx(0.1)
    assert sum(found[0].values()) == pytest.approx(1)


def test_a_recorder_keeps_the_newest_spans_and_none_when_off() -> None:
    recorder = Recorder(3, kept=2)
    for step in range(4):
        with recorder.span("forward", step):
            pass
    assert [(span.rank, span.name, span.step) for span in recorder.spans] == [(3, "forward", 2), (3, "forward", 3)]
    assert all(span.begin <= span.end for span in recorder.spans)
    recorder.on = False
    with recorder.span("backward", 9):
        pass
    recorder.add("backward", 9, 0.0, 1.0)
    assert len(recorder.spans) == 2


def test_a_span_is_kept_of_a_step_that_failed() -> None:
    recorder = Recorder(0)
    with pytest.raises(ZeroDivisionError), recorder.span("forward", 0):
        _ = 1 / 0
    assert [span.name for span in recorder.spans] == ["forward"]
