"""The tables, cell by cell, and the sentences around them: the same for the page and for a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parlay import methods
from parlay.report import times
from parlay.report.groups import Comparison, Row, differing
from parlay.report.load import Content, Run

DASH, MINUS = "–", "−"
NAMES = {
    **{methods.label(name): methods.meaning(name) for name in methods.names()},
    "SPH": "serial-parallel hybrid, a schedule with parallel and serial epochs",
    "DS": "states are stored downsampled",
    "DA": "data augmentation",
    "K": "number of stages",
}
"""What stands in the names of configurations."""

Show = Callable[[Any], str]


@dataclass(frozen=True)
class Cell:
    text: str
    key: float | str | None = None
    """What the column is sorted by; None comes last."""
    look: str = ""
    """bad: something went wrong; level: a gap that may be chance."""


@dataclass(frozen=True)
class Column:
    title: str
    cells: tuple[Cell, ...]
    note: str = ""
    """What the title means, where it is short for something."""

    @property
    def numeric(self) -> bool:
        return all(not isinstance(cell.key, str) for cell in self.cells)


def comparison(found: Comparison) -> list[Column]:
    """How good, how fast, at what price: a row for each configuration."""
    rows, show = found.rows, percent if found.by_accuracy else loss
    looks = ["level" if row["gap_differs"] is False else "" for row in rows]
    bad = ["" if row["status"] == "finished" else "bad" for row in rows]
    parts = [(row["epochs_done"], row["epochs"]) for row in rows]
    epochs = [str(done) if done == asked or not asked else f"{done} of {asked}" for done, asked in parts]
    columns = [
        _column("configuration", rows, "label"),
        _column(score_name(found), rows, found.score, texts=_spreads(rows, found.score, show)),
        _column("gap to serial", rows, "gap", lambda gap: signed(gap, show), looks=looks),
        _column("baseline", rows, "reference", note="the serial configuration most like it"),
        _column("memory for states", rows, "auxiliary_bytes", memory, "states and multipliers, or queues"),
        *(_times(found) if found.timed else ()),
        _column("runs", rows, "runs", note="seeds that the numbers are made of"),
        _column("epochs", rows, "epochs_done", texts=epochs),
        _column("status", rows, "status", looks=bad),
    ]
    plain = {
        "epochs": set(epochs) == {str(rows[0]["epochs"])},
        "baseline": len({row["reference"] for row in rows} - {None}) < 2,
        "status": not any(bad),
    }
    return [column for column in _told(columns) if not plain.get(column.title)]


def _times(found: Comparison) -> Iterable[Column]:
    rows = [
        row | {"gain": None if row["takes_turns"] else row["speedup_per_sample"], "until": found.seconds_to_target(one)}
        for one, row in zip(found.configurations, found.rows, strict=True)
    ]
    yield _column(
        "step, ms", rows, "step_ms", texts=_spreads(rows, "step_ms", percent), note="of training, median epochs"
    )
    if honest(found):
        gains = [percent(row["gain"]) + " ?" * (row["unsteady"] and row["gain"] is not None) for row in rows]
        yield _column("speed-up over serial", rows, "gain", texts=gains, note="by time per sample trained")
        until = f"time to {points(found, found.target, ' %')}, s"
        yield _column(until, rows, "until", seconds, "of training, until first within chance of serial training's end")
    yield _column("delay, steps", rows, "staleness", "{:.0f}".format, "age of the oldest signal in use")


def differences(found: Comparison) -> list[Column]:
    """The keys of the recipes that differ; not those that only some methods have."""
    rows = [{"label": one.label} | dict(one.runs[0].recipe) for one in found.configurations]
    keys = [key for key in differing(found.configurations) if len({repr(row[key]) for row in rows if key in row}) > 1]
    return [_column("configuration", rows, "label"), *(_column(key, rows, key) for key in keys)] if keys else []


def bench(content: Content) -> list[Column]:
    """Of one `parlay bench`."""
    rows = [
        row
        | {
            "sample_us": 1000 * row["step_ms"] / row["samples_per_step"],
            "waits": ", ".join(f"{share or 0:.1%}" for share in row["wait_share"] or ()) or None,
        }
        for row in content["rows"]
    ]
    partly = any(row["samples_per_step"] < row["batch_size"] for row in rows)
    per_step = _column(
        "speed-up per step", rows, "speedup_per_step", percent, "ratio of the times of a step: not of the same work"
    )
    return _told(
        [
            _column("system", rows, "system"),
            _column("speed-up", rows, "speedup", texts=_quartiles(rows, "speedup", percent)),
            _column("ms a step", rows, "step_ms", texts=_quartiles(rows, "step_ms", seconds)),
            _column("µs a sample", rows, "sample_us", seconds, "over the samples that each block is trained on"),
            *([per_step, _column("samples a step", rows, "samples_per_step", "{:g}".format)] if partly else ()),
            _column("devices", rows, "stages", "{:g}".format),
            _column("stages wait", rows, "waits", note="share of every stage's time"),
            _column("variant", rows, "note"),
        ]
    )


def bench_title(content: Content) -> tuple[str, str]:
    """What was timed, and the system that speed-ups are over."""
    rows, over = content["rows"], content["baseline"] or "serial"
    note = next((row["note"] for row in rows if row["system"] == over and row["note"]), "")
    return f"{rows[0]['model']}, batch {rows[0]['batch_size']:g}", over + f" ({note})" * bool(note)


def headline(found: Comparison) -> str:
    """What the runs found."""
    where, score = f"on {found.dataset} with {found.model}", found.score
    ranked = [(one, row) for one, row in found.ranked() if one.finished and row[score] is not None]
    if not ranked:
        return f"No run {where} has finished yet."
    best, row = next(((one, row) for one, row in ranked if not one.serial), ranked[0])
    ours, runs = points(found, row[score], " %"), f"{row['runs']} run{'s' * (row['runs'] > 1)}"
    text = f"{best.label} reaches {'' if found.by_accuracy else 'a test loss of '}{ours} {where}"
    baseline = next((other for other in found.rows if other["label"] == row["reference"]), None)
    if baseline is None:
        return f"{text}, in {runs}."
    theirs = points(found, baseline[score], " %")
    runs += " each" if row["runs"] == baseline["runs"] else f" against {baseline['runs']}"
    if row["gap_differs"] is None:
        return f"{text}, serial training {theirs}: {runs} cannot tell them apart."
    if not row["gap_differs"]:
        return f"{best.label} is level with serial training {where}: {ours} and {theirs}, {runs}."
    amount, side = points(found, abs(row["gap"]), " points"), "below" if row["gap"] < 0 else "above"
    return f"{text}, {amount} {side} serial training, {runs}."


def notes(found: Comparison) -> list[str]:
    """What a reader of the table must know: of scores, gaps, times and names."""
    rows, runs = found.rows, found.runs
    told = ["Measured on the test set after the last epoch, not at the best one. ± is the sample standard deviation."]
    gaps = [row for row in rows if row["gap"] is not None]
    least = sorted(row["gap_counts_from"] for row in gaps if row["gap_counts_from"] is not None)
    if least:
        amount = " to ".join(dict.fromkeys(points(found, value) for value in (least[0], least[-1])))
        samples = runs[0].summary["test_samples"] if found.by_accuracy else None
        of = [f"of {samples:,.0f} test samples"] if samples else []
        of += ["of the spread over the runs"] * any(row["runs"] > 1 for row in gaps)
        amount += " points" * found.by_accuracy
        rule = f"A gap counts as a difference above two standard errors ({' and '.join(of)}): here {amount}."
        told.append(rule + " Smaller gaps are grey." * any(row["gap_differs"] is False for row in gaps))
    elif gaps:
        told.append("One run each cannot tell whether a gap is more than chance.")
    if any(not run.finished for run in runs):
        told.append("Means are of the runs that finished, where there are any.")
    if found.timed and (places := dict.fromkeys(_place(run) for run in runs if run.devices)):
        told.append(f"Times are measured, on {'; '.join(places)}: medians over the epochs, without evaluation.")
    if any(map(times.takes_turns, runs)):
        told.append("Stages take turns in one process on the CPU: their seconds are no speed-up.")
    if honest(found):
        baselines = dict.fromkeys(row["reference"] for row in rows if row["reference"])
        told.append(f"Baseline of the speed-ups, which are per sample trained: {', '.join(baselines)}.")
    if any((times.trained_share(run) or 1) < 1 for run in runs):
        told.append("In a parallel epoch a stage of Penalty trains on half of the samples, which takes less time.")
    if honest(found) and any(row["unsteady"] for row in rows):
        told.append("Question marks: times of the same work differ by a quarter or more.")
    there = {part for row in rows for part in re.findall(r"[A-Za-z]+", row["label"].partition(",")[0])}
    return [*told, ". ".join(f"{name}: {text}" for name, text in NAMES.items() if name in there) + "."]


def honest(found: Comparison) -> bool:
    """There are speed-ups to show: stages that do not take turns, and serial training to hold them against."""
    return found.timed and any(row["reference"] and not row["takes_turns"] for row in found.rows)


def _place(run: Run) -> str:
    processes, threads = run.summary["processes"] or 1, run.summary["environment"].get("threads")
    if processes > 1:
        return f"{run.devices} in {processes:.0f} processes"
    return f"{run.devices} in one process" + f" of {threads} thread{'s' * (threads != 1)}" * (run.devices == "cpu")


def show(title: str, columns: Sequence[Column], notes: Sequence[str] = ()) -> None:
    """A table on the terminal, numbers to the right."""
    padded = []
    for column in columns:
        texts = [column.title, *(cell.text for cell in column.cells)]
        width = max(map(len, texts))
        padded.append([text.rjust(width) if column.numeric else text.ljust(width) for text in texts])
    lines = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
    say("\n".join([title, *lines, "", *notes, *[""] * bool(notes)]))


def say(text: str) -> None:
    """Print, with question marks for what the terminal's encoding lacks: a dash must not end in a traceback."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _column(
    title: str,
    rows: Sequence[Content],
    key: str,
    show: Show = str,
    note: str = "",
    texts: Sequence[str] = (),
    looks: Sequence[str] = (),
) -> Column:
    """Shows a value of each row, by `show` or by `texts` that were made of the whole row."""
    cells = []
    for n, row in enumerate(rows):
        value = row.get(key)
        text = DASH if value is None else texts[n] if texts else show(value)
        sorted_by = value if isinstance(value, int | float | None) else text.lower()
        cells.append(Cell(text, sorted_by, looks[n] if looks else ""))
    return Column(title, tuple(cells), note)


