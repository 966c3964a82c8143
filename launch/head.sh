#!/usr/bin/env bash
# Starts the head of a Ray cluster on this host: it places and watches the roles, and runs none.
#
#   bash launch/head.sh                       listens at port 6379; --address PORT chooses another
#   bash launch/head.sh --dry-run             prints environment and command
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" -m launch node head "$@"
