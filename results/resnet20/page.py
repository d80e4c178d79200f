"""Make the page of these results from the records alone: README.md, accuracy.png and report.html beside this file.

python results/resnet20/page.py
"""

import sys
from pathlib import Path

from run import COMMON, RUNS

from parlay import report

sys.path.insert(0, str(Path(__file__).parents[1]))
import scores

HERE = Path(__file__).parent
ROWS = {
    # name: what stands in the table, and whether the run sees augmented images in its serial epochs
    "serial-no-da": ("serial, no augmentation", False),
    "serial-no-da-wd-1e-3": ("serial, no augmentation, weight decay 1e-3", False),
    "serial-no-da-lr-0.2": ("serial, no augmentation, lr 0.2", False),
    "al": ("AL", False),
    "al-wd-1e-3": ("AL, weight decay 1e-3", False),
    "al-lr-0.2": ("AL, lr 0.2", False),
    "penalty": ("penalty, red-black", False),
    "al-r2": ("DS-AL, r = 2, detail 1", False),
    "al-r2-wd-1e-3-detail-0.3": ("DS-AL, r = 2, weight decay 1e-3", False),
    "al-r2-wd-1e-3-detail-0.1": ("DS-AL, r = 2, detail 0.1, weight decay 1e-3", False),
    "al-r2-wd-1e-3": ("DS-AL, r = 2, detail 1, weight decay 1e-3", False),
    "al-r2-lr-0.2": ("DS-AL, r = 2, detail 1, lr 0.2", False),
    "penalty-r2": ("DS-penalty, red-black, r = 2, detail 1", False),
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
    "al-r2-alternate": ("DS-SPH-AL, r = 2, detail 1, alternate:4:1", True),
    "al-r2-alternate-wd-1e-3-detail-0.3": ("DS-SPH-AL, r = 2, alternate:4:1, weight decay 1e-3", True),
    "al-r2-alternate-wd-1e-3": ("DS-SPH-AL, r = 2, detail 1, alternate:4:1, weight decay 1e-3", True),
    "al-r2-alternate-lr-0.2": ("DS-SPH-AL, r = 2, detail 1, alternate:4:1, lr 0.2", True),
    "al-r2-alternate-detail-0": ("DS-SPH-AL, r = 2, detail 0, alternate:4:1", True),
}
COLOURS = {False: "#4c6ef5", True: "#e8590c"}


def main() -> None:
    found = scores.read({name: RUNS[name] for name in ROWS}, HERE / "runs")
    (HERE / "README.md").write_text((HERE / "text.md").read_text().replace("{table}", table(found)))
    drawn = [(ROWS[name][0], COLOURS[ROWS[name][1]], row) for name, row in found.items()]
    title = "blue: no augmentation, but for the first epoch where it is said; orange: in all serial epochs"
    scores.draw(drawn, (67, 93), title).savefig(HERE / "accuracy.png", dpi=150)
    every = [folder for row in found.values() for folder in row.folders]
    report.write(every, HERE / "report.html", "ResNet-20 on CIFAR-10: the paper's methods at K = 3", beside=True)


def table(found: dict[str, scores.Row]) -> str:
    lines = ["| | test % | seeds | mean | states and multipliers | flags |", "|---|---|---|---|---|---|"]
    for name, row in found.items():
        memory = max((run.auxiliary_bytes or 0 for run in row.there), default=0) / 2**30
        kept = f"{memory:.2f} GiB" if memory else "–"
        mean = scores.number(row.mean)
        lines.append(f"| {ROWS[name][0]} | {row.each} | {row.seeds} | {mean} | {kept} | `{row.flags}` |")
    return "\n".join([*lines, "", f"Common to all: `parlay train {COMMON}`."])


if __name__ == "__main__":
    main()
