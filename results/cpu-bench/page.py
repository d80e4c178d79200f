"""Make README.md from the recorded JSON files beside this one.

python results/cpu-bench/page.py
"""

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WANTED = {"resnet20": 1.6, "resnet56": 1.8}


def main() -> None:
    found = [json.loads(path.read_text()) for path in sorted(HERE.glob("resnet*-b*[0-9].json"), key=_order)]
    plans = {path.stem.removesuffix("-plan"): json.loads(path.read_text()) for path in HERE.glob("*-plan.json")}
    parts = {
        "environment": environment(found),
        "speeds": speeds(found),
        "times": times(found),
        "checks": checks(found),
        "forecasts": forecasts(found, plans),
        "said": said(found),
        "commands": "\n".join(f"    {bench['command']}" for bench in found),
    }
    text = (HERE / "text.md").read_text()
    for key, value in parts.items():
        text = text.replace(f"{{{key}}}", value)
    (HERE / "README.md").write_text(text)


def environment(found: list[dict[str, Any]]) -> str:
    about = found[0]["environment"]
    rounds = ", ".join(f"{bench['rounds']} rounds of {bench['steps']} steps" for bench in found)
    return (
        f"{about['processor']}, {about['cores']} cores ({about['platform']}), torch {about['torch']}, "
        f"Python {about['python']}, Parlay {about['parlay']}. By column: {rounds}."
    )


def speeds(found: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any]) -> str:
        note = f", {row['note']}" if row["system"].startswith("pipeline") else ""
        return f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]{note}"

    return table(found, cell)


def times(found: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any]) -> str:
        return f"{row['step_ms']:.0f} [{row['step_ms_low']:.0f}, {row['step_ms_high']:.0f}]"

    return table(found, cell)


def table(found: list[dict[str, Any]], cell: Any) -> str:
    names = list(dict.fromkeys(row["system"] for bench in found for row in bench["rows"]))
    lines = ["| | " + " | ".join(map(title, found)) + " |", "|---" * (len(found) + 1) + "|"]
    for name in names:
        rows = [next((row for row in bench["rows"] if row["system"] == name), None) for bench in found]
        lines.append(f"| {name} | " + " | ".join(cell(row) if row else "–" for row in rows) + " |")
    return "\n".join(lines)


def checks(found: list[dict[str, Any]]) -> str:
    """What the method promises, number by number."""
    columns = ("", "speed-up", "wanted", "to stages-alone", "to the best pipeline", "to data-parallel", "stages wait")
    lines = ["| " + " | ".join((*columns, "beyond imbalance")) + " |", "|---" * (len(columns) + 1) + "|"]
    for bench in found:
        rows = {row["system"]: row for row in bench["rows"]}
        ours = rows["layer-parallel"]
        pipelines = [row for name, row in rows.items() if name.startswith("pipeline")]
        fastest = min(pipelines, key=lambda row: row["step_ms"])
        waits = ", ".join(f"{share:.1%}" for share in ours["wait_share"])
        cells = [
            title(bench),
            f"{ours['speedup']:.2f}",
            f"{WANTED[ours['model']]}",
            *(f"{ratio(other, ours):.2f}" for other in (rows["stages-alone"], fastest, rows["data-parallel"])),
            waits,
            f"{ours['wait_share_beyond_imbalance']:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio(other: dict[str, Any], ours: dict[str, Any]) -> float:
    """How many times as fast we are, round by round."""
    return statistics.median(a / b for a, b in zip(other["round_ms"], ours["round_ms"], strict=True))


def forecasts(found: list[dict[str, Any]], plans: dict[str, Any]) -> str:
    lines = [
        "| | forecast, plan by plan | bench | difference of the median |",
        "|---|---|---|---|",
    ]
    for bench in found:
        told = plans.get(name(bench))
        if told is None:
            continue
        ours = next(row for row in bench["rows"] if row["system"] == "layer-parallel")
        values = [one["speedup_parallel_epoch"] for one in told]
        middle = statistics.median(values)
        each = ", ".join(f"{value:.2f}" for value in values)
        lines.append(f"| {title(bench)} | {each} | {ours['speedup']:.2f} | {middle / ours['speedup'] - 1:+.1%} |")
    return "\n".join(lines)


def said(found: list[dict[str, Any]]) -> str:
    sentences = [sentence for bench in found for sentence in bench["says"]]
    return "\n".join(f"- {sentence}" for sentence in sentences) or "- Nothing here is faster than layer-parallel."


def name(bench: dict[str, Any]) -> str:
    return f"{bench['rows'][0]['model']}-b{bench['rows'][0]['batch_size']}"


def title(bench: dict[str, Any]) -> str:
    return f"{bench['rows'][0]['model']}, batch {bench['rows'][0]['batch_size']}"


def _order(path: Path) -> tuple[str, int]:
    model, _, batch = path.stem.rpartition("-b")
    return model, int(batch)


if __name__ == "__main__":
    main()
