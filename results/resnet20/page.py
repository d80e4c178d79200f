"""Make the page of these results from the records alone: README.md, accuracy.png and report.html beside this file.

python results/resnet20/page.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from run import COMMON, RUNS

from parlay import report

HERE = Path(__file__).parent
ROWS = {
    # name: what stands in the table, and whether the run sees augmented images in its serial epochs
    "serial-no-da": ("serial, no augmentation", False),
    "serial-no-da-lr-0.2": ("serial, no augmentation, lr 0.2", False),
    "al": ("AL", False),
    "al-wd-1e-3": ("AL, weight decay 1e-3", False),
    "al-lr-0.2": ("AL, lr 0.2", False),
    "penalty": ("penalty, red-black", False),
    "al-r2": ("DS-AL, r = 2", False),
    "al-r2-wd-1e-3": ("DS-AL, r = 2, weight decay 1e-3", False),
    "al-r2-lr-0.2": ("DS-AL, r = 2, lr 0.2", False),
    "penalty-r2": ("DS-penalty, red-black, r = 2", False),
    "al-r2-detail-0": ("DS-AL, r = 2, detail 0 (first epoch augmented)", False),
    "penalty-r2-detail-0": ("DS-penalty, r = 2, detail 0 (first epoch augmented)", False),
    "penalty-joint": ("penalty, joint order, α = 0.4 (first epoch augmented)", False),
    "al-lr-0.2-warmup-2": ("AL, lr 0.2, rising over 2 epochs", False),
    "al-wd-2e-3": ("AL, weight decay 2e-3", False),
    "al-beta-2": ("AL, β = 2", False),
    "al-beta-4": ("AL, β = 4", False),
    "al-beta-3-to-1": ("AL, β from 3 to 1", False),
    "al-shrink-1.2": ("AL, adjoints times 1.2", False),
    "al-shrink-1.5-clip-1": ("AL, adjoints times 1.5, gradients clipped at 1", False),
    "serial-da": ("serial, crops and flips", True),
    "al-alternate": ("SPH-AL, alternate:4:1", True),
    "al-alternate-wd-1e-3": ("SPH-AL, alternate:4:1, weight decay 1e-3", True),
    "al-alternate-lr-0.2": ("SPH-AL, alternate:4:1, lr 0.2", True),
    "penalty-alternate": ("SPH-penalty, red-black, alternate:4:1", True),
    "al-r2-alternate": ("DS-SPH-AL, r = 2, alternate:4:1", True),
    "al-r2-alternate-wd-1e-3": ("DS-SPH-AL, r = 2, alternate:4:1, weight decay 1e-3", True),
    "al-r2-alternate-lr-0.2": ("DS-SPH-AL, r = 2, alternate:4:1, lr 0.2", True),
    "al-r2-alternate-detail-0": ("DS-SPH-AL, r = 2, detail 0, alternate:4:1", True),
}
COLOURS = {False: "#4c6ef5", True: "#e8590c"}


def main() -> None:
    folders = {name: sorted((HERE / "runs").glob(f"{name}-s[0-9]*")) for name in ROWS}
    folders = {name: [run for run in runs if _seed(run) in RUNS[name][1]] for name, runs in folders.items()}
    found = {name: [row for folder in runs for row in report.table([folder])] for name, runs in folders.items() if runs}
    (HERE / "README.md").write_text((HERE / "text.md").read_text().replace("{table}", table(found)))
    scores = {name: [r["test_accuracy"] for r in rows if r["status"] == "finished"] for name, rows in found.items()}
    draw(scores).savefig(HERE / "accuracy.png", dpi=150)
    every = [folder for runs in folders.values() for folder in runs]
    report.write(every, HERE / "report.html", "ResNet-20 on CIFAR-10: the paper's methods at K = 3")


def _seed(folder: Path) -> int:
    return int(folder.name.rpartition("-s")[2])


def table(found: dict[str, list[dict[str, object]]]) -> str:
    lines = ["| | test % | seeds | mean | states and multipliers | flags |", "|---|---|---|---|---|---|"]
    for name, rows in found.items():
        ended = [float(str(row["test_accuracy"])) if row["status"] == "finished" else None for row in rows]
        scores = [score for score in ended if score is not None]
        memory = float(str(rows[0]["auxiliary_bytes"])) / 2**30
        kept = f"{memory:.2f} GiB" if memory else "–"
        seeds = ", ".join(map(str, RUNS[name][1]))
        each = ", ".join(f"{score:.2f}" if score is not None else "diverged" for score in ended)
        mean = f"{sum(scores) / len(scores):.2f}" if len(scores) == len(ended) else "–"
        lines.append(f"| {ROWS[name][0]} | {each} | {seeds} | {mean} | {kept} | `{RUNS[name][0]}` |")
    return "\n".join([*lines, "", f"Common to all: `parlay train {COMMON}`."])


def draw(scores: dict[str, list[float]]) -> Figure:
    """Every seed a dot, every mean a bar mark; accuracy does not start at zero, so no bars."""
    figure = Figure(figsize=(8, 0.3 * len(scores) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for y, (name, values) in enumerate(reversed(scores.items())):
        colour, mean = COLOURS[ROWS[name][1]], sum(values) / len(values)
        axes.plot(values, [y] * len(values), "o", color=colour, markersize=6, alpha=0.75)
        axes.plot([mean], [y], "|", color="black", markersize=13)
        axes.text(max(values) + 0.45, y, f"{mean:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(scores)), [ROWS[name][0] for name in reversed(scores)], fontsize=9)
    axes.set(xlim=(67, 93), xlabel="test accuracy, % (dots: seeds, marks: means)")
    title = "blue: no augmentation, but for the first epoch where it is said; orange: in all serial epochs"
    figure.suptitle(title, fontsize=9)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


if __name__ == "__main__":
    main()
