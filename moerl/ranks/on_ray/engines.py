"""The process of an embedded engine as the child of an actor, on any node of the cluster that has room for it.

The actor forwards messages in both directions; the process ends with it, and the actor with the controller, or its
node's Ray. Senders of weights connect to the process directly.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from moerl.config.placement import without_ray
from moerl.errors import EngineError
from moerl.processes.parent import die_with
from moerl.ranks.on_ray.cluster import hold
from moerl.ranks.on_ray.library import ActorUnavailableError, GetTimeoutError, RayError, first_line, ray
from moerl.rollout.engine_process.local import CLOSING_SECONDS, LocalProcess

PLACE_SECONDS = 300.0
"""Seconds for an actor to find a node and start."""
_MESSAGES = "messages"
"""Concurrency group of `EngineActor.messages`; all other methods of the actor run in the order of their calls."""


class EngineActor:
    """One engine's process. Its methods take and return byte strings."""

    def __init__(self) -> None:
        die_with(os.getppid())
        self._process: LocalProcess | None = None

    def start(self, log: bytes) -> bytes:
        """Starts the process; returns the address of the node."""
        self._process = LocalProcess(Path(log.decode()), without_ray())
        return str(ray.util.get_node_ip_address()).encode()

    def send(self, message: bytes) -> bytes:
        """Forwards a message; if the process is gone, that shows in `messages`."""
        assert self._process is not None
        with contextlib.suppress(OSError):
            self._process.send(message)
        return b""

    def messages(self) -> Iterator[bytes]:
        """Yields the messages of the process, each encoded with its frame, until the process ends."""
        assert self._process is not None
        with contextlib.suppress(EOFError, OSError):
            while True:
                yield msgspec.msgpack.encode(self._process.receive())

    def describe_end(self) -> bytes:
        """Returns how the process ended."""
        assert self._process is not None
        return self._process.describe_end().encode()

    def close(self) -> bytes:
        """Waits for the process, which was asked to close, and ends it."""
        if self._process is not None:
            self._process.close()
            self._process.release()
        return b""


class RemoteProcess:
    """An `EngineProcess` on a node of the cluster.

    Args:
        log: in a file system that all nodes see. num_threads: CPUs that the node must have free.

    Raises:
        EngineError: no node has these CPUs.
    """

    def __init__(self, log: Path, num_threads: int) -> None:
        self._is_abandoned, self.is_here = False, False
        self._has_ended, self._end_was_seen = threading.Event(), threading.Event()
        # A node other than the ranks', if there is one with room.
        options = {"num_cpus": float(num_threads), "scheduling_strategy": "SPREAD", "max_restarts": 0}
        made = ray.remote(concurrency_groups={_MESSAGES: 1})(EngineActor)
        self._actor: Any = made.options(**options).remote()
        hold(self)
        try:
            self.host = ray.get(self._actor.start.remote(str(log.absolute()).encode()), timeout=PLACE_SECONDS).decode()
        except RayError as error:
            self._end_was_seen.set()
            self.abandon()
            late = isinstance(error, GetTimeoutError)
            raise EngineError(
                "an embedded engine on the Ray cluster",
                seen=f"no node with room within {PLACE_SECONDS:g} s" if late else first_line(error),
                expected=f"a node with {num_threads} free CPUs (num_threads)",
                remedy="add nodes, end what else runs there, or choose a smaller num_threads"
                if late
                else "see the node",
            ) from error
        streaming = self._actor.messages.options(num_returns="streaming", concurrency_group=_MESSAGES)
        self._stream: Any = streaming.remote()

    def send(self, message: bytes) -> None:
        if self._has_ended.is_set():
            raise BrokenPipeError("the process has ended")
        self._actor.send.remote(message)

    def receive(self) -> tuple[bytes, bytes]:
        try:
            return msgspec.msgpack.decode(ray.get(next(self._stream)), type=tuple[bytes, bytes])
        except (StopIteration, RayError) as error:
            self._has_ended.set()
            self._end_was_seen.set()
            raise EOFError from error

    def describe_end(self) -> str:
        if self._is_abandoned:
            return f"it was ended with the ranks, on node {self.host}"
        try:
            how = ray.get(self._actor.describe_end.remote(), timeout=2 * CLOSING_SECONDS).decode()
        except ActorUnavailableError:
            how = "its actor cannot be reached any more"
        except RayError as error:
            how = f"its actor ended: {first_line(error)}"
        return f"{how}, on node {self.host}"

    def close(self) -> None:
        if not self._is_abandoned:
            # If the actor is gone, or hangs, the process goes with it.
            with contextlib.suppress(RayError):
                ray.get(self._actor.close.remote(), timeout=2 * CLOSING_SECONDS)
            self.abandon()

    def abandon(self) -> None:
        """Ends the actor and its process at once. Afterwards no thread here waits for Ray: Ray would make a new
        connection for it."""
        if self._is_abandoned:
            return
        self._is_abandoned = True
        self._has_ended.set()
        ray.kill(self._actor)
        # A thread in `receive` has to see the end first.
        self._end_was_seen.wait(CLOSING_SECONDS)

    def release(self) -> None:
        """Does nothing: nothing is shared with the process."""
