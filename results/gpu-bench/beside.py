"""What is recorded beside the benches, as Markdown: stores, shares, NCCL and the GPU tests, each from its own file."""

import re
import statistics
from collections import Counter
from typing import Any

from parlay.reproduce.paper import EXPERIMENTS

Record = dict[str, Any]
WANTED = 1.05
"""Times an epoch with device stores, at most."""
STAGES = (2, 3, 4)


def stores(told: Record) -> str:
    lines = ["| states and multipliers | seconds an epoch, median | each |", "|---|---|---|"]
    for kind, seconds in told["epoch_seconds"].items():
        each = ", ".join(f"{value:.3f}" for value in seconds)
        lines.append(f"| on the {kind} | {statistics.median(seconds):.3f} | {each} |")
    word = "reached" if told["ratio"] <= WANTED else "**not reached**"
    means = statistics.fmean(told["epoch_seconds"]["host"]) / statistics.fmean(told["epoch_seconds"]["device"])
    lines += [
        "",
        f"Host over device: **{told['ratio']:.3f}** by medians; at most {WANTED} was wanted: {word}. "
        f"By means: {means:.3f}. "
        f"States and multipliers take {told['auxiliary_bytes'] / 2**30:.2f} GiB.",
        "",
        f"    {told['command']}",
    ]
    return "\n".join(lines)


def shares(told: Record) -> str:
    """`replay` where it has been timed; records from before it have the augmented Lagrangian alone."""
    rows = {(row["stages"], row.get("method", "al"), row["partition"]): row for row in told["rows"]}
    rows |= {(k, "serial", "serial"): row for (k, _, cut), row in rows.items() if cut == "serial"}
    replayed = any(method == "replay" for _, method, _ in rows)
    columns = [
        *("K", "of the multiprocessors, each", "serial on one share, ms", "AL, even cuts, ms", "**speed-up**"),
        *("AL, cuts by cost, ms", "**speed-up**", *(("replay, cuts by cost, ms", "**speed-up**") if replayed else ())),
        *("the paper's, quoted: AL", "the paper's, quoted: DS-penalty"),
    ]
    kinds = [("al", "even"), ("al", "cost"), *([("replay", "cost")] if replayed else [])]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for stages in STAGES:
        serial = rows.get((stages, "serial", "serial"))
        cells = [str(stages), f"{serial['share']:.0f} %" if serial else "not recorded", _number(serial, "step_ms")]
        cells += [_number(rows.get((stages, *kind)), key) for kind in kinds for key in ("step_ms", "speedup")]
        lines.append("| " + " | ".join([*cells, quoted("al", stages, 1), quoted("penalty", stages, 2)]) + " |")
    cut = [
        f"K = {row['stages']} {row.get('method', 'al')} {row['partition']} {row['cuts']}"
        for row in told["rows"]
        if "cuts" in row
    ]
    return "\n".join([*lines, "", f"Cuts: {'; '.join(cut)}. `{told['command']}`"])


def quoted(method: str, stages: int, downsample: int) -> str:
    """The speed-up that the paper's table 1 prints, if it does."""
    wanted = (method, stages, downsample, "")
    lines = EXPERIMENTS["table1"].lines
    found = [line for line in lines if (line.method, line.stages, line.downsample, line.ratio) == wanted]
    return f"{found[0].quoted.speedup:.2f}" if found else "–"


def nccl(told: Record) -> str:
    where = ", ".join(dict.fromkeys(told["environment"]["devices"]))
    lines = [
        f"{told['processes']} processes ({where}, `{told.get('method', 'al')}`) ended {told['steps']} steps with "
        f"weights that differ by {told['relative_difference']:.1e}, relative to their norm, from those of one process.",
        "",
        *(f"    {command}" for command in told["commands"]),
    ]
    return "\n".join(lines)


def tests(text: str) -> str:
    """Counted by name from the lines that `pytest -rA` ends with, so that a test recorded twice counts once."""
    lines = set(re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+::.*)$", text, re.MULTILINE))
    counts = Counter({"SKIPPED": sum(map(int, re.findall(r"^SKIPPED \[(\d+)\]", text, re.MULTILINE)))})
    counts.update(status for status, _ in lines)
    failed = counts.pop("FAILED", 0) + counts.pop("ERROR", 0)
    told = [f"**{counts.pop('PASSED', 0)} GPU tests passed**, {failed} failed"]
    told += [f"{count} {status.lower()}" for status, count in counts.items() if count]
    return f"{', '.join(told)}: [tests.txt](tests.txt)."


PARTS = {"stores": stores, "shares": shares, "nccl": nccl, "nccl-replay": nccl}
"""By the name of their JSON file."""


def _number(row: Record | None, key: str) -> str:
    return f"{row[key]:.2f}" if row else "–"
