#!/usr/bin/env bash
# Resolves pyproject.toml and requirements/*.in into requirements/*.lock, with hashes, for every system. Run by `make lock`.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo "error: make lock needs uv (pip install uv)" >&2; exit 1; }
compile() {
    uv --quiet pip compile --universal --python-version 3.12 --generate-hashes --no-emit-index-url --no-annotate \
        --custom-compile-command "make lock" "$@"
}
compile requirements/build.in -o requirements/build.lock
compile pyproject.toml requirements/bridge.in --extra dev --extra train --constraint requirements/build.lock -o requirements/run.lock
compile requirements/transformer_engine.in --no-deps -o requirements/transformer_engine.lock
compile requirements/gpu.in --no-deps -o requirements/gpu.lock
