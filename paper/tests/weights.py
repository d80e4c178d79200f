"""The final weights of short runs with the methods of this package, as tests/weights/record.py has them of Parlay's.

python paper/tests/weights.py             say which runs end with other weights than paper/tests/weights.json
python paper/tests/weights.py --write     record them
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "weights"), str(HERE.parents[1] / "src"), str(HERE.parent / "src")]

import record  # type: ignore[import-not-found]  # noqa: E402

from parlay.launch import supervise  # noqa: E402
from parlay_paper import methods  # noqa: E402

DIGITS, TWO = record.DIGITS, record.TWO
LONG = "--schedule parallel --epochs 4"
HYBRID = "--schedule alternate:2:1 --epochs 4 --augment random"
RUNS = {
    "joint": f"{DIGITS} --method joint-penalty --schedule parallel",
    "joint-half-steps": f"{DIGITS} --method joint-penalty --state-step 0.4 --trust 0.3 {LONG} --downsample 2",
    "joint-printed": f"{DIGITS} --method joint-penalty --form mean --state-rate 0.1 --beta 30 --schedule parallel",
    "printed-al": f"{DIGITS} --method printed-al --multiplier-step 0.1 --schedule parallel",
    "hestenes-half": f"{DIGITS} --method printed-al --multiplier hestenes --multiplier-step 0.5 {LONG}",
    "dni": f"{DIGITS} --method dni --schedule parallel",
    "dni-k2-untold": f"{DIGITS} --method dni --stages 2 --condition none --schedule parallel --downsample 2",
    "dni-hybrid-augmented": f"{DIGITS} --method dni {HYBRID}",
    "dni-bfloat16": f"{DIGITS} --method dni --schedule parallel --precision bfloat16",
    "auxnet": f"{DIGITS} --method auxnet --schedule parallel",
    "auxnet-hybrid-augmented": f"{DIGITS} --method auxnet --stages 2 {HYBRID} --downsample 2",
    "auxnet-bfloat16": f"{DIGITS} --method auxnet --schedule parallel --precision bfloat16",
    "auxnet-fewer-batches-than-lag": f"{record.TINY} --method auxnet --schedule parallel --stages 6 --epochs 2",
    "two-joint": f"{TWO} --method joint-penalty --schedule parallel --epochs 3",
    "two-printed-al": f"{TWO} --method printed-al --multiplier-step 0.1 {LONG}",
    "two-dni": f"{TWO} --method dni {HYBRID}",
    "two-auxnet": f"{TWO} --method auxnet {HYBRID}",
    "resumed-dni": f"{DIGITS} --method dni --schedule parallel --augment random",
    "resumed-auxnet": f"{DIGITS} --method auxnet --schedule parallel --augment random",
}


def main() -> int:
    """What stands in `record` are the runs and the file of this package."""
    methods.register()
    supervise.PROGRAM = (sys.executable, "-m", "parlay_paper")  # whose processes know them too
    record.RUNS, record.RECORDED = RUNS, HERE / "weights.json"
    return int(record.main())


if __name__ == "__main__":
    sys.exit(main())
