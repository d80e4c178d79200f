"""Tries what was built, as a stranger would: `python .ci/wheel.py dist`.

The sdist is small, and the wheel holds Parlay alone. It is installed into a fresh virtual environment, where its
`parlay demo` runs in an empty folder and `parlay reproduce` says where the reproduction is.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"src", "examples"}
LARGEST = 1_000_000  # bytes of an sdist


def main(dist: Path) -> None:
    (sdist,), (wheel,) = dist.glob("parlay_train-*.tar.gz"), dist.glob("parlay_train-*.whl")
    check_sdist(sdist)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as fresh, tempfile.TemporaryDirectory(prefix="a folder ") as empty:
        try_wheel(wheel.resolve(), Path(fresh), Path(empty))
    print(f"{wheel.name} and {sdist.name} are fine")


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        folders = {Path(name).parts[1] for name in file.getnames() if len(Path(name).parts) > 2}
    assert folders <= KINDS, f"{sdist.name} carries {sorted(folders - KINDS)}: see [tool.hatch] in pyproject.toml"
    size = sdist.stat().st_size
    assert size < LARGEST, f"{sdist.name} has {size} bytes, more than {LARGEST}"


def check_wheel(wheel: Path) -> None:
    """The reproduction of the paper stays in the checkout."""
    with zipfile.ZipFile(wheel) as file:
        folders = {name.partition("/")[0] for name in file.namelist()}
    others = {name for name in folders if name != "parlay" and not name.endswith(".dist-info")}
    assert not others, f"{wheel.name} carries {sorted(others)}: see [tool.hatch] in pyproject.toml"


def try_wheel(wheel: Path, fresh: Path, empty: Path) -> None:
    print(f"installing {wheel.name} into a fresh environment", flush=True)
    venv.create(fresh, with_pip=True)
    words = ["install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run([fresh / "bin" / "python", "-m", "pip", *words], check=True)
    words = ["demo", "--epochs", "2", "--json"]
    done = subprocess.run([fresh / "bin" / "parlay", *words], cwd=empty, check=True, stdout=subprocess.PIPE)
    told = json.loads(done.stdout)
    assert told["status"] == "finished", told
    assert len(told["rows"]) >= 4, told
    print("\n".join(told["says"]))
    door = subprocess.run([fresh / "bin" / "parlay", "reproduce", "table1"], cwd=empty, capture_output=True, text=True)
    assert door.returncode == 2, door
    assert "in a checkout of Parlay `make` installs it" in door.stderr, door.stderr
    assert [path.name for path in empty.iterdir()] == ["runs"]
    assert (empty / told["page"]).stat().st_size > 10_000
    assert "Two stages on two cores" in told["says"][0] or "No speed is timed" in told["says"][0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
