"""Addresses that a tree of processes listens on, according to the kernel (Linux)."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def open_to_others(root: int) -> list[str]:
    """Listening TCP sockets of a process and its descendants that are neither on loopback nor on a private address."""
    return [
        f"{host}:{port} (pid {pid})"
        for pid, host, port in listening(root)
        if (address := ipaddress.ip_address(host)).is_unspecified or not (address.is_loopback or address.is_private)
    ]


def listening(root: int) -> list[tuple[int, str, int]]:
    """Pid, address and port of every listening TCP socket of a process and its descendants."""
    sockets = _listening_sockets()
    return [(pid, *sockets[inode]) for pid in _family(root) for inode in _inodes(pid) if inode in sockets]


def _listening_sockets() -> dict[str, tuple[str, int]]:
    """Address and port by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, port = fields[1].split(":")
                found[fields[9]] = (_address(host), int(port, 16))
    return found


def _address(text: str) -> str:
    """Words of four bytes, each in the machine's own byte order."""
    packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _family(root: int) -> list[int]:
    family = [root]
    for pid in family:
        for task in _entries(Path(f"/proc/{pid}/task")):
            try:
                family += map(int, (task / "children").read_text().split())
            except OSError:  # it has ended meanwhile
                continue
    return family


def _inodes(pid: int) -> Iterator[str]:
    for descriptor in _entries(Path(f"/proc/{pid}/fd")):
        try:
            target = os.readlink(descriptor)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process has ended meanwhile
        return []
