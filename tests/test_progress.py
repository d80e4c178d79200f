"""What a person sees: a bar on a terminal, plain lines with the time left elsewhere."""

import io
import signal
import threading

import pytest

from parlay.process import Interrupt
from parlay.run import progress
from parlay.run.progress import Bar, Lines, clock, describe, for_terminal

RECORD = {
    "epoch": 1,
    "phase": "parallel",
    "train_loss": 0.51234,
    "test_loss": 0.6,
    "test_accuracy": 87.654,
    "violation": [0.1234, 0.2],
    "seconds": 12.34,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_epoch_is_told_in_one_line_counted_from_one_and_aligned() -> None:
    told = describe(RECORD, 10)
    assert told == "epoch 2 of 10   parallel  train loss 0.512  test 87.65 %  violation 0.12 0.20  12.3 s"
    first, last = (describe({**RECORD, "epoch": epoch}, 30) for epoch in (0, 29))
    assert first.index("parallel") == last.index("parallel")


def test_an_epoch_without_accuracy_or_violation_leaves_them_out() -> None:
    told = describe({**RECORD, "test_accuracy": None, "violation": None, "phase": "serial"}, 10)
    assert told == "epoch 2 of 10   serial    train loss 0.512  test loss 0.6000  12.3 s"
    assert "test" not in describe({**RECORD, "test_accuracy": None, "test_loss": None}, 10)


@pytest.mark.parametrize(("seconds", "told"), [(59.6, "1:00"), (61, "1:01"), (3600 * 2 + 65, "2:01:05")])
def test_a_time_is_told_in_minutes_and_hours(seconds: float, told: str) -> None:
    assert clock(seconds) == told


def test_plain_lines_say_how_much_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    lines = for_terminal(stream)
    assert isinstance(lines, Lines)
    lines.begin(steps=40, done=10)  # resumed: the first ten cost no time now
    for _ in range(10):
        lines.step("epoch 2 of 4, parallel")
    now[0] += 50
    lines.epoch(RECORD, 4)
    lines.end()
    assert stream.getvalue().endswith("12.3 s  1:40 left\n")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_bar_runs_on_a_terminal_and_leaves_the_lines_of_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    Bar().end()
    assert stream.getvalue() == ""  # one that never began ends without a word
    bar = for_terminal()
    assert isinstance(bar, Bar)
    bar.line("a word [before]")
    bar.begin(steps=6, done=2)
    bar.step("epoch 1 of 10, serial")
    bar.epoch(RECORD, 10)
    bar.end()
    told = stream.getvalue()
    assert "a word [before]" in told  # not taken for markup
    assert "epoch 1 of 10, serial" in told
    assert "3/6" in told
    assert "train loss 0.512" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_does_what_it_always_does(number: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        with Interrupt() as interrupt:
            assert not interrupt.requested()
            signal.raise_signal(number)
            assert interrupt.requested()
            assert came == []
            signal.raise_signal(number)
            assert came == [number]
        signal.raise_signal(number)
        assert came == [number, number]
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_no_signal_is_taken() -> None:
    asked: list[bool] = []

    def work() -> None:
        with Interrupt() as interrupt:
            asked.append(interrupt.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
