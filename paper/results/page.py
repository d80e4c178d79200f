"""Tables and figures of this page; run as a program it draws the pictures of accuracy against speed-up.

    python paper/results/page.py

A stage of `penalty` computes half of a batch in a step of the red-black order. With S serial and P parallel epochs a
run's stages so see (S + P/2) / (S + P) of the samples of as many serial epochs, and its speed-up per sample trained is
the speed-up per epoch times that share.
"""

import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "results"))
import records
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scores import markdown, number, rows_of, summary, violations

HERE = Path(__file__).parent

TABLES = {
    "table1": "table1",
    "table2": "table2",
    "table3": "table3",
    "table4": "short/table4",
    "table5": "table5",
    "figure4": "short/figure4",
    "figure5": "short/figure5",
}
RATIOS = ("1to4", "2to3", "3to2", "4to1")
KINDS = ("sph-penalty", "sph-al", "ds-sph-penalty", "ds-sph-al")
NAMES = {"penalty": "P", "al": "AL"}
MEASURED, PROJECTED = "measured", "projected"


@dataclass(frozen=True)
class Line:
    """A row of one of the paper's tables, from its `reproduction.json` and its runs."""

    row: dict[str, Any]
    folders: tuple[Path, ...]
    loss: bool

    @property
    def name(self) -> str:
        return str(self.row["row"])

    @property
    def serial(self) -> bool:
        return bool(self.row["method"] == "serial")

    @property
    def label(self) -> str:
        """As the paper writes it."""
        text = str(self.row["label"]).removesuffix(" (not in the paper)").replace("(K=", "(K = ")
        return text.replace("w/o DA", "without augmentation").replace("with DA", "with augmentation")

    @property
    def value(self) -> float:
        return float(self.row["value"])

    @property
    def score(self) -> str:
        """As a cell."""
        spread = f" ± {self.row['spread']:.2f}" if self.row["spread"] is not None else ""
        return f"{self.value:.4f}" if self.loss else f"{self.value:.2f}{spread}"

    @property
    def share(self) -> float:
        """Of the samples of as many serial epochs, how many each stage is trained on."""
        phases = [row["phase"] for row in rows_of(self.folders[0])]
        half = 0.5 if self.row["method"] == "penalty" else 1.0
        return sum(half if phase == "parallel" else 1.0 for phase in phases) / len(phases)

    def speedup(self, kind: str) -> float | None:
        """Per epoch."""
        found = self.row[f"speedup_{kind}"]
        return 1.0 if self.serial else None if found is None else float(found)

    def per_sample(self, kind: str) -> float | None:
        """Per sample trained."""
        speedup = self.speedup(kind)
        return None if speedup is None else speedup * self.share


@cache
def lines(table: str) -> dict[str, Line]:
    at = records.runs("paper") / TABLES[table]
    content = json.loads((at / "reproduction.json").read_text())
    loss = content["metric"] == "test_loss"
    found = [Line(row, tuple(at / one for one in row["folders"]), loss) for row in content["rows"]]
    return {line.name: line for line in found}


def reference(table: str) -> Line:
    """Serial training, with augmentation where there is any."""
    return lines(table).get("serial-da") or lines(table)["serial"]


@cache
def stopped(table: str) -> list[tuple[float, float]]:
    """Serial training with augmentation, stopped early: (all epochs / epochs until then, accuracy), falling."""
    rows = rows_of(reference(table).folders[0])
    return [(len(rows) / (row["epoch"] + 1), row["test_accuracy"]) for row in rows if row["test_accuracy"] is not None]


def over_stopped(table: str, line: Line, kind: str) -> float | None:
    """Points above serial training that was stopped after as many epochs as the speed-up leaves; linear between."""
    x = line.speedup(kind)
    if x is None or line.loss or line.serial:
        return None
    if x <= 1:
        return line.value - reference(table).value
    for (more, low), (less, high) in pairwise(stopped(table)):
        if less <= x <= more:
            return line.value - (high + (low - high) * (x - less) / (more - less))
    return None


def tables() -> dict[str, str]:
    plain = [line for line in lines("figure5").values() if not line.row["ratio"]]
    return {
        **{name: accuracy(name, list(lines(name).values())) for name in ("table1", "table2", "table5")},
        **{name: ratios(name) for name in ("table3", "table4")},
        **{f"{name}-speed": speed(name) for name in TABLES if name.startswith("table")},
        "figure4": copies(),
        "figure5": accuracy("figure5", plain),
    }


