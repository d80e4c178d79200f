"""Tables and figures of this page; run as a program it draws `curves.png`.

python results/detail/page.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
from matplotlib.figure import Figure
from scores import markdown, rows_of, summary

HERE = Path(__file__).parent

METHODS = {"penalty": "DS-P", "al": "DS-AL"}
KINDS = {
    "0.01-default": "rate 0.01",
    "0.01-detail": "rate 0.01, detail 0.3",
    "0.003-default": "rate 0.003",
    "0.003-detail": "rate 0.003, detail 0.3",
}


def loss(method: str, kind: str) -> float:
    return float(summary(records.runs("detail") / f"{method}-{kind}")["test_loss"])


def tables() -> dict[str, str]:
    rows = [(name, *(f"{loss(method, kind):.4f}" for kind in KINDS)) for method, name in METHODS.items()]
    return {"main": markdown(("test loss", *KINDS.values()), rows)}


def figures() -> dict[str, float]:
    told = {}
    for method in METHODS:
        told |= {f"{method}-{kind}": loss(method, kind) for kind in KINDS}
        told[f"{method}-rate-gain"] = loss(method, "0.01-default") - loss(method, "0.003-default")
        for rate in ("0.01", "0.003"):
            told[f"{method}-{rate}-detail-gain"] = loss(method, f"{rate}-default") - loss(method, f"{rate}-detail")
    return told


def main() -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (method, name) in zip(figure.subplots(1, 2, sharey=True), METHODS.items(), strict=True):
        for kind, text in KINDS.items():
            rows = [row for row in rows_of(records.runs("detail") / f"{method}-{kind}") if row["test_loss"] is not None]
            form = {
                "color": "#4c6ef5" if "0.003" in kind else "#e8590c",
                "linestyle": "--" if "detail" in kind else "-",
            }
            points = ([row["epoch"] + 1 for row in rows], [row["test_loss"] for row in rows])
            axes.plot(*points, label=text, marker=".", **form)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set(xlabel="epoch", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.3, which="both")
    figure.axes[0].set_ylabel("test loss (log)")
    figure.axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "curves.png", dpi=100)


if __name__ == "__main__":
    main()
