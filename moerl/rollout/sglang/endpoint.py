"""Where a server listens and which keys open it; kept in a file that only its owner can read.

`moerl serve` writes it, clients read it. The admin key opens what changes a server (aborts, pauses, weight updates) and
is the controller's alone; the other key lets one sample.
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from moerl.contract.files import atomic_file
from moerl.errors import EngineError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: `http://HOST:PORT`. pid: of the server's first process, 0 where it is not ours."""

    url: str
    api_key: str
    admin_key: str
    pid: int = 0

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url!r}, pid={self.pid})"


def write_endpoint(endpoint: Endpoint, path: Path) -> None:
    """Writes the file with mode 0600."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(asdict(endpoint), indent=2) + "\n")
        temporary.chmod(0o600)


def read_endpoint(path: Path) -> Endpoint:
    """Reads what `write_endpoint` wrote.

    Raises:
        EngineError: there is no such file, others may read it, or it holds something else.
    """
    if not path.is_file():
        raise EngineError(f"server file {path}: not found", remedy="start a server with `moerl serve --folder DIR`")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 or path.stat().st_uid != os.getuid():
        raise EngineError(
            f"server file {path}: others may read its keys",
            seen=f"mode {mode:04o}",
            expected="mode 0600, your own",
            remedy=f"chmod 600 {path}, and change the keys by starting the server again",
        )
    try:
        content = json.loads(path.read_text())
        types = {field.name: int if field.name == "pid" else str for field in fields(Endpoint)}
        if set(content) != set(types) or any(type(content[name]) is not kind for name, kind in types.items()):
            raise ValueError(sorted(content))
    except (ValueError, TypeError) as error:
        raise EngineError(f"server file {path}", seen=error, expected="what `moerl serve` writes") from error
    return Endpoint(**content)


def require_private(host: str) -> None:
    """Raises EngineError where `host` is an address that others outside the cluster could reach."""
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