def accuracy(table: str, shown: list[Line]) -> str:
    rows = []
    for line in shown:
        gap = None if line is reference(table) else line.value - reference(table).value
        kept = line.row["memory_gib"]
        quoted = line.row["paper_value"]
        form, quote = ("+.4f", ".3f") if line.loss else ("+.2f", ".2f")
        rows.append(
            (
                line.label,
                line.score,
                number(gap, form),
                "–" if kept is None else f"{kept:.2f}",
                number(quoted, quote),
                number(line.row["paper_memory"]),
            )
        )
    score = "test loss" if reference(table).loss else "test %"
    return markdown(("", score, "to serial", "memory, GiB", f"paper: {score}", "paper: memory, GiB"), rows)


def speed(table: str) -> str:
    kinds = (MEASURED, PROJECTED)
    rows = []
    for line in lines(table).values():
        if line.name == "serial-no-da":
            continue
        cells = [number(of(kind)) for kind in kinds for of in (line.speedup, line.per_sample)]
        quoted = "–" if line.serial else number(line.row["paper_speedup"])
        rows.append((line.label.removesuffix(" with augmentation"), *cells, quoted))
    ours = [f"{kind}, per {what}" for kind in kinds for what in ("epoch", "sample trained")]
    return markdown(("", *ours, "paper, per epoch"), rows)


def kind_label(kind: str) -> str:
    return f"{kind.rpartition('-')[0].upper()}-{NAMES[kind.rpartition('-')[2]]}"


def ratios(table: str) -> str:
    rows = []
    for kind in KINDS:
        found = [lines(table)[f"{kind}-k3-{ratio}"] for ratio in RATIOS]
        quoted = [f"{line.row['paper_value']:.2f}" for line in found]
        rows.append((kind_label(kind), *(line.score for line in found), *quoted))
    shown = [ratio.replace("to", ":") for ratio in RATIOS]
    return markdown(("serial : parallel", *shown, *(f"paper, {ratio}" for ratio in shown)), rows)


def copies() -> str:
    found = lines("figure4")
    ends = ("no-da", "da1", "da2", "da4", "da")
    parallel = [found["al-k3"], *(found[f"al-k3-{end}"] for end in ends[1:4])]
    return markdown(
        ("copies of an image", "0", "1", "2", "4", "random changes"),
        (
            ("serial", *(found[f"serial-{end}"].score for end in ends)),
            ("AL, K = 3", *(line.score for line in parallel), ""),
            ("replay, K = 3", "", "", "", "", found["replay-k3"].score),
            ("states of AL, 50,000 images, GiB", *(f"{line.row['formula_gib']:.2f}" for line in parallel), ""),
        ),
    )


def figures() -> dict[str, float]:
    told: dict[str, float | None] = {}
    for table in TABLES:
        for name, line in lines(table).items():
            at, row = f"{table}-{name}", line.row
            told |= {at: line.value, f"{at}-spread": row["spread"], f"{at}-seeds": row["seeds"]}
            told |= {f"{at}-paper": row["paper_value"], f"{at}-speedup-paper": row["paper_speedup"]}
            told |= {f"{at}-memory": row["memory_gib"], f"{at}-memory-paper": row["paper_memory"]}
            told |= {f"{at}-s{n}": value for n, value in enumerate(row["values"])}
            if line is not reference(table):
                told[f"{at}-to-serial"] = line.value - reference(table).value
            for kind in (MEASURED, PROJECTED):
                told |= {f"{at}-speedup-{kind}": line.speedup(kind), f"{at}-per-sample-{kind}": line.per_sample(kind)}
                told[f"{at}-over-stopped-{kind}"] = over_stopped(table, line, kind)
            told |= _violation(at, line.folders[0])
        quoted = [line.row["paper_speedup"] for line in lines(table).values() if line.row["ratio"]]
        told[f"{table}-hybrids-speedup-paper-best"] = max((one for one in quoted if one is not None), default=None)
        told |= _ranges(table) | _pairs(table)
    for at in sorted((records.runs("paper") / "before").iterdir()):
        if at.is_dir():
            end = summary(at) or rows_of(at)[-1]
            lost = end.get("status") == "diverged"
            scores = (end["test_accuracy"], end["test_loss"])
            told[f"before-{at.name}"] = None if lost else next((one for one in scores if one is not None), None)
            told |= _violation(f"before-{at.name}", at)
    judged = json.loads((records.runs("paper") / "before/judged.json").read_text())
    told |= {f"before-judged-{name}-{how.replace(' ', '-')}": v for name, by in judged.items() for how, v in by.items()}
    return {key: value for key, value in told.items() if value is not None}


