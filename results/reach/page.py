"""Tables and figures of this page; run as a program it draws `violation.png`.

python results/reach/page.py
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
from matplotlib.figure import Figure
from scores import markdown, rows_of, summary, violations

HERE = Path(__file__).parent

WIDE = {
    # label: the run without, of those in paper/results, and the run with
    "AL": ("wrn-cosine-al-k3-s0", "al-k3-s0"),
    "DS-AL": ("wrn-cosine-ds-al-k3-s0", "ds-al-k3-s0"),
    "SPH-AL, 1:4": ("wrn-hold-0.3-sph-al-k3-1to4-s0", "sph-al-k3-1to4-s0"),
}
SMALL = {
    # name of the runs, with {} for which: label
    "wrn-{}": "WRN-10-2, β = 0.5",
    "resnet8-small-beta-{}": "ResNet-8, β = 0.3",
    "resnet8-{}": "ResNet-8, β = 3",
    "resnet14-{}-s0": "ResNet-14, β = 3, seed 0",
    "resnet14-{}-s1": "ResNet-14, β = 3, seed 1",
}


def folders() -> dict[str, tuple[Path, Path]]:
    """Of each row the run without the limit, and the one with it."""
    paper, reach = records.runs("paper"), records.runs("reach")
    wide = {label: (paper / "before" / a, paper / "runs/cifar100" / b) for label, (a, b) in WIDE.items()}
    return wide | {text: (reach / name.format("without"), reach / name.format("with")) for name, text in SMALL.items()}


def ended(folder: Path) -> str:
    found = summary(folder)
    return "diverged" if found["status"] == "diverged" else f"{found['test_accuracy']:.2f}"


def most(folder: Path) -> str:
    return ", ".join(f"{one:.2f}" for one in violations(folder))


def tables() -> dict[str, str]:
    head = ("", "test %, without", "test %, with", "largest violations, without", "largest violations, with")
    rows = {label: (label, *map(ended, both), *map(most, both)) for label, both in folders().items()}
    return {
        "wide": markdown(head, [rows[label] for label in WIDE]),
        "small": markdown(head, [rows[label] for label in SMALL.values()]),
    }


def figures() -> dict[str, float]:
    told: dict[str, float] = {}
    names = {"AL": "wide-al", "DS-AL": "wide-ds-al", "SPH-AL, 1:4": "wide-sph-al"}
    names |= {text: name.replace("-{}", "") for name, text in SMALL.items()}
    for label, both in folders().items():
        for kind, folder in zip(("without", "with"), both, strict=True):
            at = f"{names[label]}-{kind}"
            if summary(folder)["status"] != "diverged":
                told[at] = summary(folder)["test_accuracy"]
            told |= {f"{at}-violation-{k}": value for k, value in enumerate(violations(folder), 1)}
    told["resnet14-bound-s0"] = summary(records.runs("reach") / "resnet14-bound-s0")["test_accuracy"]
    for model, ratios in json.loads((records.runs("reach") / "time.json").read_text()).items():
        told |= {f"time-{model}": statistics.median(ratios)}
        told |= {f"time-{model}-least": min(ratios), f"time-{model}-most": max(ratios)}
    return told


def main() -> None:
    figure = Figure(figsize=(8.5, 2.8), layout="constrained")
    for axes, label in zip(figure.subplots(1, 3, sharey=True), WIDE, strict=True):
        for folder, colour, name in zip(folders()[label], ("#e8590c", "#2f9e44"), ("without", "with"), strict=True):
            rows = [row for row in rows_of(folder) if row["violation"]]
            for k, form in enumerate(("-", "--")):
                points = ([row["epoch"] + 1 for row in rows], [row["violation"][k] for row in rows])
                axes.plot(*points, form, color=colour, label=f"{name}, link {k + 1}")
        axes.set_title(f"{label}, WRN-40-10", fontsize=9, loc="left")
        axes.set(xlabel="epoch", xlim=(1, 20))
        axes.set_xticks((1, 5, 10, 15, 20))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.3)
    figure.axes[0].set_ylabel("violation, ‖λ − x‖ / ‖x‖")
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(HERE / "violation.png", dpi=100)


if __name__ == "__main__":
    main()
