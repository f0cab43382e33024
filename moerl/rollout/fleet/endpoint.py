"""Address and keys of a server, kept in a file that only its owner can read.

Whoever starts a server writes the file, clients read it. The admin key opens what changes a server (aborts, pauses,
weight updates): the controller has it, and so have ranks that send weights. With the other key one can sample.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from moerl.contract.files import atomic_file
from moerl.errors import EngineError
from moerl.http.keys import Key, read_private


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and keys of a server."""

    url: str
    """`http://HOST:PORT`."""
    api_key: str
    """Key for sampling."""
    admin_key: str
    """Key for aborts, pauses and weight updates; empty if the process has none."""
    pid: int = 0
    """Process id of the server's first process; 0 if it is not known."""

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url!r}, pid={self.pid})"


def write_endpoint(endpoint: Endpoint, path: Path) -> None:
    """Writes the file with mode 0600."""
    with atomic_file(path, mode=0o600) as temporary:
        temporary.write_text(json.dumps(asdict(endpoint), indent=2) + "\n")


def read_endpoint(path: Path) -> Endpoint:
    """Reads what `write_endpoint` wrote.

    Raises:
        EngineError: there is no such file, others may read it, or it holds something else.
    """
    content = read_private(
        path,
        f"server file {path}",
        EngineError,
        remedy="start a server with `moerl serve --folder DIR`, and name DIR/server.json",
    )
    try:
        return _endpoint(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(
            f"server file {path}: no server file",
            seen=f"{len(content)} bytes: {error}",
            expected="what `moerl serve` writes",
            remedy="name the server.json in the folder of a `moerl serve`, or start the server again",
        ) from error


def _endpoint(content: bytes) -> Endpoint:
    """Reads `content`. Raises ValueError or TypeError if it is not what `write_endpoint` writes."""
    values = json.loads(content)
    types = {field.name: int if field.name == "pid" else str for field in fields(Endpoint)}
    if not isinstance(values, dict) or set(values) != set(types):
        raise ValueError(f"not exactly the fields {', '.join(types)}")
    if wrong := [name for name, kind in types.items() if type(values[name]) is not kind]:
        raise TypeError(f"{wrong[0]} of another type")
    endpoint = Endpoint(**values)
    for key in (endpoint.api_key, endpoint.admin_key):
        Key(key)  # which refuses what cannot be one
    url = urlsplit(endpoint.url)
    if url.scheme != "http" or not url.port:
        raise ValueError("url is not http://HOST:PORT")
    require_private(url.hostname or "")
    return endpoint


def require_private(host: str) -> None:
    """Raises EngineError if `host` is an address that others outside the cluster could reach."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or not (address.is_loopback or address.is_private):
        raise EngineError(
            "server address",
            seen=host,
            expected="a loopback or private IP address, and not all interfaces",
            remedy="use 127.0.0.1, or this machine's own address in the cluster's network",
        )
