"""Tables and figures of this page; run as a program it draws `curves.png`.

python results/tail/page.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
from matplotlib.figure import Figure
from scores import markdown, rows_of

HERE = Path(__file__).parent

METHODS = {"penalty": "penalty", "al": "AL"}
RATES = {"cosine": "cosine", "hold": "`hold`", "low": "`hold` at 0.03", "jump": "`hold:0.3`"}
BEFORE, FIRST, LAST = 15, 16, 19
"""Epochs from 0: the last of the parallel phase, and the first and last of the serial tail."""
COLOURS = {"cosine": "#868e96", "hold": "#2f9e44", "low": "#4c6ef5", "jump": "#e8590c"}


def accuracies(method: str, rate: str) -> list[float]:
    return [row["test_accuracy"] for row in rows_of(records.runs("tail") / f"{method}-{rate}")]


def tables() -> dict[str, str]:
    rows = []
    for method, name in METHODS.items():
        for rate, text in RATES.items():
            found = accuracies(method, rate)
            rows.append((f"{name}, {text}", *(f"{found[epoch]:.2f}" for epoch in (BEFORE, FIRST, LAST))))
    return {"main": markdown(("test %", "before the tail", "after its first epoch", "at the end"), rows)}


def figures() -> dict[str, float]:
    told = {}
    for method in METHODS:
        for rate in RATES:
            found = accuracies(method, rate)
            told |= {f"{method}-{rate}": found[LAST], f"{method}-{rate}-before": found[BEFORE]}
            told |= {f"{method}-{rate}-first": found[FIRST], f"{method}-{rate}-drop": found[FIRST] - found[BEFORE]}
            told[f"{method}-{rate}-to-cosine"] = found[LAST] - accuracies(method, "cosine")[LAST]
    return {**told, "penalty-no-tail": accuracies("penalty", "no-tail")[LAST]}


def main() -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (method, name) in zip(figure.subplots(1, 2, sharey=True), METHODS.items(), strict=True):
        for rate, text in RATES.items():
            found = accuracies(method, rate)
            axes.plot(range(1, len(found) + 1), found, color=COLOURS[rate], label=text.replace("`", ""), linewidth=1.2)
        axes.axvspan(BEFORE + 1.5, LAST + 1, color="#f1f3f5")
        axes.set_title(f"{name} (grey: serial epochs)", fontsize=9, loc="left")
        axes.set(xlabel="epoch", ylim=(35, 78))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.3)
    figure.axes[0].set_ylabel("test accuracy, %")
    figure.axes[1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(HERE / "curves.png", dpi=100)


if __name__ == "__main__":
    main()
