"""SGLang servers of a run as actors: each on a node that has room for it, replaced on another one if that is lost.

A server that shares the devices of ranks (`moerl.ranks.on_ray.shared`) is on their node, also when it is replaced. Ray
counts these devices once, for the ranks.

The actor is the parent of the server's process, which ends with the actor; the actor ends with the controller, or its
node's Ray. Keys and address reach the controller in the server's file in the run directory, not through Ray.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from moerl.config.placement import show_gpus
from moerl.errors import EngineError
from moerl.processes.parent import die_with
from moerl.ranks.on_ray.cluster import hold
from moerl.ranks.on_ray.library import GetTimeoutError, OnNode, RayError, ray, start_actor
from moerl.ranks.on_ray.messages import NodeFacts
from moerl.rollout.fleet.endpoint import Endpoint, read_endpoint
from moerl.rollout.sglang.launchers import OwnServer
from moerl.rollout.sglang.server import ENDPOINT_FILE, ServerOptions

PLACE_SECONDS = 300.0
"""Seconds for an actor to find a node and start; a node that was lost may come back."""
STOP_SECONDS = 30.0


class ServerActor:
    """One server. Its methods take and return byte strings."""

    def __init__(self) -> None:
        die_with(os.getppid())
        self._server: OwnServer | None = None

    def node(self) -> bytes:
        """Returns the address of the actor's node."""
        return str(ray.util.get_node_ip_address()).encode()

    def open(self, options: bytes, folder: bytes, start_seconds: float, gpus: str) -> bytes:
        """Starts the server, and returns an empty answer when it is ready, else why it is not.

        Args:
            options: JSON.
            gpus: that the server sees; empty leaves it those that Ray has given the actor.
        """
        told = msgspec.json.decode(options, type=ServerOptions, dec_hook=lambda kind, text: kind(text))
        here = replace(told, host=ray.util.get_node_ip_address())
        if told.device != "cpu":
            # This process sees no GPUs but the server's.
            here = replace(here, first_device=0)
        if gpus:
            show_gpus(gpus)
        self._server = OwnServer(here, Path(folder.decode()), start_seconds)
        try:
            self._server.open()
        except EngineError as error:
            return "\n".join([str(error), *getattr(error, "__notes__", ())]).encode()
        return b""

    def close(self) -> bytes:
        """Stops the server."""
        if self._server is not None:
            self._server.close()
        return b""


class RemoteServer:
    """A `ServerLauncher`: a server on any node of the cluster that has room, or on that of some ranks.

    Args:
        options: as in `OwnServer`; the host is that of the node. folder: in a file system that all nodes see.
        start_seconds: longest start-up.
        ranks: whose devices the server shares; empty for devices of its own.
    """

    def __init__(
        self, options: ServerOptions, folder: Path, start_seconds: float, ranks: Sequence[NodeFacts] = ()
    ) -> None:
        self._options, self._folder, self._start_seconds = options, folder.absolute(), start_seconds
        self._ranks, self._gpus = ranks, ",".join(rank.gpus for rank in ranks) if options.device != "cpu" else ""
        self._lock, self._is_closed = threading.Lock(), False
        self._opening = threading.Lock()
        self._actor: Any = None
        hold(self)

    def open(self) -> Endpoint:
        with self._opening:
            with self._lock:
                if self._is_closed:
                    raise EngineError("the launcher of SGLang servers is closed", remedy="make another one")
                self._end(wait=True)
                actor = self._actor = start_actor(ServerActor, **self._place())
            try:
                node = ray.get(actor.node.remote(), timeout=PLACE_SECONDS).decode()
                options = msgspec.json.encode(self._options, enc_hook=str)
                folder = str(self._folder).encode()
                problem = ray.get(actor.open.remote(options, folder, self._start_seconds, self._gpus)).decode()
            except GetTimeoutError as error:
                seen = f"no node with room within {PLACE_SECONDS:g} s"
                raise self._failure(seen, "add nodes, or take fewer servers") from error
            except RayError as error:
                raise self._failure(str(error).strip().splitlines()[0], "look at the node") from error
            if problem:
                raise self._failure(f"on node {node}: {problem}", f"read {self._folder}")
            return read_endpoint(self._folder / ENDPOINT_FILE)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._end(wait=True)

    def abandon(self) -> None:
        """Does the same as `close` without waiting for the server. Afterwards no thread here waits for Ray."""
        with self._lock:
            self._is_closed = True
            self._end(wait=False)
        # An `open` under way has to end first.
        if self._opening.acquire(timeout=STOP_SECONDS):
            self._opening.release()

    def _place(self) -> dict[str, Any]:
        """Returns the options by which the actor asks Ray for a node and devices."""
        if self._ranks:
            return {"num_gpus": 0.0, "num_cpus": 0.0, "scheduling_strategy": OnNode(self._ranks[0].node_id, soft=False)}
        kind, other = ("num_cpus", "num_gpus") if self._options.device == "cpu" else ("num_gpus", "num_cpus")
        return {kind: float(self._options.tensor), other: 0.0, "scheduling_strategy": "SPREAD"}

    def _end(self, *, wait: bool) -> None:
        actor, self._actor = self._actor, None
        if actor is None or not ray.is_initialized():
            return
        if wait:
            # If the actor is gone, or hangs in a start, its server goes with it.
            with contextlib.suppress(RayError):
                ray.get(actor.close.remote(), timeout=STOP_SECONDS)
        ray.kill(actor)

    def _failure(self, seen: str, remedy: str) -> EngineError:
        what = "an SGLang server on the Ray cluster"
        return EngineError(what, seen=seen, expected="a server that serves", remedy=remedy)
