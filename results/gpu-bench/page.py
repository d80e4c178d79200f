"""Make README.md and speed.png from the recorded JSON files beside this one.

python results/gpu-bench/page.py
"""

import json
from pathlib import Path
from typing import Any

import beside
from matplotlib.figure import Figure
from record import BENCHES

HERE = Path(__file__).parent
TESTS = "tests.txt"
NOT_YET = "Not recorded yet."
Bench = dict[str, Any]
PROFILE = """\
ResNet-110, batch 128, K = {stages} (cuts {cuts}), {steps} steps under torch.profiler: {kernels:.0f} kernels a step,
launched by one CUDA graph; {kernels_at_once:.1f} run at once on average; for {idle:.1f} % of the time none runs. A step
takes {step_ms:.2f} ms without the profiler, {span_ms_per_step:.2f} ms with it. Kernel times by kind (they overlap, so
they add up to more than the step):

| kind | kernels a step | ms | share |
|---|---|---|---|
{kinds}

What Parlay adds to the network's own work (gather, local loss, update and scatter of states and multipliers) is
{added:.1f} % of all kernel time, and {own:.2f} of the {busiest:.2f} ms in which the busiest lane has a kernel running.
The step is bound by what the GPU gets through, not by the longest lane; the weight gradients of narrow convolutions are
the dearest part."""


def main() -> None:
    found = {name: json.loads((HERE / f"{name}.json").read_text()) for name in BENCHES if recorded(name)}
    profile = json.loads((HERE / "profile-k6.json").read_text())
    other = {name: json.loads((HERE / f"{name}.json").read_text()) for name in beside.PARTS if recorded(name)}
    parts = {
        "gpu": profile["environment"]["devices"][0],
        "environment": environments([profile, *found.values(), *other.values()]),
        "pays": "\n".join(map(pays, found.values())),
        "speeds": table(
            found, lambda row: f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        ),
        "times": table(
            found, lambda row: f"{row['step_ms']:.2f} [{row['step_ms_low']:.2f}, {row['step_ms_high']:.2f}]"
        ),
        "profile": profiled(profile),
        **{name: make(other[name]) if name in other else NOT_YET for name, make in beside.PARTS.items()},
        "tests": beside.tests((HERE / TESTS).read_text()) if (HERE / TESTS).exists() else NOT_YET,
        "commands": "\n".join(f"    {bench['command']}" for bench in found.values()),
        "missing": missing(found),
    }
    text = (HERE / "text.md").read_text()
    for key, value in parts.items():
        text = text.replace(f"{{{key}}}", value)
    (HERE / "README.md").write_text(text)
    draw(found).savefig(HERE / "speed.png", dpi=150)


def recorded(name: str) -> bool:
    return (HERE / f"{name}.json").exists()


def title(bench: Bench) -> str:
    row = bench["rows"][0]
    return f"{row['model']}, batch {row['batch_size']}"


def environments(records: list[Bench]) -> str:
    """All there are: records of several versions say so."""
    names = ("torch", "CUDA", "Python", "Parlay")
    told = [", ".join(f"{name} {record['environment'][name.lower()]}" for name in names) for record in records]
    return "; ".join(dict.fromkeys(told))


def pays(bench: Bench) -> str:
    """The best number of stages, and whether it is worth it."""
    serial = min((row for row in bench["rows"] if row["stages"] == 1), key=lambda row: row["step_ms"])
    ours = [row for row in bench["rows"] if row["system"].startswith("layer-parallel")]
    best = max(ours, key=lambda row: row["speedup"])
    slower = [f"K = {row['stages']}" for row in ours if row["system"] == best["system"] and row["speedup"] < 1]
    word = "slower: train serially" if best["speedup"] < 1 else "faster"
    told = (
        f"- **{title(bench)}: {word}.** Best is `{best['system']}` at K = {best['stages']}: "
        f"{best['speedup']:.2f} [{best['speedup_low']:.2f}, {best['speedup_high']:.2f}] times the fastest serial step "
        f"(`{serial['system']}`, {serial['step_ms']:.2f} ms)."
    )
    return told + (f" Slower at {', '.join(slower)}." if slower and word == "faster" else "")


def table(found: dict[str, Bench], cell: Any) -> str:
    keys = list(dict.fromkeys((row["system"], row["stages"]) for bench in found.values() for row in bench["rows"]))
    lines = ["| | K | " + " | ".join(map(title, found.values())) + " |", "|---" * (len(found) + 2) + "|"]
    for system, stages in keys:
        rows = [
            next((row for row in bench["rows"] if (row["system"], row["stages"]) == (system, stages)), None)
            for bench in found.values()
        ]
        lines.append(f"| {system} | {stages} | " + " | ".join(cell(row) if row else "–" for row in rows) + " |")
    return "\n".join(lines)


def profiled(profile: Bench) -> str:
    kinds, whole = profile["kinds"], sum(kind["ms"] for kind in profile["kinds"].values())
    longest = max(profile["lanes"], key=lambda lane: lane["busy_ms_per_step"])
    numbers = {
        **{key: profile[key] for key in ("stages", "steps", "step_ms", "span_ms_per_step", "kernels_at_once")},
        "cuts": ", ".join(map(str, profile["cuts"])),
        "kernels": profile["kernels_per_step"],
        "idle": 100 * profile["share_idle"],
        "kinds": "\n".join(
            f"| {name} | {kind['kernels']:.0f} | {kind['ms']:.2f} | {100 * kind['ms'] / whole:.1f} % |"
            for name, kind in kinds.items()
        ),
        "added": 100 * kinds["states and multipliers"]["ms"] / whole,
        "own": longest["kinds"].get("states and multipliers", {"ms": 0.0})["ms"],
        "busiest": longest["busy_ms_per_step"],
    }
    return PROFILE.format(**numbers)


def missing(found: dict[str, Bench]) -> str:
    left = [name for name in BENCHES if name not in found]
    left += [f"{name}.json" for name in beside.PARTS if not recorded(name)]
    left += [TESTS] * (not (HERE / TESTS).exists())
    return ", ".join(left) + "." if left else "Nothing."


def draw(found: dict[str, Bench]) -> Figure:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for bench in found.values():
        rows = [row for row in bench["rows"] if row["system"] == "layer-parallel"]
        line = axes.plot(
            [1] + [r["stages"] for r in rows], [1] + [r["speedup"] for r in rows], "o-", label=title(bench)
        )
        low, high = ([r[f"speedup_{end}"] for r in rows] for end in ("low", "high"))
        axes.fill_between([r["stages"] for r in rows], low, high, color=line[0].get_color(), alpha=0.2)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(xlabel="stages K, side by side on one GPU", ylabel="times the fastest serial step", ylim=(0, None))
    figure.legend(loc="outside right center", frameon=False)
    axes.grid(linewidth=0.4)
    return figure


if __name__ == "__main__":
    main()
