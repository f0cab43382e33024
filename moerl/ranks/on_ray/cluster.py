"""The Ray cluster of a run: started on this machine and stopped with the run, or one that was started before and stays.
Runs in the controller.

A cluster that the run starts listens on the loopback address alone, lets in nobody without the token that was made for
it, has no dashboard and reports to nobody. Owners of actors, ranks apart, end their actors before the shared connection
is given up.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakSet

from moerl.config.placement import forget_token
from moerl.config.ranks import RankConfig, cluster_cpus, rank_threads
from moerl.errors import ConfigError, TrainerError, undoing
from moerl.processes.spared import sparing
from moerl.ranks.on_ray.library import AtBundle, RayError, ray, util

REACH_SECONDS = 10.0
"""Seconds for the head of a cluster to accept a connection."""
PLACE_SECONDS = 60.0
"""Seconds for all ranks to get a place on the nodes."""
_LONGEST_FOLDER = 24
"""Most characters in the path of the folder for temporary files: Ray adds 75 to this path for its sockets, whose paths
have at most 107."""


class Cluster:
    """This process as a driver of a cluster, until it is closed. Main thread.

    Raises:
        ConfigError: no cluster could be started or reached, or it is of another version.
    """

    def __init__(self, config: RankConfig) -> None:
        self._folder: str | None = None
        self._group: Any = None
        launch = config.launch
        self._cpus = rank_threads(config, "sft")
        options: dict[str, Any] = {"address": launch.address}
        if launch.address is None:
            usual = tempfile.gettempdir()
            self._folder = tempfile.mkdtemp(prefix="moerl-", dir=usual if len(usual) <= _LONGEST_FOLDER else "/tmp")
            options = {
                "address": "local",
                "num_cpus": cluster_cpus(config),
                "include_dashboard": False,
                "_temp_dir": self._folder,
            }
        with undoing(self.close):  # an interrupt, too, leaves nothing running
            try:
                if launch.address is not None:
                    # If nobody listens there, Ray itself tries for many minutes.
                    parts = urlsplit(f"//{launch.address}")
                    socket.create_connection((parts.hostname or "", parts.port or 0), REACH_SECONDS).close()
                # Stop signals to all processes of the run do not reach a cluster that the run starts.
                with _own_signals(), sparing() if launch.address is None else contextlib.nullcontext():
                    ray.init(log_to_driver=False, logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, OSError, ValueError, RayError) as error:
                raise _unreached(launch.address, error) from error
        forget_token(launch)

    def reserve(self, ranks: int) -> list[dict[str, Any]]:
        """Reserves places for so many ranks, and returns them as options of their actors, with ranks of a node next to
        one another: a GPU for each if the cluster has GPUs.

        Raises:
            TrainerError: the cluster has no room for them.
        """
        need = {"CPU": float(self._cpus)}
        if has_gpus():
            need["GPU"] = 1.0
        total = ray.cluster_resources()
        short = [name for name, each in need.items() if total.get(name, 0.0) < each * ranks]
        group = self._group = None if short else util.placement_group([need] * ranks, strategy="PACK")
        if group is None or not group.wait(PLACE_SECONDS):
            there = ray.available_resources()
            raise TrainerError(
                f"the Ray cluster has no room for {ranks} ranks",
                seen=", ".join(f"{there.get(name, 0.0):g} of {total.get(name, 0.0):g} {name} free" for name in need),
                expected=", ".join(f"{each * ranks:g} {name}" for name, each in need.items()),
                remedy="add nodes, end what else runs there, or choose smaller parallel sizes or num_threads",
            )
        nodes = util.placement_group_table(group)["bundles_to_node_id"]
        own = ray.get_runtime_context().get_node_id()
        order = sorted(nodes, key=lambda bundle: (nodes[bundle] != own, nodes[bundle], bundle))
        devices = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0.0)}
        return [{**devices, "scheduling_strategy": AtBundle(group, bundle)} for bundle in order]

    def live_nodes(self) -> set[str]:
        """Returns the ids of the nodes that are in the cluster now."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def close(self) -> None:
        """Leaves the cluster; stops it if this run started it. A second call is harmless."""
        # The cluster itself may be lost.
        with contextlib.suppress(RayError, ConnectionError):
            if self._group is not None:
                util.remove_placement_group(self._group)
        self._group = None
        with _own_signals():
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def has_gpus() -> bool:
    """Returns whether the cluster that this process is part of has a GPU."""
    return ray.cluster_resources().get("GPU", 0.0) >= 1.0


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the run's handler of SIGTERM after the block, in which Ray sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unreached(address: str | None, error: Exception) -> ConfigError:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    seen = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
    if address is None:
        return ConfigError(
            "launch.on=ray: no Ray cluster could be started on this machine",
            seen=seen,
            expected="a cluster of one node",
            remedy="see the cause; `launch.on=local` needs no Ray",
        )
    return ConfigError(
        f"launch.address: no way into the Ray cluster at {address}",
        seen=seen,
        expected="a node of that cluster on this machine, of the same versions of Ray and Python, and its token in"
        " RAY_AUTH_TOKEN or a file",
        remedy="start the run on one of its nodes, with the variables that they were started with (docs/ray.md)",
    )


# --- owners of actors ------------------------------------------------------------------------------------------------


class Held(Protocol):
    """Owner of actors."""

    def abandon(self) -> None:
        """Ends its actors at once. Afterwards none of its threads waits for Ray: one that still did would wait for
        ever."""


_held: WeakSet[Held] = WeakSet()
"""Owners of actors in this process."""


def hold(held: Held) -> None:
    """Has `abandon_all` abandon an owner, unless it has been garbage-collected by then."""
    _held.add(held)


def abandon_all() -> None:
    """Abandons all owners of actors."""
    for held in list(_held):
        held.abandon()
