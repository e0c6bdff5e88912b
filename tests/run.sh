#!/bin/sh
# Lint, types on the installed package, then the tests; $PYTHON is the virtual environment's interpreter.
set -eu
cd "$(dirname "$0")/.."
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$site" .
MYPYPATH="$site" "$PYTHON" -m mypy --config-file pyproject.toml -p autopar
"$PYTHON" -m pytest --ignore=notebooks --durations=25
"$PYTHON" -m pytest --nbmake --nbmake-timeout=300 notebooks
