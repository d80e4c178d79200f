"""Tables and figures of this page; run as a program it draws `accuracy.png`.

python results/adaptive/page.py
"""

import sys
from functools import cache
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
from matplotlib.figure import Figure
from scores import markdown, rows_of, summary

HERE = Path(__file__).parent

METHODS = {"penalty-order-joint": "joint penalty", "penalty": "penalty", "al": "AL"}
SCHEDULES = {
    "parallel": "`parallel`",
    "adaptive-0": "`adaptive:0`",
    "adaptive": "`adaptive`",
    "adaptive-0.2": "`adaptive:0.2`",
    "alternate-4-1": "`alternate:4:1`",
}


@cache
def runs(name: str) -> tuple[list[float], int]:
    """Accuracy of each seed, and how many of their epochs were serial; none where there is no run."""
    folders = sorted(records.runs("adaptive").glob(f"{name}-s?"))
    serial = sum(row["phase"] == "serial" for folder in folders for row in rows_of(folder))
    return [summary(folder)["test_accuracy"] for folder in folders], serial


def cell(name: str, serial_too: bool = True) -> str:
    values, serial = runs(name)
    if not values:
        return ""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" + (f" ({serial})" if serial_too else "")


def tables() -> dict[str, str]:
    rows = [("serial", cell("serial", False), *[""] * (len(SCHEDULES) - 1))]
    for method, name in METHODS.items():
        rows.append((name, *(cell(f"{method}-schedule-{schedule}") for schedule in SCHEDULES)))
    return {"main": markdown(("test % (serial epochs)", *SCHEDULES.values()), rows)}


def figures() -> dict[str, float]:
    found = {f"{method}-{schedule}": f"{method}-schedule-{schedule}" for method in METHODS for schedule in SCHEDULES}
    told: dict[str, float] = {}
    for name, run in {"serial": "serial", **found}.items():
        values, serial = runs(run)
        if values:
            told |= {name: mean(values), f"{name}-spread": stdev(values), f"{name}-serial-epochs": serial}
    return told


def main() -> None:
    figure = Figure(figsize=(8.5, 2.8), layout="constrained")
    for axes, (method, name) in zip(figure.subplots(1, 3, sharey=True), METHODS.items(), strict=True):
        for n, schedule in enumerate(SCHEDULES):
            values, _ = runs(f"{method}-schedule-{schedule}")
            axes.plot([n] * len(values), values, "o", color="#4c6ef5", alpha=0.75)
        axes.axhline(mean(runs("serial")[0]), color="#868e96", linestyle="--", linewidth=1, label="serial, mean")
        axes.set_xticks(
            range(len(SCHEDULES)), [text.strip("`") for text in SCHEDULES.values()], fontsize=7, rotation=30
        )
        axes.set_title(name, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.3)
    figure.axes[0].set_ylabel("test accuracy, %")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(HERE / "accuracy.png", dpi=100)


if __name__ == "__main__":
    main()
