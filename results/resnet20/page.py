"""Tables and figures of this page; run as a program it draws `accuracy.png`.

python results/resnet20/page.py
"""

import runpy
import shlex
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
import scores

HERE = Path(__file__).parent

_TABLE = runpy.run_path(str(HERE / "run.py"))
COMMON, RUNS = _TABLE["COMMON"], _TABLE["RUNS"]
DECAY = "weight decay 1e-3"
MAIN = {
    # name: what stands in the table, and whether the run sees augmented images in its serial epochs
    "serial-no-da": ("serial", False),
    "serial-no-da-wd-1e-3": (f"serial, {DECAY}", False),
    "penalty": ("penalty", False),
    "al": ("AL", False),
    "al-wd-1e-3": (f"AL, {DECAY}", False),
    "al-r2-wd-1e-3-detail-0.3": (f"DS-AL, {DECAY}", False),
    "serial-da": ("serial, augmented", True),
    "penalty-alternate": ("SPH-P", True),
    "al-alternate": ("SPH-AL", True),
    "al-alternate-wd-1e-3": (f"SPH-AL, {DECAY}", True),
    "al-r2-alternate-wd-1e-3-detail-0.3": (f"DS-SPH-AL, {DECAY}", True),
}
OTHER = {
    "serial-no-da-lr-0.2": ("serial, rate 0.2", False),
    "al-lr-0.2": ("AL, rate 0.2", False),
    "al-lr-0.2-warmup-2": ("AL, rate 0.2, warm-up of 2 epochs", False),
    "al-wd-2e-3": ("AL, weight decay 2e-3", False),
    "al-beta-2": ("AL, β = 2", False),
    "al-beta-4": ("AL, β = 4", False),
    "al-beta-3-to-1": ("AL, β from 3 to 1", False),
    "al-shrink-1.2": ("AL, adjoints × 1.2", False),
    "al-shrink-1.5-clip-1": ("AL, adjoints × 1.5, clip 1", False),
    "al-r2": ("DS-AL, detail 1", False),
    "al-r2-wd-1e-3": (f"DS-AL, detail 1, {DECAY}", False),
    "al-r2-wd-1e-3-detail-0.1": (f"DS-AL, detail 0.1, {DECAY}", False),
    "al-r2-lr-0.2": ("DS-AL, detail 1, rate 0.2", False),
    "al-r2-detail-0": ("DS-AL, detail 0 *", False),
    "penalty-r2": ("DS-P, detail 1", False),
    "penalty-r2-detail-0": ("DS-P, detail 0 *", False),
    "penalty-joint": ("penalty, joint order *", False),
    "al-alternate-lr-0.2": ("SPH-AL, rate 0.2", True),
    "al-r2-alternate": ("DS-SPH-AL, detail 1", True),
    "al-r2-alternate-wd-1e-3": (f"DS-SPH-AL, detail 1, {DECAY}", True),
    "al-r2-alternate-lr-0.2": ("DS-SPH-AL, detail 1, rate 0.2", True),
    "al-r2-alternate-detail-0": ("DS-SPH-AL, detail 0", True),
}
ROWS = MAIN | OTHER
COLOURS = {False: "#4c6ef5", True: "#e8590c"}
HEAD = ("", "test %", "to serial", "seeds", "states, GiB")


@cache
def found() -> dict[str, scores.Row]:
    return scores.read({name: RUNS[name] for name in ROWS}, records.runs("resnet20"))


def to_serial(name: str) -> float | None:
    """Points above serial training with the same augmentation, rate and weight decay; None where there is none."""
    keys = {"--lr", "--weight-decay"}

    def setting(flags: str) -> dict[str, str]:
        words = shlex.split(flags)
        return {word: words[n + 1] for n, word in enumerate(words) if word in keys}

    row, augmented = found()[name], ROWS[name][1]
    references = ["serial-da"] if augmented else [other for other in ROWS if other.startswith("serial-no-da")]
    same = (found()[other].mean for other in references if setting(RUNS[other][0]) == setting(RUNS[name][0]))
    reference = next(same, None)
    return None if row.mean is None or reference is None or name.startswith("serial") else row.mean - reference


def tables() -> dict[str, str]:
    return {"main": table(MAIN), "other": table(OTHER)}


def table(rows: dict[str, tuple[str, bool]]) -> str:
    lines = []
    for name, (label, _) in rows.items():
        row = found()[name]
        kept = f"{row.memory / 2**30:.2f}" if row.memory else "–"
        lines.append((label, row.cell, scores.number(to_serial(name), "+.2f"), str(len(row.runs)), kept))
    return scores.markdown(HEAD, lines)


def figures() -> dict[str, float]:
    told: dict[str, float] = {}
    for name, row in found().items():
        told |= row.figures(name)
        told |= {f"{name}-train-loss": run.epochs[-1]["train_loss"] or 0.0 for run in row.there[:1] if run.epochs}
        told |= {f"{name}-last-loss": run.epochs[-1]["losses"][-1] or 0.0 for run in row.there[:1] if run.finished}
        if row.memory:
            told[f"{name}-memory"] = row.memory / 2**30
        if (gap := to_serial(name)) is not None:
            told[f"{name}-to-serial"] = gap
    told["al-runs-least"] = min(found()["al"].scores.values())
    told["al-runs-most"] = max(found()["al"].scores.values())
    return told


def main() -> None:
    drawn = [(label, COLOURS[augmented], found()[name]) for name, (label, augmented) in ROWS.items()]
    title = "blue: no augmentation (*: in the first epoch); orange: augmentation in serial epochs"
    scores.draw(drawn, (67, 93), title).savefig(HERE / "accuracy.png", dpi=80)


if __name__ == "__main__":
    main()
