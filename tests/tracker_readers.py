"""Stored points of a tracker, read with its own library: ``python tests/tracker_readers.py NAME FOLDER``.

Prints JSON: `points`, of [metric, step, value] in the order of their rows; `config`; `runs`, the ids. In a process of
its own, because the libraries change the process that imports them.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = "moerl"


def stored(name: str, folder: Path) -> dict[str, Any]:
    """Reads what the tracker `name` has stored in its folder of a run directory, in a process of its own."""
    command = [sys.executable, __file__, name, str(folder)]
    environment = {**os.environ, "TRACKIO_DIR": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_wandb(folder: Path) -> dict[str, Any]:
    """Every offline folder of the run, in the order in which they began."""
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    points, config, runs = [], {}, []
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        for data in _wandb_records(file.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.append(record.run.run_id)
            updates = {"run": record.run.config.update, "config": record.config.update}.get(kind, ())
            config |= {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in updates}
            if kind == "history":
                row = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                points += _wandb_points(row)
    return {"points": points, "config": config, "runs": runs}


def _wandb_points(row: dict[str, Any]) -> list[tuple[str, int, float]]:
    [step_name] = [name for name in row if name.endswith("/step") and name.count("/") == 1]
    return [(name, row[step_name], value) for name, value in row.items() if name != step_name and name[0] != "_"]


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of W&B's transaction log: LevelDB's format with a header of seven bytes of its own."""
    block, header, position, parts = 32768, struct.Struct("<IHB"), 7, b""
    while position + header.size <= len(data):
        if block - position % block < header.size:
            position += block - position % block
            continue
        _, length, kind = header.unpack_from(data, position)
        parts += data[position + header.size : position + header.size + length]
        position += header.size + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_mlflow(folder: Path) -> dict[str, Any]:
    mlflow: Any = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    points = [
        (each.key, each.step, each.value, each.timestamp)
        for run in runs
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    ]
    tags = {key: value for run in runs for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
    config = {key: value for run in runs for key, value in run.data.params.items()}
    status = [run.info.status for run in runs]
    points = [(key, step, value) for key, step, value, _ in sorted(points, key=lambda each: each[3])]
    return {"points": points, "config": config, "runs": [r.info.run_id for r in runs], "tags": tags, "status": status}


def read_trackio(folder: Path) -> dict[str, Any]:
    api: Any = importlib.import_module("trackio").Api()
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    runs = list(api.runs(PROJECT))
    points = [
        (name, row["step"], value)
        for run in runs
        for row in storage.get_logs(PROJECT, run.name, run_id=run.id)
        for name, value in row.items()
        if name not in ("step", "timestamp")
    ]
    return {"points": points, "config": runs[-1].config, "runs": [run.id for run in runs]}


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
