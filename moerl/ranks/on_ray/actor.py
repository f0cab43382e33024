"""The actor of one rank: runs on the rank's node, starts the rank as a child process there, and forwards messages.

The child is the same program as a rank on one machine (`moerl.ranks.process`). A library that crashes or never returns
takes the child with it, not the actor, which reports how the child ended; the child dies with the actor, and the actor
with its node's Ray, however these end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moerl.config.placement import shown_gpus, without_ray
from moerl.contract.commands import decode_reply
from moerl.machine.interfaces import interface_variables
from moerl.processes.channel import receive, send
from moerl.processes.child import Child
from moerl.processes.parent import die_with
from moerl.ranks.away import CLOSING_SECONDS, GRACE_SECONDS, PROGRAM
from moerl.ranks.on_ray.library import ray, tokens
from moerl.ranks.on_ray.messages import NodeFacts, RankProcessSettings, Versions


class RankActor:
    """One rank. Its methods take and return byte strings; one runs at a time."""

    def __init__(self) -> None:
        die_with(os.getppid())
        self._listener: socket.socket | None = None
        self._child: Child | None = None

    def facts(self) -> bytes:
        """Returns `NodeFacts`, as JSON."""
        context = ray.get_runtime_context()
        address, asks = ray.util.get_node_ip_address(), tokens.is_token_auth_enabled()
        facts = NodeFacts(context.get_node_id(), address, socket.gethostname(), Versions.here(), asks, shown_gpus())
        return msgspec.json.encode(facts)

    def listen(self) -> bytes:
        """Opens, for rank 0, a free port of its node at which the ranks meet; returns the address."""
        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        host = f"[{address}]" if ":" in address else address
        return f"tcp://{host}:{self._listener.getsockname()[1]}".encode()

    def start(self, place: bytes) -> bytes:
        """Starts the rank's process; `place`: `RankProcessSettings`, as JSON. The log is locked as long as the process
        lives."""
        told = msgspec.json.decode(place, type=RankProcessSettings)
        log = Path(told.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        given = () if self._listener is None else (self._listener.fileno(),)
        environment = without_ray()
        environment |= interface_variables(ray.util.get_node_ip_address(), environment) | told.environment
        with log.open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._child = Child(PROGRAM, log, environment, given=given, inherited=(held.fileno(),))
        if self._listener is not None:
            self._listener.close()
        return b""

    def run(self, message: bytes, frame: bytes) -> Iterator[bytes]:
        """Yields the replies to a command. If the last one is missing, the process has ended."""
        assert self._child is not None
        # An error means that the process is gone; `how_ended` tells how.
        with contextlib.suppress(EOFError, ConnectionError):
            send(self._child.socket, message, frame)
            while True:
                reply, _ = receive(self._child.socket)
                yield reply
                if decode_reply(reply).progress is None:
                    return

    def how_ended(self) -> bytes:
        """Returns how the process ended."""
        assert self._child is not None
        return self._child.describe_end(GRACE_SECONDS).encode()

    def finish(self) -> bytes:
        """Waits after the last command until the process has ended, for `CLOSING_SECONDS` at most; returns how it
        ended."""
        assert self._child is not None
        return self._child.describe_end(CLOSING_SECONDS).encode()
