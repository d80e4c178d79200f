"""Make the page of these results from the records alone: README.md, accuracy.png and report.html beside this file.

python results/resnet20/page.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from run import COMMON, RUNS

from parlay import report

HERE = Path(__file__).parent
ROWS = {
    # name: what stands in the table
    "serial-no-da": ("serial, no augmentation", "plain"),
    "serial-da": ("serial, crops and flips", "augmented"),
    "al": ("AL", "plain"),
    "al-r2": ("DS-AL, r = 2", "plain"),
    "penalty": ("penalty, red-black", "plain"),
    "penalty-r2": ("DS-penalty, red-black, r = 2", "plain"),
    "penalty-joint": ("penalty, the paper's order, β = 100, τ = 0.3, clipped", "plain"),
    "al-alternate": ("SPH-AL, alternate:4:1", "augmented"),
    "al-r2-alternate": ("DS-SPH-AL, r = 2, alternate:4:1", "augmented"),
    "penalty-alternate": ("SPH-penalty, red-black, alternate:4:1", "augmented"),
    "al-clip1": ("AL, gradients clipped at 1", "plain"),
    "al-beta-5-to-1": ("AL, β from 5 to 1", "plain"),
    "al-clip1-alternate": ("SPH-AL, alternate:4:1, clipped at 1", "augmented"),
    "al-beta-5-to-1-alternate": ("SPH-AL, alternate:4:1, β from 5 to 1", "augmented"),
}
COLOURS = {"plain": "#4c6ef5", "augmented": "#e8590c"}


def main() -> None:
    folders = {name: sorted((HERE / "runs").glob(f"{name}-s[0-9]*")) for name in ROWS}
    found = {name: [row for folder in runs for row in report.table([folder])] for name, runs in folders.items() if runs}
    (HERE / "README.md").write_text((HERE / "text.md").read_text().replace("{table}", table(found)))
    draw({name: [row["test_accuracy"] for row in rows] for name, rows in found.items()}).savefig(
        HERE / "accuracy.png", dpi=150
    )
    every = [folder for runs in folders.values() for folder in runs]
    report.write(every, HERE / "report.html", "ResNet-20 on CIFAR-10: the paper's methods at K = 3")


def table(found: dict[str, list[dict[str, object]]]) -> str:
    lines = ["| | test %, each seed | mean | states and multipliers | flags |", "|---|---|---|---|---|"]
    for name, rows in found.items():
        scores = [float(str(row["test_accuracy"])) for row in rows]
        memory = float(str(rows[0]["auxiliary_bytes"])) / 2**30
        kept = f"{memory:.2f} GiB" if memory else "–"
        each = ", ".join(f"{score:.2f}" for score in scores)
        mean = sum(scores) / len(scores)
        lines.append(f"| {ROWS[name][0]} | {each} | {mean:.2f} | {kept} | `{RUNS[name][0]}` |")
    return "\n".join([*lines, "", f"Common to all: `parlay train {COMMON}`, and `--seed 0`, `--seed 1`."])


def draw(scores: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(8, 0.34 * len(scores) + 1), layout="constrained")
    axes = figure.add_subplot()
    for y, (name, values) in enumerate(reversed(scores.items())):
        colour = COLOURS[ROWS[name][1]]
        axes.barh(y, sum(values) / len(values), color=colour, height=0.62)
        axes.plot(values, [y] * len(values), "o", color="black", markersize=3)
        axes.text(71.2, y, ROWS[name][0], va="center", color="white", fontsize=8)
    axes.set(xlim=(71, 92), yticks=[], xlabel="test accuracy, % (bars: mean, dots: seeds)")
    axes.set_title("ResNet-20, CIFAR-10, 30 epochs, K = 3; orange: with augmentation", fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
