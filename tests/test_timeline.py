"""Spans of every rank become a trace that Perfetto opens, and are read back for the page of a run."""

import json
from pathlib import Path

import pytest

from parlay import timeline
from parlay.errors import InputError
from parlay.timeline import Recorder, Span, shares, trace, window


def two_ranks(steps: int = 6) -> list[Span]:
    """Stage 0 computes for 8 ms and waits for 2, stage 1 computes for 10; step s begins at 100 + s/100 seconds."""
    parts = [
        *((0, "forward", 0, 3), (0, "send", 3, 3.5), (0, "backward", 3.5, 8), (0, "wait", 8, 10)),
        *((1, "forward", 0, 4), (1, "backward", 4, 9), (1, "update", 9, 10)),
    ]
    at = [100 + step / 100 for step in range(steps)]
    return [
        Span(rank, name, step, at[step] + begin / 1000, at[step] + end / 1000)
        for step in range(steps)
        for rank, name, begin, end in parts
    ]


def test_a_trace_has_the_form_that_perfetto_reads() -> None:
    """The object form of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    content = json.loads(json.dumps(trace(two_ranks(), "resnet20", {0: "left", 1: "right"})))
    assert content.get("displayTimeUnit", "ms") in ("ms", "ns")
    named, spans = {}, []
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert set(event) == {"ph", "name", "pid", "tid", "args"}
            named[event["name"], event["pid"], event["tid"]] = event["args"]
        else:
            assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
            assert event["ph"] == "X"
            spans.append(event)
    assert named["process_name", 1, 0] == {"name": "resnet20 on left"}
    assert named["process_name", 2, 0] == {"name": "resnet20 on right"}
    assert [named["thread_name", rank + 1, rank] for rank in (0, 1)] == [{"name": "stage 0"}, {"name": "stage 1"}]
    assert [e["ts"] for e in spans] == sorted(e["ts"] for e in spans)  # microseconds from the first one
    wait = next(e for e in spans if e["name"] == "wait")
    assert (spans[0]["ts"], wait["ts"], wait["dur"]) == pytest.approx((0, 8000, 2000), abs=0.1)
    assert (wait["cat"], wait["args"]) == ("wait", {"step": 0})


@pytest.mark.parametrize("spans", [two_ranks(), []])
def test_what_is_written_is_read_again(spans: list[Span], tmp_path: Path) -> None:
    timeline.write(tmp_path / timeline.FILE, spans)
    found, wanted = timeline.read(tmp_path / timeline.FILE), sorted(spans, key=lambda span: (span.begin, span.rank))
    assert [span[:3] for span in found] == [span[:3] for span in wanted]
    assert [span.begin + 100 for span in found] == pytest.approx([span.begin for span in wanted], abs=1e-6)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', "\udcff"])
def test_a_file_that_is_no_timeline_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / timeline.FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="is no timeline"):
        timeline.read(tmp_path / timeline.FILE)


def test_a_window_is_a_stretch_of_time_in_which_all_ranks_were_at_work() -> None:
    moved = [15e-3 * span.rank for span in two_ranks()]  # stage 0 ends 15 ms before stage 1
    spans = [s._replace(begin=s.begin + by, end=s.end + by) for s, by in zip(two_ranks(), moved, strict=True)]
    chosen = window(spans, 2)
    assert min(span.begin for span in chosen) == pytest.approx(0, abs=1e-9)
    assert max(span.end for span in chosen) == pytest.approx(0.02, abs=1e-9)
    assert {span.step for span in chosen if span.rank == 0} == {4, 5}
    assert {span.step for span in chosen if span.rank == 1} == {2, 3, 4}  # 2 and 4 in part
    assert len(window(two_ranks(1), 4)) == 7
    assert window([], 3) == []


def test_shares_are_of_each_ranks_own_time() -> None:
    found = shares(two_ranks())
    assert (found[0]["wait"], found[1]["update"], sum(found[0].values())) == pytest.approx((0.2, 0.1, 1))


def test_a_recorder_keeps_the_newest_spans_also_of_a_failed_step_and_none_when_off() -> None:
    recorder = Recorder(3, kept=2)
    for step in range(3):
        with recorder.span("forward", step):
            pass
    with pytest.raises(ZeroDivisionError), recorder.span("backward", 3):
        _ = 1 / 0
    kept = [(3, "forward", 2), (3, "backward", 3)]
    assert [(span.rank, span.name, span.step) for span in recorder.spans] == kept
    assert all(span.begin <= span.end for span in recorder.spans)
    recorder.on = False
    with recorder.span("backward", 9):
        pass
    recorder.add("backward", 9, 0.0, 1.0)
    assert len(recorder.spans) == 2
