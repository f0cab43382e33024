#!/bin/sh
# Makes the environment in .venv. Run by `make setup`; runs again only when pyproject.toml or this file changes.
# PYTHON=/path/to/python3.12 names the interpreter; otherwise the first 3.12 that really runs is taken.
set -eu
cd "$(dirname "$0")/.."

is_usable() {
    "$1" -c 'import sys, venv; raise SystemExit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_usable "$PYTHON" && echo "$PYTHON" && return
        echo "error: PYTHON=$PYTHON is no Python 3.12 that runs (megatron-bridge 0.6.2 takes no other)" >&2
        return 1
    fi
    for candidate in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.12 that runs was found (megatron-bridge 0.6.2 takes no other); install it, or name it: make setup PYTHON=/path/to/python3.12" >&2
    return 1
}

python=$(find_python)
echo "setup: $($python --version) at $python; installs about 5 GB into .venv, minutes"
[ -x .venv/bin/python ] && is_usable .venv/bin/python || "$python" -m venv --clear .venv
pip=".venv/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --editable '.[dev]'
# megatron-bridge declares CUDA-only packages (flashinfer, TE extensions) that it imports only where CUDA is present; what
# it needs everywhere is among our own dependencies.
$pip install --no-deps 'megatron-bridge==0.6.2'
.venv/bin/python -W ignore -c 'from moerl.trainer.bridge import import_bridge; import_bridge()' >/dev/null 2>.venv/setup.log ||
    { cat .venv/setup.log >&2; echo "error: megatron-bridge does not import; remove .venv and run make setup again" >&2; exit 1; }
touch .venv/.ready
echo "setup: done"