def _violation(name: str, folder: Path) -> dict[str, float]:
    """The largest of each interface in any epoch, and those of the last parallel epoch."""
    last = next((row["violation"] for row in reversed(rows_of(folder)) if row["violation"]), [])
    told = {f"{name}-violation-most-{k}": value for k, value in enumerate(violations(folder), 1)}
    return told | {f"{name}-violation-{k}": value for k, value in enumerate(last, 1)}


def _ranges(table: str) -> dict[str, float]:
    """How far hybrids and plain rows are from serial training, stopped early or not: least and most."""
    told = {}
    groups = {"hybrids": True, "plain": False}
    for group, hybrid in groups.items():
        own = [line for line in lines(table).values() if not line.serial and not line.row["ours"]]
        own = [line for line in own if bool(line.row["ratio"]) == hybrid]
        gaps = {"to-serial": [line.value - reference(table).value for line in own]}
        for kind in (MEASURED, PROJECTED):
            gaps[f"over-stopped-{kind}"] = [
                over for line in own if (over := over_stopped(table, line, kind)) is not None
            ]
        for what, values in gaps.items():
            if values:
                told |= {f"{table}-{group}-{what}-least": min(values), f"{table}-{group}-{what}-most": max(values)}
    return told


def _pairs(table: str) -> dict[str, float]:
    """Least and most of what a hybrid is above its plain row, DS above the row without it, AL above penalty."""
    found, told = lines(table), {}
    others = {
        "sph-gain": lambda name: name.replace("sph-", "").removesuffix("-1to4") if "sph-" in name else "",
        "ds-gain": lambda name: name.removeprefix("ds-") if name.startswith("ds-") else "",
        "al-over-penalty": lambda name: re.sub(r"\bal\b", "penalty", name),
    }
    for what, other in others.items():
        own = [name for name in found if other(name) not in ("", name) and other(name) in found]
        gains = [found[name].value - found[other(name)].value for name in own]
        told |= {f"{table}-{what}-{name}": gain for name, gain in zip(own, gains, strict=True)}
        if gains:
            told |= {f"{table}-{what}-least": min(gains), f"{table}-{what}-most": max(gains)}
    return told


COLOURS = {"serial": "#444444", "penalty": "#1c7ed6", "al": "#e8590c", "replay": "#2f9e44"}
MARKS = {(1, False): "o", (2, False): "s", (1, True): "^", (2, True): "D"}
"""By downsampling, and whether it is a hybrid."""


def draw(table: str) -> Figure:
    """Accuracy against speed-up, measured to the left and projected to the right; penalty rows are hollow."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, table, MEASURED, "measured, all stages on one GPU")
    _panel(right, table, PROJECTED, "projected, a GPU for each stage")
    left.set_ylabel("test accuracy, %")
    right.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.supxlabel("time of serial training / time of this run, same number of epochs", fontsize=9)
    return figure


def _panel(axes: Axes, table: str, kind: str, title: str) -> None:
    found = [line for line in lines(table).values() if not line.serial and line.speedup(kind) is not None]
    by_ratio = len({line.row["ratio"] for line in found if line.row["ratio"]}) > 1
    for family in dict.fromkeys(
        (line.row["method"], line.row["downsample"], bool(line.row["ratio"])) for line in found
    ):
        own = [one for one in found if (one.row["method"], one.row["downsample"], bool(one.row["ratio"])) == family]
        points = sorted((line.speedup(kind) or 0.0, line.value) for line in own)
        half = family[0] == "penalty"
        label = own[0].label.partition(" (")[0] + ("; stages see fewer samples" if half else "")
        face = "white" if half else COLOURS[family[0]]
        form = {"color": COLOURS[family[0]], "markerfacecolor": face, "markersize": 5, "linewidth": 0.5}
        axes.plot(*zip(*points, strict=True), f"{MARKS[family[1:]]}-", label=label, **form)
        for line in own:
            if by_ratio and line.row["ratio"] not in ("1:4", None):
                continue  # the others follow in order, and lie close together
            text = line.row["ratio"] if by_ratio and line.row["ratio"] else f"K={line.row['stages']}"
            at, below = (line.speedup(kind) or 0.0, line.value), family[1] > 1
            axes.annotate(text, at, (-18, -9) if below else (4, 3), textcoords="offset points", fontsize=6)
    until = 1.05 * max(line.speedup(kind) or 0.0 for line in found)
    curve = [point for point in stopped(table) if point[0] <= until]
    axes.plot(*zip(*curve, strict=True), "--", color=COLOURS["serial"], linewidth=1, label="serial, stopped early")
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    for table in ("table1", "table2", "table3", "figure5"):
        draw(table).savefig(HERE / f"{table}.png", dpi=100)


if __name__ == "__main__":
    main()
