# Two commands for a newcomer: `make demo` runs the main job, `make test` passes the tests.
# `make exhaustive` trains every model of the tests under every strategy: more than an hour.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test exhaustive clean

$(VENV)/.installed: setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m autopar.demo

test: $(VENV)/.installed
	PYTHON=$(CURDIR)/$(BIN)/python sh tests/run.sh

exhaustive: $(VENV)/.installed
	AUTOPAR_TEST_ASSIGNMENTS=20 $(BIN)/python -m pytest -q tests/runtime/test_training.py

clean:
	rm -rf $(VENV) build *.egg-info
