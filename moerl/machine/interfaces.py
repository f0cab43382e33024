"""Choice of the network interface on which this machine meets others. Torch-free; any process.

If nobody names an interface, gloo listens on the one of the host name, and NCCL on the first that is no loopback.
Either may be public.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_SIOCGIFADDR = 0x8915


def interface_variables(address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that have gloo and NCCL listen on `address` of this machine alone, without those that the
    user set; none if no interface has that address."""
    interface = interface_of(address)
    return {} if interface is None else {name: interface for name in VARIABLES if not environment.get(name)}


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this IP address; None if there is none, or the system does not say."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return LOOPBACK
    if sys.platform != "linux":
        return None
    if wanted.version == 6:
        table = Path("/proc/net/if_inet6")
        rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((row[-1] for row in rows if row[0] == wanted.packed.hex()), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if reply[20:24] == wanted.packed:
                return name
    return None


def own_address(host: str, port: int) -> str:
    """Returns the address of this machine as a server at `host` sees it. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
