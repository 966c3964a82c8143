#!/usr/bin/env bash
# Sets up, then every gate: ruff, its formatter, mypy, pytest. Arguments go to pytest, e.g. bash launch/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
step() { printf '[%4ds] %s\n' "$SECONDS" "$*"; "$@"; }
step .venv/bin/ruff check .
step .venv/bin/ruff format --check .
step .venv/bin/mypy
step .venv/bin/python -m pytest "$@"
