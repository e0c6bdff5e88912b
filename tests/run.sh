#!/bin/sh
# Lint, types, then the tests, two at a time; those of the runtime, which share worker processes,
# file by file. $PYTHON is the virtual environment's interpreter.
set -eu
cd "$(dirname "$0")/.."
# Each process computes on its own core: a team of threads for every rank's thread would spend most
# of its time waiting.
export OMP_NUM_THREADS=1
# Hundreds of processes import autopar: bytecode is compiled once, whatever the environment says.
unset PYTHONDONTWRITEBYTECODE
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy -p autopar
"$PYTHON" -m pytest --ignore=tests/runtime --numprocesses=2 --dist=loadgroup --durations=25
"$PYTHON" -m pytest --numprocesses=2 --dist=loadfile --durations=25 tests/runtime
"$PYTHON" -m pytest --nbmake --nbmake-timeout=300 --numprocesses=2 notebooks
