"""Tables, figures and the picture of this page, from the records beside this one.

python results/gpu-bench/page.py      draw speed.png; `python results/pages.py` writes the tables into README.md

A file `MODEL-bBATCH-COMMIT.json` (and `...-penalty-COMMIT.json`) is of that commit. One without a commit is of d9fc585
or earlier: its rows of `al` are from before `--reach`.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
BEFORE = "d9fc585 or earlier"
MAIN = [f"resnet110-b{batch}" for batch in (128, 64, 32)]
EARLIER = ["resnet110-b256", "resnet110-b512", "resnet56-b128", "wrn-40-10-b128"]
NETWORKS = {"resnet110": "ResNet-110", "resnet56": "ResNet-56", "wrn-40-10": "WRN-40-10"}
LABELS = {
    "serial-eager": "serial, eager",
    "serial-graph": "serial, CUDA graph",
    "serial": "serial, compiled CUDA graph",
    "al-graph": "`al`, CUDA graph",
    "al": "`al`, compiled CUDA graph",
    "replay": "`replay`, compiled CUDA graph",
    "penalty-graph": "`penalty`, CUDA graph",
    "penalty": "`penalty`, compiled CUDA graph",
}
COMPILED = ("serial", "al", "replay", "penalty")
WIDE = 0.05
"""Quartiles further from the median than this stand beside it."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Timed:
    """A system at one K: speed-ups are by time per sample trained."""

    step_ms: float
    sample_us: float
    speedup: float
    low: float
    high: float
    per_step: float

    @classmethod
    def read(cls, row: Record) -> "Timed":
        """Records without `samples_per_step` have speed-ups per step, of which a stage of `penalty` trains on half."""
        told = row.get("samples_per_step")
        samples = told or row["batch_size"] * (0.5 if label(row).startswith("penalty") else 1)
        share = samples / row["batch_size"]
        work = 1.0 if told else share
        low, middle, high = (work * row[f"speedup{end}"] for end in ("_low", "", "_high"))
        return cls(row["step_ms"], 1000 * row["step_ms"] / samples, middle, low, high, middle / share)

    @property
    def text(self) -> str:
        if self.per_step > 1.01 * self.speedup:
            return f"{self.speedup:.2f} (per step {self.per_step:.2f})"
        if max(self.high - self.speedup, self.speedup - self.low) > WIDE:
            return f"{self.speedup:.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.speedup:.2f}"


Rows = dict[tuple[str, int], Timed]


def label(row: Record) -> str:
    """`al`, `penalty` or `replay`, with `-graph` where nothing is compiled; serial systems as they are called."""
    return str(row["system"]).replace("layer-parallel", row.get("method", "al"))


def files(problem: str) -> list[Path]:
    """Those with a commit, the plain one of them first; else the one without."""
    found = sorted(HERE.glob(f"{problem}-*.json"), key=lambda path: ("penalty" in path.name, path.name))
    return found or [HERE / f"{problem}.json"]


def commit(problem: str) -> str:
    return files(problem)[0].stem.removeprefix(problem).rpartition("-")[2] or BEFORE


@cache
def recorded(path: Path) -> Record:
    content: Record = json.loads(path.read_text())
    return content


@cache
def rows(*paths: Path) -> Rows:
    found: Rows = {}
    for path in paths:
        for row in recorded(path)["rows"]:
            found.setdefault((label(row), row["stages"]), Timed.read(row))
    return found


def now(problem: str) -> Rows:
    return rows(*files(problem))


def then(problem: str) -> Rows:
    return rows(HERE / f"{problem}.json")


def tables() -> dict[str, str]:
    return {
        "speed": f"ResNet-110, {over(MAIN)}\n\n{table(MAIN, lambda row: row.text)}",
        "time": table(MAIN, lambda row: f"{row.sample_us:.1f} ({row.step_ms:.2f})", COMPILED),
        "moved": told(),
        "earlier": f"Other networks and larger batches, {over(EARLIER)}\n\n{table(EARLIER, lambda row: row.text)}",
        "shares": shares(),
        "seam": seam(),
        "command": f"```\n{recorded(files(MAIN[0])[0])['command']}\n```",
        "made": made(),
    }


def figures() -> dict[str, float]:
    """`resnet110-b128-al-k3` is a speed-up by time per sample trained over the fastest serial step of the same run."""
    found: dict[str, float] = {}
    for problem in (*MAIN, *EARLIER):
        found |= named(problem, now(problem))
        ours = [row.speedup for (system, _), row in now(problem).items() if system == "al"]
        found[f"{problem}-al-least"], found[f"{problem}-al-most"] = min(ours), max(ours)
    for problem in MAIN:
        found |= named(f"{problem}-earlier", then(problem))
    if moved():
        found["moved-least"], found["moved-most"] = min(moved()), max(moved())
    for row in read("shares")["rows"]:
        name = f"shares-{row['method']}-k{row['stages']}" + (f"-{row['partition']}" if "speedup" in row else "")
        found[f"{name}-ms"] = row["step_ms"]
        if "speedup" in row:
            found[name] = row["speedup"]
    for place, seconds in read("stores")["epoch_seconds"].items():
        found[f"stores-{place}-seconds"] = statistics.median(seconds)
    found["stores-ratio"] = found["stores-host-seconds"] / found["stores-device-seconds"]
    found["stores-gib"] = read("stores")["auxiliary_bytes"] / 2**30
    found["nccl-processes"], found["nccl-steps"] = read("nccl")["processes"], read("nccl")["steps"]
    found["nccl-difference"] = read("nccl")["relative_difference"]
    found["seam-serial-ms"] = in_turn()["serial", 1][0]["step_ms"]
    found["seam-most"] = max(abs(later(*pair)[1]) for pair in in_turn().values())
    return {**found, **profile(), **share_norms(), **tests()}


