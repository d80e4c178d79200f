"""`make` sets up what it needs in any folder, and says in a line what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("Makefile", "pyproject.toml", "paper/pyproject.toml", "constraints.txt", ".ci/environment.py")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make is installed")

GOOD = """#!/bin/sh
echo "$@" >> called
"""
OLD = f"""#!/bin/sh
exec '{sys.executable}' -c '
import runpy, sys
sys.version_info, sys.executable, sys.argv = (3, 10, 13, "final", 0), "/usr/bin/python3.10", sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """In a folder with a space in its name."""
    folder = tmp_path / "a folder"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # in an environment it is a link to the real Python
    path.write_text(text)
    path.chmod(0o755)
    return path


def make(checkout: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "VENV", "PYTHON"))}
    return subprocess.run(
        ["make", *words], cwd=checkout, capture_output=True, text=True, env={**inherited, **environment}, timeout=300
    )


def line(done: subprocess.CompletedProcess[str]) -> str:
    """What it has said of what is missing; the last line is make's own, that the target failed."""
    assert done.returncode != 0
    *said, last = done.stderr.splitlines()
    assert last.startswith("make: *** ")
    assert len(said) == 1, done.stderr
    return said[0].removeprefix("make: ")


@pytest.mark.parametrize("target", ["demo", "test"])
def test_an_old_python_is_told_which_one_is_needed_and_how_to_name_it(target: str, checkout: Path) -> None:
    old = script(checkout / "python3.10", OLD)
    assert line(make(checkout, target, f"PYTHON={old}")) == (
        "Parlay needs Python 3.11 or later, and /usr/bin/python3.10 is 3.10.13: name another one, as in make demo "
        "PYTHON=python3.12"
    )
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_named(checkout: Path) -> None:
    said = line(make(checkout, "demo", "PYTHON=python3.99"))
    assert said == "there is no python3.99: name a Python, as in make demo PYTHON=python3.12"


@pytest.mark.parametrize("venv", [".venv", "my venv"])
def test_in_a_folder_with_spaces_it_sets_up_once_and_runs(venv: str, checkout: Path) -> None:
    script(checkout / venv / "bin" / "python", GOOD)
    for target in ("demo", "demo", "test", "test-all", "lint"):
        done = make(checkout, target, f"VENV={venv}", f"PYTHON={sys.executable}")
        assert done.returncode == 0, done.stderr
    first, installed, *others = (checkout / "called").read_text().splitlines()
    assert first.startswith("-c import sys, pip")
    assert installed.startswith("-m pip install --quiet --constraint constraints.txt --editable .[dev]")
    assert installed.endswith("--editable ./paper")
    assert others == [
        *["-m parlay.cli demo --out runs/demo"] * 2,
        *("-m pytest -m not slow", "-m pytest", "-m ruff check .", "-m ruff format --check .", "-m mypy"),
    ]


def test_without_a_network_it_names_the_packages_and_what_to_do(checkout: Path) -> None:
    """With pip's own words: the environment is a real one, and an older one in its place is made anew."""
    script(checkout / ".venv" / "bin" / "python", "#!/bin/sh\nexit 1\n")
    (checkout / ".venv" / "pyvenv.cfg").write_text("version = 3.10.13\n")
    nobody = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = make(checkout, "demo", f"PYTHON={sys.executable}", **nobody)
    said = line(done)
    assert said.startswith("no network, or no package index: could not fetch hatchling, torch, numpy, ")
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels make demo" in said
    assert not (checkout / ".venv" / ".ready").exists()
    script(checkout / ".venv" / "bin" / "python", GOOD)  # the network is back
    assert make(checkout, "demo", f"PYTHON={sys.executable}").returncode == 0
    assert (checkout / ".venv" / ".ready").exists()


def test_another_failure_of_pip_is_told_in_its_words(checkout: Path) -> None:
    full = 'case "$*" in *install*) echo "ERROR: No space left on device" >&2; exit 1;; esac'
    script(checkout / ".venv" / "bin" / "python", f"#!/bin/sh\n{full}\n")
    said = line(make(checkout, "demo", f"PYTHON={sys.executable}"))
    assert said == "pip failed (ERROR: No space left on device): the whole of it is in .venv/pip.log"


def test_a_folder_that_is_no_environment_is_not_cleared(checkout: Path) -> None:
    """`venv --clear` deletes all that lies in a folder."""
    (checkout / "mine").mkdir()
    (checkout / "mine" / "notes.txt").write_text("precious")
    make(checkout, "demo", "VENV=mine", f"PYTHON={sys.executable}", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert (checkout / "mine" / "notes.txt").read_text() == "precious"
