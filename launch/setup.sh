#!/usr/bin/env bash
# Makes .venv with everything that the CPU installation needs, from launch/requirements-cpu.lock.
#
#   bash launch/setup.sh                  PYTHON=python3.12 chooses another interpreter (3.11 to 3.13)
#
# Does nothing when .venv is of this lock already. Only PyPI is needed. torch comes as PyTorch's own CPU build where
# the host has its wheel or PyTorch's index answers (uv knows that index), else as the build that PyPI has.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=launch/requirements-cpu.lock
torch=torch==2.13.0
python=${PYTHON:-python3}

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

command -v "$python" >/dev/null || die "$python is not there: install Python 3.11, 3.12 or 3.13, or set PYTHON"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11 | 3.12 | 3.13) ;;
    *) die "Python $version is not supported: set PYTHON to a Python 3.11, 3.12 or 3.13" ;;
esac
[ "$(uname -s)" = Linux ] || die "$(uname -s) is not supported: RoCstar needs Linux"

stamp=.venv/rocstar-stamp
want=$( { cat "$lock" pyproject.toml launch/setup.sh; echo "$version $PWD"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
    say "$PWD/.venv is up to date"
    exit 0
fi

if [ ! -x .venv/bin/python ] || [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$version" ]; then
    say "making .venv with Python $version"
    rm -rf .venv
    "$python" -m venv .venv || die "$python cannot make a virtual environment: install its venv module"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=${PIP_QUIET:-2} PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
pip() { .venv/bin/python -m pip "$@"; }

if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#*==}')" 2>/dev/null; then
    if pip install --dry-run --no-deps --no-index "$torch" >/dev/null 2>&1; then
        say "installing $torch from a wheel on this host"
        pip install -c "$lock" "$torch"
    elif pip install uv && UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=20 .venv/bin/python -m uv pip install --quiet \
        --python .venv/bin/python --torch-backend cpu --no-deps "$torch" 2>/dev/null; then
        say "installed PyTorch's CPU build of $torch"
    else
        say "installing $torch as PyPI has it (PyTorch's CPU index did not answer)"
        pip install -c "$lock" "$torch"
    fi
fi
say "installing the lock file, $(grep -c == "$lock") packages"
pip install --no-deps -r "$lock"
say "installing RoCstar"
pip install --no-deps --no-build-isolation -e .
.venv/bin/python -c 'import torch, ray, zmq, msgpack, pydantic' || die "the installation does not import; remove .venv and try again"
echo "$want" >"$stamp"
say "done: .venv/bin/rocstar"