def named(problem: str, given: Rows) -> dict[str, float]:
    found = {}
    for (system, stages), row in given.items():
        name = f"{problem}-{system}" + (f"-k{stages}" if stages > 1 else "")
        found |= {name: row.speedup, f"{name}-low": row.low, f"{name}-high": row.high, f"{name}-per-step": row.per_step}
        found |= {f"{name}-ms": row.step_ms, f"{name}-us": row.sample_us}
    return found


def moved(problems: Sequence[str] = MAIN, *systems: str) -> list[float]:
    """Per cent from the earlier speed-ups to those of the commit, for `al` and `replay`."""
    return [
        100 * (row.speedup / then(problem)[key].speedup - 1)
        for problem in problems
        for key, row in now(problem).items()
        if commit(problem) != BEFORE and key[0] in (systems or ("al", "replay")) and key in then(problem)
    ]


def over(problems: list[str]) -> str:
    commits = ", ".join(dict.fromkeys(map(commit, problems)))
    return (
        f"{commits}: speed-up over the fastest serial step of the same run (the compiled CUDA graph), by time per "
        "sample trained."
    )


def told() -> str:
    """Below the first table: what is of less work per step, and what is new."""
    lines = ["- Medians over the rounds. Quartiles stand in brackets where they are more than 0.05 away."]
    if any(system.startswith("penalty") for problem in MAIN for system, _ in now(problem)):
        lines.append(
            "- A stage of `penalty` (red-black order) trains on half of the batch in a step. Its ratio of step times, "
            "`per step`, is not of the same work."
        )
    if moved():
        title = "Difference from the records before `--reach`, in per cent of those:"
        return "\n".join([*lines, "", title, "", moves()])
    return "\n".join([*lines, "- These were recorded before `--reach` and have not been measured again since."])


def moves() -> str:
    """By batch: how much the serial step and the speed-ups have changed."""
    serial = [(now(problem)["serial", 1], then(problem)["serial", 1]) for problem in MAIN]
    rows = [("serial step, ms", [signed(100 * (new.step_ms / old.step_ms - 1)) for new, old in serial])]
    for system in ("al", "replay"):
        found = [moved([problem], system) for problem in MAIN]
        ends = [f"{signed(min(one))} to {signed(max(one))}" if one else "–" for one in found]
        rows.append((f"speed-up, `{system}`", ends))
    heads = " | ".join(f"batch {problem.rpartition('-b')[2]}" for problem in MAIN)
    lines = [f"| | {heads} |", "|---" + "|--:" * len(MAIN) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)])


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def profile() -> dict[str, float]:
    told = read("profile-k6")
    whole = sum(kind["ms"] for kind in told["kinds"].values())
    shares = {name: 100 * kind["ms"] / whole for name, kind in told["kinds"].items()}
    return {
        "profile-kernels": told["kernels_per_step"],
        "profile-at-once": told["kernels_at_once"],
        "profile-idle": 100 * told["share_idle"],
        "profile-states": shares["states and multipliers"],
        "profile-convolutions": shares["convolutions"],
        "profile-optimiser": shares["optimiser"],
    }


def share_norms() -> dict[str, float]:
    """The largest norm of a gradient with the whole GPU and with a share of it, and how often it is not finite."""
    found: dict[str, float] = {}
    for network, file in (("wrn", "mps-share.txt"), ("resnet110", "mps-share-resnet110.txt")):
        parts = re.split(r"^(?:CUDA|python).*$", (HERE / file).read_text(), flags=re.MULTILINE)[1:]
        for kind, part in zip(("whole", "share"), parts, strict=True):
            norms = [float(norm) for norm in re.findall(r"norm (\S+)", part)]
            finite = [norm for norm in norms if norm == norm]
            found[f"mps-{network}-{kind}-norm"] = max(finite)
            found[f"mps-{network}-{kind}-not-finite"] = len(norms) - len(finite)
            found[f"mps-{network}-{kind}-cases"] = len(norms)
    return found


def tests() -> dict[str, float]:
    told = read("tests")
    return {"tests-passed": told["passed"], "tests-failed": told["failed"]}


def read(name: str) -> Record:
    return recorded(HERE / f"{name}.json")


