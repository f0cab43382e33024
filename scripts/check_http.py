"""One reader of HTTP answers, checked by `make lint`: ``python scripts/check_http.py``. Standard library alone.

Whoever answers may send what unpacks to gigabytes, never ends, or has our key in it. `moerl/http/client.py` reads
answers so that none of it does harm; no other module imports what speaks HTTP or fetches addresses by itself.
Exceptions stand in `EXCEPTIONS`, each with its reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("moerl", "scripts", "bench")

READERS = (
    *("http.client", "urllib.request", "xmlrpc.client", "ftplib"),
    *("aiohttp", "httpcore", "httptools", "httpx", "h11", "h2", "requests", "urllib3", "websocket", "websockets"),
    *("curl_cffi", "grpc", "mechanize", "pycurl", "treq"),
    *("anthropic", "boto3", "botocore", "datasets", "fsspec", "gradio_client", "huggingface_hub", "jsonschema"),
    *("mlflow", "openai", "s3fs", "smart_open", "trackio", "wandb"),
)
"""Modules that read answers over HTTP, or fetch what an address names."""

PROGRAM = re.compile(r"(?:curl|wget|aria2c)(?=\s|$)")
"""A command that does."""

_HUB = "the library of the hub reads the hub's answers: files, with their sizes and hashes"

EXCEPTIONS = {
    "moerl/http/client.py:aiohttp": "the reader",
    "moerl/http/server.py:aiohttp": "the server: it reads requests on loopback, and no answers",
    "moerl/http/websocket.py:aiohttp": "the reader of messages over a WebSocket, with the same limits",
    "moerl/http/client.py:urllib.request": "which proxies the environment names; nothing is asked",
    "moerl/machine/hub.py:huggingface_hub": _HUB,
    "moerl/machine/hub.py:httpx": "errors that the library of the hub raises; nothing is asked",
    "moerl/tasks/data/hub_sets.py:huggingface_hub": _HUB,
    "moerl/tasks/data/sources.py:datasets": "data sets of the hub, by the hub's own library",
    "moerl/trainer/hf_directory.py:huggingface_hub": "writes files; nothing is asked",
    "moerl/tasks/rewards/schemas.py:jsonschema": "with a registry of its own, without which it would fetch addresses",
    "moerl/telemetry/trackers/mlflow_tracker.py:mlflow": "a tracker's own library asks the tracker",
    "moerl/telemetry/trackers/trackio_tracker.py:trackio": "a tracker's own library asks the tracker",
    "moerl/telemetry/trackers/wandb_tracker.py:wandb": "a tracker's own library asks the tracker",
    "bench/peers.py:datasets": "rows in memory for TRL; nothing is asked",
}
"""By ``path:module``."""


def uses(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each module of `READERS` and `PROGRAM` that a file uses."""
    for node in ast.walk(ast.parse(text)):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if match := PROGRAM.match(node.value):
                yield node.lineno, match[0]
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        for name in {reader for name in names for reader in READERS if f"{name}.".startswith(f"{reader}.")}:
            yield node.lineno, name  # pyright: ignore[reportAttributeAccessIssue]


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def problems(root: Path) -> list[str]:
    """Returns other readers, and exceptions that nothing needs."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    found = [
        (f"{file.relative_to(root).as_posix()}:{name}", line)
        for file in files
        for line, name in uses(file.read_text(encoding="utf-8"))
    ]
    others = [
        f"{where} (line {line}): answers over HTTP are read by moerl/http/client.py alone"
        for where, line in found
        if where not in EXCEPTIONS
    ]
    unneeded = sorted(set(EXCEPTIONS) - {where for where, _ in found})
    return others + [f"{where}: no longer used; remove its exception" for where in unneeded]


if __name__ == "__main__":
    lines = problems(Path(__file__).parents[1])
    print("\n".join(lines) or "HTTP: moerl/http/client.py reads all answers")
    sys.exit(bool(lines))