def _told(columns: Sequence[Column]) -> list[Column]:
    """Those with something to tell."""
    return [column for column in columns if any(cell.key not in (None, "") for cell in column.cells)]


def _spreads(rows: Sequence[Row], key: str, show: Show) -> list[str]:
    deviations = [row[f"{key}_spread"] for row in rows]
    return [show(row[key]) + ("" if d is None else f" ± {show(d)}") for row, d in zip(rows, deviations, strict=True)]


def _quartiles(rows: Sequence[Row], key: str, show: Show) -> list[str]:
    return [f"{show(row[key])} [{show(row[f'{key}_low'])}, {show(row[f'{key}_high'])}]" for row in rows]


def score_name(found: Comparison) -> str:
    return "test accuracy, %" if found.by_accuracy else "test loss"


def points(found: Comparison, value: float | None, unit: str = "") -> str:
    """A score, or a difference of scores; losses have no unit."""
    return f"{percent(value)}{unit}" if found.by_accuracy else loss(value)


def percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def loss(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def signed(value: float, show: Show) -> str:
    text = show(abs(value))
    return text if float(text) == 0 else (MINUS if value < 0 else "+") + text


def memory(value: float) -> str:
    """In GiB as the paper's tables, in smaller units where that would read 0.0."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value < 100 * unit else f"{value / unit:.0f} {name}"
    return f"{value:.0f} B" if value else "0"
