"""What a captured step asks of the device: launches, copies and waits, counted by the rehearsal.

    python tests/weights/counts.py           say which methods ask for more than tests/weights/counts.json has
    python tests/weights/counts.py --write   record them

Counted over 64 captured steps, so that a look at the losses every so many steps has its share.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
RECORDED = HERE / "counts.json"
STEPS, ROWS = 64, 8


def methods() -> dict[str, tuple[Any, int]]:

    from parlay import AugmentedLagrangian, Local, Penalty, Replay

    made = {"al": AugmentedLagrangian, "penalty": Penalty, "replay": Replay, "local": Local}
    return {f"{name}, K = {k}": (make(), k) for name, make in made.items() for k in (2, 3, 6)}


def counted(method: Any, stages: int, phase: str = "parallel") -> dict[str, float]:
    """Of one step, in the mean; graphs are those of the whole run."""
    import problems
    from parlay.link.states import StateLink
    from rehearsal import Rehearsal
    from rehearsed import making, steps

    data = problems.images(ROWS * 16)
    with tempfile.TemporaryDirectory() as folder, Rehearsal("earliest") as lanes:
        running = making(method, stages, data, Path(folder), model=problems.with_norm, batch_size=ROWS)(lanes)
        own = steps(ROWS * 16, 6)
        step = running.parallel_step if phase == "parallel" else running.serial_step
        for link in running.own.links:
            if isinstance(link, StateLink):
                link.filled = True
                link.s2.fill_(1.0)
        for batch in own[:32]:
            step(batch)
        before = asdict(lanes.counts)
        for batch in own[32 : 32 + STEPS]:
            step(batch)
        after = asdict(lanes.counts)
    return {"graphs": after["graphs"]} | {
        name: (after[name] - before[name]) / STEPS for name in ("launches", "copies", "waits")
    }


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found, more = {}, 0
    rows = [(name, method, k, "parallel") for name, (method, k) in methods().items()]
    al = next(iter(methods().values()))[0]
    for name, method, k, phase in [*rows, *((f"serial, K = {k}", al, k, "serial") for k in (1, 3))]:
        found[name] = counted(method, k, phase)
        worse = [key for key, value in found[name].items() if value > recorded.get(name, {}).get(key, float("inf"))]
        more += len(worse)
        print(f"{name:<16} {found[name]}  {'more ' + ', '.join(worse) if worse else ''}", flush=True)
    if given.write:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
