#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up, then trains the quickstart. Arguments go to `rocstar run`,
# e.g. bash launch/quickstart.sh --set run.seed=2
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
exec .venv/bin/rocstar run launch/recipes/quickstart.toml "$@"
