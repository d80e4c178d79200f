"""What the GPU does in a recorded step: kernels by kind, lanes, and the time in which nothing runs.

    python results/gpu-bench/profile_step.py [--stages 6] [--out FOLDER]

ResNet-110, batch 128, augmented Lagrangian, blocks compiled, one CUDA graph per step, cut by cost. Writes
`profile-kK.json`: all from the kernels that torch.profiler has seen on the GPU in some steps, beside the time of a step
without the profiler.
"""

import argparse
import gzip
import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from parlay.bench.cuda import EngineSystem
from parlay.config.recipe import Recipe
from parlay.run import records

HERE = Path(__file__).parent
STEPS = 10
KINDS = {
    # kind: parts of kernel names, first match wins
    "convolutions": ("conv", "cudnn", "cutlass", "xmma", "implicit", "wgrad", "dgrad", "gemm", "nvjet"),
    "optimiser": ("fused_sgd", "FusedSgd", "multi_tensor_apply"),
    "states and multipliers": ("index", "gather", "scatter"),
    "batch norm, ReLU, additions (compiled)": ("triton",),
    "copies and fills": ("Memcpy", "Memset", "copy", "fill", "FillFunctor"),
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--stages", type=int, default=6)
    ask.add_argument("--out", type=Path, default=HERE)
    given = ask.parse_args()
    recipe = Recipe(
        dataset="cifar10",
        model="resnet110",
        stages=given.stages,
        partition="cost",
        schedule="parallel" if given.stages > 1 else "serial",
        store_dtype="bfloat16",
        device="cuda",
        compile="on",
    )
    system = EngineSystem("layer-parallel", recipe, f"K = {given.stages}")
    quiet = [system.time(40) / 40 for _ in range(5)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        system.time(STEPS)
    trace = given.out / f"profile-k{given.stages}.trace.json.gz"
    seen.export_chrome_trace(str(trace))
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    told = {
        "stages": given.stages,
        "cuts": system.extra()["cuts"],
        "steps": STEPS,
        "step_ms": 1000 * statistics.median(quiet),
        **seen_on_the_gpu(events),
        "environment": records.environment([torch.cuda.get_device_name()]),
    }
    records.write_json(given.out / f"profile-k{given.stages}.json", told)
    print(json.dumps({key: value for key, value in told.items() if key not in ("environment", "names")}, indent=1))


def seen_on_the_gpu(events: list[dict[str, Any]]) -> dict[str, Any]:
    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: float(e["ts"])
    )
    launches = [e for e in events if e.get("name") == "cudaGraphLaunch"]
    names: dict[str, float] = defaultdict(float)
    lanes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        names[kernel["name"][:90]] += kernel["dur"]
        lanes[kernel["args"].get("stream")].append(kernel)
    together = union(kernels)
    span = max(k["ts"] + k["dur"] for k in kernels) - kernels[0]["ts"]
    return {
        "kernels_per_step": len(kernels) / STEPS,
        "graph_launches": len(launches),
        "span_ms_per_step": span / STEPS / 1000,
        "something_runs_ms_per_step": together / STEPS / 1000,
        "share_idle": 1 - together / span,
        "kernels_at_once": sum(k["dur"] for k in kernels) / together,
        "kinds": told(kernels),
        "lanes": [
            {
                "stream": stream,
                "kernels": len(own) / STEPS,
                "busy_ms_per_step": union(own) / STEPS / 1000,
                "median_gap_us": statistics.median(gaps(own)) if len(own) > 1 else None,
                "kinds": told(own),
            }
            for stream, own in sorted(lanes.items(), key=lambda item: -len(item[1]))
        ],
        "names": dict(sorted(((n, t / STEPS / 1000) for n, t in names.items()), key=lambda item: -item[1])[:40]),
    }


def told(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels and milliseconds of a step, by kind, the dearest first."""
    busy: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        busy[kind(kernel["name"])].append(kernel["dur"])
    dearest = sorted(busy.items(), key=lambda item: -sum(item[1]))
    return {name: {"kernels": len(own) / STEPS, "ms": sum(own) / STEPS / 1000} for name, own in dearest}


def kind(name: str) -> str:
    if name.startswith("triton"):  # the compiler's names tell what it has fused
        if "convolution2d" in name or "mm" in name.split("_"):
            return "convolutions"
        if any(part in name for part in ("index", "linalg", "pow_sub")):  # gather, scatter, violation, local loss
            return "states and multipliers"
    for found, parts in KINDS.items():
        if any(part in name for part in parts):
            return found
    return "others"


def union(kernels: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for kernel in kernels:
        begin, until = float(kernel["ts"]), float(kernel["ts"]) + float(kernel["dur"])
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def gaps(kernels: list[dict[str, Any]]) -> list[float]:
    """Microseconds from the end of one kernel of a lane to the beginning of the next."""
    return [b["ts"] - a["ts"] - a["dur"] for a, b in itertools.pairwise(kernels)]


if __name__ == "__main__":
    main()
