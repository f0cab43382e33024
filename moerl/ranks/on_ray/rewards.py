"""Reward processes on the nodes of the cluster: each node has one actor, which is the parent of its processes.

Requests and replies are those of `moerl.tasks.rewards.worker`, and `moerl.tasks.rewards.child` runs on the node: a
function that hangs, crashes or takes too much memory is ended there. Functions work in the controller's directory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from moerl.errors import EngineError
from moerl.processes.parent import die_with
from moerl.ranks.on_ray.cluster import hold
from moerl.ranks.on_ray.library import OnNode, RayError, first_line, ray, start_actor
from moerl.tasks.rewards.child import MAX_REPLY_BYTES, ChildLostError, Loss, RewardChild
from moerl.telemetry.terminal import ShownLines

_PRINTED_BYTES = 1 << 20
"""Bytes, at most, of a function's output in one call that are sent to the controller."""


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to a request: the reply as JSON, or how the process was lost; and the output meanwhile."""

    printed: bytes
    reply: bytes = b""
    lost: str = ""
    kind: Loss = "other"


class _Kept(ShownLines):
    """Output that is kept for the controller to show."""

    def __init__(self) -> None:
        super().__init__("")
        self._data = b""

    def feed(self, data: bytes, stream: TextIO) -> None:
        self._data = (self._data + data)[:_PRINTED_BYTES]

    def take(self) -> bytes:
        data, self._data = self._data, b""
        return data


class RewardHost:
    """The reward processes of a node. Several methods run at a time; those of one process come one by one, except
    `end`."""

    def __init__(self) -> None:
        die_with(os.getppid())
        self._children: dict[int, tuple[RewardChild, _Kept]] = {}

    def open(self, number: int, memory_bytes: int, folder: bytes) -> bytes:
        """Starts the process `number`, which works in `folder`."""
        kept = _Kept()
        self._children[number] = RewardChild(memory_bytes, kept, Path(folder.decode())), kept
        return b""

    def ask(self, number: int, message: bytes, timeout_seconds: float, max_reply_bytes: int) -> bytes:
        """Has a process answer a request; returns `_Said`, in MessagePack."""
        child, kept = self._children[number]
        try:
            reply = child.ask(json.loads(message), timeout_seconds, max_reply_bytes=max_reply_bytes)
        except ChildLostError as lost:
            del self._children[number]
            said = _Said(kept.take(), b"", str(lost), lost.kind)
        else:
            said = _Said(kept.take(), json.dumps(reply).encode())
        return msgspec.msgpack.encode(said)

    def end(self, number: int) -> bytes:
        """Calls `ChildProcess.end` of a process, if the process is still there."""
        found = self._children.get(number)
        if found is not None:
            found[0].end()
        return b""

    def kill(self, number: int) -> bytes:
        """Calls `ChildProcess.kill` of a process; returns what the process printed to the end."""
        child, kept = self._children.pop(number)
        child.kill()
        return kept.take()


class RewardHosts:
    """Starter of reward processes, in turns on all nodes of the cluster that are alive.

    Args:
        num_processes: processes at a time, at most.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_threads, self._numbers = 2 * num_processes + 2, itertools.count()
        self._lock, self._is_closed = threading.Lock(), False
        self._hosts: dict[str, Any] = {}
        # Ray takes a while to notice that a node is gone; one that comes back has another id.
        self._lost: set[str] = set()
        hold(self)

    def child(self, memory_bytes: int, shown: ShownLines) -> RemoteChild:
        """Starts a process on the next node. Raises `ChildLostError` if that node is lost right then."""
        number = next(self._numbers)
        node_id, address, host = self._next(number)
        child = RemoteChild(host, number, address, shown, lambda: self._lost.add(node_id))
        child.open(memory_bytes)
        return child

    def abandon(self) -> None:
        """Ends all processes at once. Afterwards no thread here waits for Ray."""
        with self._lock:
            self._is_closed = True
            for host in self._hosts.values() if ray.is_initialized() else ():
                ray.kill(host)
            self._hosts.clear()

    def _next(self, number: int) -> tuple[str, str, Any]:
        """Returns the id and address of a node that is alive, and its `RewardHost`."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the hosts of rewards are closed", remedy="start the run again")
            all_alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
            alive = {node_id: all_alive[node_id] for node_id in all_alive.keys() - self._lost} or all_alive
            for gone in self._hosts.keys() - alive.keys():
                del self._hosts[gone]
            node_id = sorted(alive)[number % len(alive)]
            if node_id not in self._hosts:
                # No CPUs are reserved: reward processes run next to ranks and engines, which need theirs.
                place = OnNode(node_id, soft=False)
                self._hosts[node_id] = start_actor(
                    RewardHost, num_cpus=0.0, scheduling_strategy=place, max_concurrency=self._num_threads
                )
            return node_id, alive[node_id], self._hosts[node_id]


class RemoteChild:
    """A `ChildProcess` on a node of the cluster. It works in this process's directory, which that node sees, too.

    Args:
        host, number: actor of the node, and number of the process there. node: address of the node, for messages.
        on_loss: called if the node is lost.
    """

    def __init__(self, host: Any, number: int, node: str, shown: ShownLines, on_loss: Callable[[], None]) -> None:
        self._host, self._number, self._node, self._shown, self._on_loss = host, number, node, shown, on_loss
        self._is_gone = False

    def open(self, memory_bytes: int) -> None:
        """Starts the process."""
        self._call(self._host.open.remote(self._number, memory_bytes, os.getcwd().encode()))

    def ask(
        self, message: Mapping[str, Any], timeout_seconds: float, *, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> dict[str, Any]:
        if not ray.is_initialized():
            # A call would make a new connection, and wait for ever.
            raise ChildLostError(f"node {self._node}: the run has left its Ray cluster")
        content = json.dumps(message).encode()
        answer = self._call(self._host.ask.remote(self._number, content, timeout_seconds, max_reply_bytes))
        said = msgspec.msgpack.decode(answer, type=_Said)
        self._show(said.printed)
        if said.lost:
            self._is_gone = True
            raise ChildLostError(f"{said.lost}, on node {self._node}", kind=said.kind)
        return json.loads(said.reply)

    def end(self) -> None:
        if ray.is_initialized():
            self._host.end.remote(self._number)

    def kill(self) -> None:
        if self._is_gone or not ray.is_initialized():
            return
        self._is_gone = True
        with contextlib.suppress(RayError):  # gone with its node
            self._show(ray.get(self._host.kill.remote(self._number)))

    def _call(self, asked: Any) -> bytes:
        try:
            return ray.get(asked)
        except RayError as error:
            self._is_gone = True
            self._on_loss()
            raise ChildLostError(f"node {self._node} was lost: {first_line(error)}", kind="outside") from error

    def _show(self, printed: bytes) -> None:
        self._shown.feed(printed, sys.stderr)
