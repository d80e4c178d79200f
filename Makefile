# `make demo` trains on the embedded data and leaves a page; `make test` runs the quick tests, `make test-all` all of
# them; `make wheel` builds what is distributed and tries it. Each sets up what it needs: Parlay, and the reproduction of
# the paper in paper/. PYTHON names the Python to use, VENV the folder to set up.
VENV ?= .venv
PYTHON ?= python3
RUN := "$(VENV)/bin/python"

# Programs are started as modules: the first line of a script in a virtual environment cannot name a folder with spaces.
# In the names of targets a space needs a backslash.
empty :=
READY := $(subst $(empty) $(empty),\ ,$(VENV))/.ready

.PHONY: demo test test-all lint wheel clean

demo: $(READY)
	@$(RUN) -m parlay.cli demo --out runs/demo

test: $(READY)
	$(RUN) -m pytest -m "not slow"

test-all: $(READY)
	$(RUN) -m pytest

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

wheel: $(READY)
	rm -rf dist
	$(RUN) -m build --no-isolation --outdir dist
	$(RUN) .ci/wheel.py dist

$(READY): pyproject.toml paper/pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo 'make: there is no $(PYTHON): name a Python, as in make demo PYTHON=python3.12' >&2; exit 1; }
	@"$(PYTHON)" .ci/environment.py "$(VENV)"

clean:
	rm -rf "$(VENV)" runs dist
