#!/usr/bin/env bash
# This host joins the cluster and runs the sandbox role of a run.
#
#   bash launch/sandbox.sh --address HEAD:6379     --count N offers N of them; --device auto|cpu|cuda|rocm
#   bash launch/sandbox.sh --address HEAD:6379 --dry-run      prints environment and command
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" -m launch node sandbox "$@"
