#!/usr/bin/env bash
# Runs everything that needs an NVIDIA device, within six minutes, and writes bench/results/gpu-*.json (docs/gpu_check.md).
# Takes the options of bench/gpu_check.py, which looks for the device; `--device cpu` needs none.
# `--bundle FOLDER --wheel WHEEL` instead packs what a GPU machine without a package index needs (scripts/gpu_bundle.py).
# PYTHON=/path/to/python names an interpreter with the packages; otherwise that of .venv, which `make setup` makes.
# Status: 0 nothing failed, 1 a check failed or none passed, 2 no device or no environment.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "error: no Python at $python; run make setup, or name one: PYTHON=/path/to/python scripts/gpu_check.sh" >&2
    exit 2
fi
# The checkout itself, wherever that interpreter has moerl from.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[[ " $* " != *" --bundle"* ]] || exec "$python" -m scripts.gpu_bundle "$@"
exec "$python" bench/gpu_check.py "$@"
