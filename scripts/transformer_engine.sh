#!/usr/bin/env bash
# Installs the Python code of Transformer Engine, without its kernels, into build/transformer_engine, every download checked
# against its hash. Does nothing if it is installed. Run by `make test-transformer-engine`.
set -euo pipefail
cd "$(dirname "$0")/.."
LOCK=requirements/transformer_engine.lock
FOLDER=build/transformer_engine

cmp --silent "$LOCK" "$FOLDER/installed.lock" && exit 0
installer=(.venv/bin/python -m pip --disable-pip-version-check)
.venv/bin/python -c 'import pip' 2>/dev/null || installer=(uv --quiet pip)
rm -rf "$FOLDER"
"${installer[@]}" install --require-hashes --no-deps --only-binary :all: --target "$FOLDER" --requirement "$LOCK"
cp "$LOCK" "$FOLDER/installed.lock"
