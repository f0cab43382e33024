#!/usr/bin/env bash
# Runs the demo (`make demo`); further arguments go to `moerl train`. If torch can use a GPU, Transformer Engine is made first
# if it is not there (`make gpu`), and the trainer is in bfloat16, as the engine is everywhere.
# BIN names the folder with the environment's programs.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${BIN:-.venv/bin}
gpu=$("$bin/python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
if [ -z "$gpu" ]; then
    exec "$bin/moerl" train recipe=demo "$@"
fi
if ! "$bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("transformer_engine") is None)'; then
    echo "demo: $gpu; building Transformer Engine first (make gpu), which takes a quarter of an hour or more"
    make gpu
fi
echo "demo: on $gpu, trainer in bfloat16 (model.dtype=bfloat16)"
exec "$bin/moerl" train recipe=demo model.dtype=bfloat16 "$@"