def title(problem: str) -> str:
    network, _, batch = problem.rpartition("-b")
    return f"{NETWORKS[network]}, batch {batch}"


def table(problems: list[str], cell: Any, systems: tuple[str, ...] = tuple(LABELS)) -> str:
    heads = [title(problem) for problem in problems]
    if problems is MAIN:
        heads = [f"batch {problem.rpartition('-b')[2]}" for problem in problems]
    keys = {key for problem in problems for key in now(problem) if key[0] in systems}
    lines = ["| | K | " + " | ".join(heads) + " |", "|---|--:" + "|--:" * len(problems) + "|"]
    for system, stages in sorted(keys, key=lambda key: (list(LABELS).index(key[0]), key[1])):
        cells = [now(problem).get((system, stages)) for problem in problems]
        texts = [cell(row) if row is not None else "–" for row in cells]
        lines.append(f"| {LABELS[system]} | {stages} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def shares() -> str:
    """Speed-ups over serial training on one share, with the milliseconds of a step."""
    found = {(row["stages"], row["method"], row["partition"]): row for row in read("shares")["rows"]}
    kinds = [("al", "even"), ("al", "cost"), ("replay", "cost")]
    columns = (
        "K",
        "share of the GPU",
        "serial, ms a step",
        "`al`, cut evenly",
        "`al`, cut by cost",
        "`replay`, cut by cost",
    )
    lines = ["| " + " | ".join(columns) + " |", "|--:" * len(columns) + "|"]
    for stages in (2, 3, 4):
        serial = found[stages, "serial", "serial"]
        ours = [found[(stages, *kind)] for kind in kinds]
        cells = [f"{row['speedup']:.2f} ({row['step_ms']:.2f} ms)" for row in ours]
        lines.append(f"| {stages} | {serial['share']:.0f} % | {serial['step_ms']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def in_turn() -> dict[tuple[str, int], tuple[Record, Record]]:
    """The two commits of `seam.json`, by system and K."""
    told = read("seam")
    found = {(row["commit"], row["system"], row["stages"]): row for row in told["rows"]}
    old, new = told["commits"]
    return {(system, k): (row, found[new, system, k]) for (commit, system, k), row in found.items() if commit == old}


def later(old: Record, new: Record) -> tuple[float, float, float]:
    """Per cent that a step takes longer at the later commit: least, median and most of the rounds."""
    ratios = [100 * (b / a - 1) for a, b in zip(old["round_ms"], new["round_ms"], strict=True)]
    return min(ratios), statistics.median(ratios), max(ratios)


def seam() -> str:
    old, new = read("seam")["commits"]
    lines = [
        f"| | K | {old}, ms | {new}, ms | longer by, per cent | speed-up, {old} | {new} |",
        "|---" + "|--:" * 6 + "|",
    ]
    for (system, stages), (before, after) in in_turn().items():
        least, middle, most = later(before, after)
        times = (
            f"{before['step_ms']:.2f} | {after['step_ms']:.2f} | {signed(middle)} ({signed(least)} to {signed(most)})"
        )
        lines.append(f"| {LABELS[system]} | {stages} | {times} | {before['speedup']:.2f} | {after['speedup']:.2f} |")
    return "\n".join(lines)


def made() -> str:
    about = recorded(files(MAIN[0])[0])["environment"]
    groups: dict[str, list[str]] = {}
    for problem in (*MAIN, *EARLIER):
        groups.setdefault(commit(problem), []).append(title(problem))
    commits = ". ".join(f"{name}: {'; '.join(problems)}" for name, problems in groups.items())
    rest = f"{commits}. GPU tests: {read('tests')['commit']}. Shares, stores, profile and NCCL: {BEFORE}."
    return (
        f"One {read('profile-k6')['environment']['devices'][0]} ({about['processor']}); torch {about['torch']}, "
        f"CUDA {about['cuda']}, Python {about['python']}.\n\n"
        + (f"All records: {BEFORE}." if [*groups] == [BEFORE] else rest)
    )


def digest() -> str:
    """Of what the picture shows; it stands in the file, so that one of older records is found."""
    return hashlib.sha256("".join(tables()[name] for name in ("speed", "earlier")).encode()).hexdigest()


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for problem in (*reversed(MAIN), *EARLIER):
        ours = sorted((stages, row) for (system, stages), row in now(problem).items() if system == "al")
        across = [1, *(stages for stages, _ in ours)]
        (line,) = axes.plot(across, [1, *(row.speedup for _, row in ours)], "o-", label=title(problem))
        low, high = ([1, *(getattr(row, end) for _, row in ours)] for end in ("low", "high"))
        axes.fill_between(across, low, high, color=line.get_color(), alpha=0.2)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(xlabel="stages K on one GPU, method al", ylabel="times the fastest serial step", ylim=(0, None))
    figure.legend(loc="outside right center", frameon=False)
    axes.grid(linewidth=0.4)
    return figure


if __name__ == "__main__":
    draw().savefig(HERE / "speed.png", dpi=110, metadata={"Description": digest()})
