#!/bin/sh
# Lint, types on the installed package, then the tests: two at a time, but for those of the runtime,
# which start processes of their own. $PYTHON is the virtual environment's interpreter.
set -eu
cd "$(dirname "$0")/.."
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$site" .
MYPYPATH="$site" "$PYTHON" -m mypy --config-file pyproject.toml -p autopar
"$PYTHON" -m pytest --ignore=tests/runtime --numprocesses=2 --durations=25
"$PYTHON" -m pytest --durations=25 tests/runtime
"$PYTHON" -m pytest --nbmake --nbmake-timeout=300 notebooks
