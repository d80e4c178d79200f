"""Run folders of an experiment, kept as one compressed file: `results/EXPERIMENT/runs.tar.xz`, `paper/results/` for
the experiment `paper`.

    python results/records.py unpack streaming runs/streaming     write the run folders, to look at or to resume
    python results/records.py pack streaming runs/streaming       keep these in the place of the recorded ones

What is kept of a run is what a claim rests on: recipe, records, summary and timings; no weights, checkpoints or pages.
"""

import argparse
import atexit
import functools
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PAPER = HERE.parent / "paper" / "results"
KEPT = {".toml", ".json", ".jsonl", ".csv", ".txt"}


def folder_of(experiment: str) -> Path:
    """The reproduction of the paper keeps its results beside its code."""
    return PAPER if experiment == "paper" else HERE / experiment


@functools.cache
def runs(experiment: str) -> Path:
    """The run folders of an experiment, unpacked into a temporary folder that goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="parlay-results-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(experiment, folder)
    return folder


def unpack(experiment: str, folder: Path) -> None:
    with tarfile.open(folder_of(experiment) / "runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def pack(experiment: str, folder: Path) -> None:
    """The same folder gives the same file, byte for byte: names in order, no times, no owners."""
    target = folder_of(experiment) / "runs.tar.xz"
    files = sorted(path for path in folder.rglob("*") if path.suffix in KEPT and "checkpoints" not in path.parts)
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9, format=tarfile.PAX_FORMAT) as archive:
        for path in files:
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    os.replace(partial, target)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("what", choices=("unpack", "pack"))
    ask.add_argument("experiment", help="a folder of results/, or paper")
    ask.add_argument("folder", type=Path)
    given = ask.parse_args()
    {"unpack": unpack, "pack": pack}[given.what](given.experiment, given.folder)


if __name__ == "__main__":
    main()
