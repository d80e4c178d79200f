"""The final weights of short runs, as one hash a run: what a change of the code must leave as it is, bit for bit.

    python tests/weights/record.py             say which runs end with other weights than tests/weights/weights.json
    python tests/weights/record.py --write     record them (only where a fault is mended, and the commit says so)
    python tests/weights/record.py al-tail     these runs alone

Run on one thread, with instructions that every x86 processor has, so that the sums round the same on all of them.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "weights.json"
SAME_EVERYWHERE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}

DIGITS = "--model resnet8 --dataset digits --train-samples 300 --batch-size 64 --device cpu --stages 3 --epochs 3"
TINY = (
    "--model resnet14 --dataset synthetic --synthetic-shape 1,8,8 --synthetic-samples 97 --batch-size 32 --device cpu"
)
TWO = f"{TINY} --engine distributed --stages 2 --serial-phase sequential"

RUNS = {
    "al-parallel": f"{DIGITS} --method al --schedule parallel",
    "al-alternate-augmented": f"{DIGITS} --method al --schedule alternate:2:1 --epochs 4 --augment random",
    "al-tail": f"{DIGITS} --method al --schedule tail:2:1 --lr-schedule hold --epochs 5",
    "al-downsampled": f"{DIGITS} --method al --schedule parallel --downsample 2",
    "al-bfloat16-store": f"{DIGITS} --method al --schedule parallel --store-dtype bfloat16",
    "al-file-store": f"{DIGITS} --method al --schedule parallel --store file",
    "al-clipped": f"{DIGITS} --method al --schedule alternate:2:1 --clip 0.5",
    "al-adam": f"{DIGITS} --method al --schedule parallel --optimizer adam --lr 0.003",
    "al-uncut": f"{DIGITS} --method al --schedule parallel --stages 1",
    "al-last-batch-of-one": f"{TINY} --method al --schedule alternate:2:1 --stages 3 --epochs 4",
    "penalty-parallel": f"{DIGITS} --method penalty --schedule parallel",
    "penalty-hybrid": f"{DIGITS} --method penalty --schedule alternate:2:1 --epochs 4 --augment random",
    "penalty-downsampled": f"{DIGITS} --method penalty --schedule parallel --downsample 2",
    "penalty-odd-batch": f"{TINY} --method penalty --schedule parallel --stages 3 --epochs 4 --batch-size 15",
    "replay-k2": f"{DIGITS} --method replay --schedule parallel --stages 2",
    "replay-k3": f"{DIGITS} --method replay --schedule parallel",
    "replay-hybrid-augmented": f"{DIGITS} --method replay --schedule alternate:2:1 --epochs 4 --augment random",
    "replay-predicted": f"{DIGITS} --method replay --schedule parallel --predict 0.5",
    "replay-bfloat16": f"{DIGITS} --method replay --schedule parallel --precision bfloat16",
    "replay-fewer-batches-than-lag": f"{TINY} --method replay --schedule parallel --stages 6 --epochs 2",
    "delayed": f"{DIGITS} --method delayed --schedule parallel",
    "delayed-corrected": f"{DIGITS} --method delayed --schedule alternate:2:1 --epochs 4 --predict 0.5 --accumulate 2",
    "local": f"{DIGITS} --method local --schedule parallel",
    "serial": f"{DIGITS} --method serial --augment random",
    "adaptive": f"{DIGITS} --method al --schedule adaptive --epochs 4",
    "vae": f"{TINY} --model resnet-vae --method al --schedule tail:1:1 --optimizer adam --lr 0.003 --epochs 3",
    "two-al": f"{TWO} --method al --schedule alternate:2:1 --epochs 4",
    "two-al-downsampled": f"{TWO} --method al --schedule parallel --downsample 2 --epochs 3",
    "two-al-bfloat16-store": f"{TWO} --method al --schedule parallel --store-dtype bfloat16 --epochs 3",
    "two-penalty": f"{TWO} --method penalty --schedule alternate:2:1 --epochs 4",
    "two-replay": f"{TWO} --method replay --schedule parallel --epochs 3",
    "two-replay-hybrid": f"{TWO} --method replay --schedule alternate:2:1 --epochs 4 --augment random",
    "two-delayed": f"{TWO} --method delayed --schedule parallel --epochs 3",
    "two-local": f"{TWO} --method local --schedule parallel --epochs 3",
    "four-al": f"{TWO} --method al --schedule alternate:2:1 --epochs 3 --replicas 2",
    "four-penalty": f"{TWO} --method penalty --schedule parallel --epochs 3 --replicas 2",
    "resumed-al": f"{DIGITS} --method al --schedule alternate:2:1 --epochs 4 --augment random",
    "resumed-replay": f"{DIGITS} --method replay --schedule parallel",
}
STOPPED_AT = 8
"""The step at which the runs called resumed are interrupted, to go on from their checkpoint."""


def final_weights(name: str, out: Path) -> str:
    """Trains, and hashes what plain PyTorch would load: names, types, shapes and bytes."""
    from safetensors import safe_open

    words = RUNS[name].split()
    if name.startswith("resumed-"):
        _interrupted(words, out)
        words = ["--resume"]
    _parlay("train", *words, "--out", str(out))
    made = hashlib.sha256()
    with safe_open(out / "model.safetensors", "pt") as content:
        for key in sorted(content.keys()):
            value = content.get_tensor(key)
            made.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            made.update(value.contiguous().numpy().tobytes())
    return made.hexdigest()[:32]


def _interrupted(words: list[str], out: Path) -> None:
    """Ended by SIGTERM after a few steps, as a person or a cluster would."""
    import os
    import signal

    from parlay.engine.engine import Engine

    real, steps = Engine.parallel_step, []

    def stopping(self: object, *given: object, **named: object) -> object:
        steps.append(1)
        if len(steps) == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *given, **named)  # type: ignore[arg-type]

    Engine.parallel_step = stopping  # type: ignore[method-assign,assignment]
    try:
        _parlay("train", *words, "--out", str(out), ends=1)
    finally:
        Engine.parallel_step = real  # type: ignore[method-assign]


def _parlay(*words: str, ends: int = 0) -> None:
    from parlay.cli import main

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main(list(words))
    if code != ends:
        raise SystemExit(f"parlay {' '.join(words)} ended with {code}:\n{told.getvalue()}")


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    if any(os.environ.get(key) != value for key, value in SAME_EVERYWHERE.items()):  # read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SAME_EVERYWHERE})
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found, other = dict(recorded), []
    for name in given.runs or RUNS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = final_weights(name, Path(folder) / "run")
        same = found[name] == recorded.get(name)
        print(f"{name:<32} {found[name]}  {'as recorded' if same else 'OTHER'}  {time.monotonic() - began:.1f} s")
        other += [] if same else [name]
    if given.write:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
