"""Sets up the virtual environment of a checkout, as `make` asks for it: `python3 .ci/environment.py .venv`.

What is missing is said in a line. The file is kept to what Python 3.6 can read, so that a Python that is too old for
Parlay is told so too.
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNREACHABLE = "No matching distribution|satisfies the requirement|Connection|Max retries|ReadTimeout|Network is"


def main(venv):
    needed = version_needed()
    if sys.version_info < needed:
        return say(
            "Parlay needs Python {}.{} or later, and {} is {}.{}.{}: ".format(
                *needed, sys.executable, *sys.version_info[:3]
            )
            + "name another one, as in make demo PYTHON=python3.12"
        )
    python = os.path.join(venv, "bin", "python")
    if not is_ready(python, needed):
        made = os.path.exists(os.path.join(venv, "pyvenv.cfg"))  # what is no environment is never cleared
        if subprocess.call([sys.executable, "-m", "venv", *(["--clear"] if made else []), venv]) != 0:
            return say(f"{venv} could not be set up: install the module venv (Debian and Ubuntu: python3-venv)")
    log = os.path.join(venv, "pip.log")
    if install(python, log) != 0:
        return say(why(venv, log))
    with open(os.path.join(venv, ".ready"), "w"):
        return 0


def version_needed():
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        found = re.search(r'requires-python = ">=(\d+)\.(\d+)"', file.read())
    return int(found[1]), int(found[2])


def is_ready(python, needed):
    """Is it a Python that will do, with pip? One that was set up by an older Python, or in part, will not."""
    check = f"import sys, pip; sys.exit(sys.version_info < {needed})"
    return os.path.exists(python) and subprocess.call([python, "-c", check], stderr=subprocess.DEVNULL) == 0


def install(python, log):
    """Packages are large: a terminal shows how far they are. Errors go to the file."""
    print(f"setting up {os.path.dirname(log)}: the first time it fetches PyTorch, which takes minutes", flush=True)
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    words = ["install", *quiet, "--constraint", "constraints.txt", "--editable", ".[dev]", "--editable", "./paper"]
    environment = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    with open(log, "w") as errors:
        return subprocess.call([os.path.abspath(python), "-m", "pip", *words], cwd=ROOT, stderr=errors, env=environment)


def why(venv, log):
    """The line for a failure of pip, from what it has said."""
    with open(log, errors="replace") as file:
        text = file.read()
    if not re.search(UNREACHABLE, text):
        errors = [line for line in text.splitlines() if line.startswith("ERROR")]
        return f"pip failed ({errors[-1] if errors else 'without a word'}): the whole of it is in {log}"
    named = re.findall(r"No matching distribution found for ([\w.-]+)", text)
    missing = [name for name in dict.fromkeys([*named, *pinned()]) if name.lower() not in installed(venv)]
    return (
        f"no network, or no package index: could not fetch {', '.join(missing)}. Connect and run make again, or fetch "
        "them elsewhere by `pip download -d wheels -r constraints.txt editables` and write "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels make demo ({log} has what pip said)"
    )


def pinned():
    with open(os.path.join(ROOT, "constraints.txt"), encoding="utf-8") as file:
        return re.findall(r"^([\w.-]+)==", file.read(), re.MULTILINE)


def installed(venv):
    names = [name for _, folders, _ in os.walk(os.path.join(venv, "lib")) for name in folders]
    found = (re.fullmatch(r"([\w.]+)-[^-]+\.dist-info", name) for name in names)
    return {match[1].lower().replace("_", "-") for match in found if match}


def say(line):
    print(f"make: {line}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
