"""Tables and figures of this page; run as a program it draws `accuracy.png`.

python results/digits-hybrid/page.py
"""

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
import scores

HERE = Path(__file__).parent

_TABLE = runpy.run_path(str(HERE / "run.py"))
COMMON, RUNS = _TABLE["COMMON"], _TABLE["RUNS"]
MAIN = {
    "serial": "serial",
    "al-parallel": "AL, `parallel`",
    "al-alternate": "AL, `alternate:4:1`",
    "ds-parallel": "DS-AL, `parallel`",
    "ds-alternate": "DS-AL, `alternate:4:1`",
    "ds-alternate-constant": "DS-AL, `alternate:4:1`, constant rate",
    "ds-tail": "DS-AL, `tail:4:1`",
    "ds-tail-1-hold": "DS-AL, `tail:14:1`, `hold`",
    "ds-tail-2-hold": "DS-AL, `tail:13:2`, `hold`",
    "ds-tail-hold-0.3": "DS-AL, `tail:4:1`, `hold:0.3`",
    "ds-tail-hold": "DS-AL, `tail:4:1`, `hold`",
}
OTHER = {
    "ds-alternate": "as it was",
    "detail-1": "`--detail 1`",
    "reach-1000": "`--reach 1000`",
    "lr-0.03": "`--lr 0.03`",
    "decay-0": "`--weight-decay 0`",
    "batch-64": "`--batch-size 64` *",
}
FILTERED = ("ds-parallel", "ds-alternate", "ds-tail-hold")


@cache
def found() -> dict[str, scores.Row]:
    return scores.read(RUNS, records.runs("digits-hybrid"))


def five(name: str) -> scores.Row:
    """The first five seeds, which all rows have."""
    row = found()[name]
    return scores.Row(row.flags, {seed: row.runs[seed] for seed in range(5)}, row.folders)


def filtered() -> dict[str, dict[str, dict[str, float]]]:
    return json.loads((records.runs("digits-hybrid") / "filtered.json").read_text())


def tables() -> dict[str, str]:
    return {"main": table(MAIN), "other": table(OTHER), "filtered": filter_table()}


def table(rows: dict[str, str]) -> str:
    lines = []
    for name, label in rows.items():
        row = five(name)
        gap = None if name == "serial" else row.minus(five("serial-batch-64" if name == "batch-64" else "serial"))
        lines.append((label, row.cell, scores.number(gap, "+.2f"), f"{min(row.scores.values()):.2f}"))
    return scores.markdown(("", "test %", "to serial", "lowest"), lines)


def filter_table() -> str:
    lines = []
    for name in FILTERED:
        cells = [mean(name, how, what) for how in ("as is", "filtered") for what in ("test_accuracy", "train_loss")]
        lines.append((MAIN[name], *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (2, 3, 2, 3), strict=True))))
    return scores.markdown(("", "test %", "training loss", "with the filter: test %", "training loss"), lines)


def mean(name: str, how: str, what: str) -> float:
    return fmean(filtered()[f"{name}-s{seed}"][how][what] for seed in range(5))


def figures() -> dict[str, float]:
    told: dict[str, float] = {}
    for name in RUNS:
        row = five(name)
        told |= row.figures(name)
        told[f"{name}-lowest"] = min(row.scores.values())
        gap = row.minus(five("serial")) or 0.0
        told |= {f"{name}-to-serial": gap, f"{name}-below-serial": -gap}
    for name in ("serial", "ds-tail-hold"):
        told[f"{name}-ten"] = found()[name].mean or 0.0
        told[f"{name}-ten-lowest"] = min(found()[name].scores.values())
    curves = [scores.rows_of(folder) for folder in five("ds-alternate").folders]
    for word, epoch in {"before": 9, "after": 13}.items():  # the last parallel phase lies between
        told[f"ds-alternate-loss-{word}"] = fmean(curve[epoch]["train_loss"] for curve in curves)
    for name in FILTERED:
        told |= {f"{name}-filtered": mean(name, "filtered", "test_accuracy")}
        told |= {f"{name}-loss-{how.replace(' ', '-')}": mean(name, how, "train_loss") for how in ("as is", "filtered")}
    return told


def main() -> None:
    drawn = [
        (label.replace("`", ""), "#e8590c" if name.startswith("ds-") else "#4c6ef5", five(name))
        for name, label in MAIN.items()
    ]
    scores.draw(drawn, (94.5, 100), "blue: whole states; orange: downsampled").savefig(HERE / "accuracy.png", dpi=80)


if __name__ == "__main__":
    main()
