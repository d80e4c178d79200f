"""What came out at home, held against the recorded table. In: two tables. Out: lines that say where they differ."""

import math

from home_records import Cell, Table
from home_rows import PROBLEMS, ROWS

ERRORS = 3.0
IMAGES = {"digits": 360, "mnist": 10_000}
"""Of the test sets: no accuracy is finer than one of them."""
RULE = (
    f"An accuracy differs where the means are apart by more than {ERRORS:g} standard errors of their difference and by "
    "more than one test image; a speed-up, where the ranges between quartiles do not meet."
)


def compare(home: Table, recorded: Table) -> list[str]:
    scores = [key for key in recorded.cells if key in home.cells]
    speeds = [
        (problem, row["system"])
        for problem, told in recorded.times.items()
        for row in told["rows"]
        if home.timed(problem, row["system"]) and row["speedup"] is not None
    ]
    lines = ["", "Against the recorded table (" + "; ".join(recorded.environments()) + "):", RULE]
    lines += _told("accuracies", len(scores), [text for key in scores if (text := _accuracy(key, home, recorded))])
    kept = [key for key in scores if home.cells[key].kept != recorded.cells[key].kept]
    lines += _told("numbers of bytes", len(scores), [_bytes(key, home, recorded) for key in kept])
    if not scores:
        lines.append("An accuracy counts when all rows of its problem have been run with its seed.")
    return lines + _told("speed-ups", len(speeds), [text for key in speeds if (text := _speed(key, home, recorded))])


def _told(what: str, count: int, differing: list[str]) -> list[str]:
    if not count:
        return [f"{what}: nothing to compare yet"]
    if not differing:
        return [f"{what}: none of {count} differs"]
    return [f"{what}: {len(differing)} of {count} differ"] + [f"  {text}" for text in differing]


def _accuracy(key: tuple[str, str], home: Table, recorded: Table) -> str | None:
    ours, theirs = home.cells[key], recorded.cells[key]
    problem, row = key
    told = f"{PROBLEMS[problem].title}, {ROWS[row].title}: {described(ours)} here, {described(theirs)} recorded"
    if ours.mean is None or theirs.mean is None:
        return told if (ours.mean is None) != (theirs.mean is None) else None
    spread = math.hypot(ours.error or 0.0, theirs.error or 0.0)
    image = 100 / IMAGES[PROBLEMS[problem].dataset]
    gap = abs(ours.mean - theirs.mean)
    return told if gap > ERRORS * spread and gap > image * (1 + 1e-6) else None


def described(cell: Cell) -> str:
    if cell.mean is None:
        return f"{len(cell.lost)} of {len(cell.lost) + len(cell.scores)} runs diverged"
    return f"{cell.mean:.2f} %" if cell.error is None else f"{cell.mean:.2f} ± {cell.error:.2f} %"


def _bytes(key: tuple[str, str], home: Table, recorded: Table) -> str:
    name = f"{PROBLEMS[key[0]].title}, {ROWS[key[1]].title}"
    return f"{name}: {home.cells[key].kept:,} here, {recorded.cells[key].kept:,} recorded"


def _speed(key: tuple[str, str], home: Table, recorded: Table) -> str | None:
    ours, theirs = home.timed(*key), recorded.timed(*key)
    assert ours is not None
    assert theirs is not None
    if ours["speedup_low"] <= theirs["speedup_high"] and theirs["speedup_low"] <= ours["speedup_high"]:
        return None
    texts = [f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" for row in (ours, theirs)]
    name = ROWS[key[1]].title if key[1] in ROWS else key[1]
    return f"{PROBLEMS[key[0]].title}, {name}: {texts[0]} here, {texts[1]} recorded"
