"""A Ray cluster of several emulated nodes on this machine: each has a raylet of its own, all listen on loopback alone.

Run as a process: it says where the cluster is, then does what each line that it reads asks for: ``add`` a node with so
many CPUs, or ``remove`` one that is not the first. It ends, and the cluster with it, when its input does.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from waiting import status_of

from moerl.processes.parent import die_with

_SPEC = importlib.util.find_spec("ray")
needs_ray = pytest.mark.skipif(
    # The folder `tests/ray` is imported as a package if there is no other one.
    _SPEC is None or _SPEC.origin is None,
    reason="needs Ray: pip install moerl[ray]",
)
START_SECONDS = 240.0


class NodesOfRay:
    """A cluster with a token. cpus: of each node; drivers are part of the first. `variables`: what a driver's
    environment needs besides."""

    def __init__(self, *cpus: int) -> None:
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._cpus = cpus

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), *map(str, self._cpus)],
            env={**os.environ, **self.variables, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status_of(self._process, 60.0)
        finally:
            # Its raylets die with it.
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Id of the process that is the parent of all nodes."""
        return self._process.pid

    def add_node(self, cpus: int) -> None:
        """One more node."""
        self._ask(f"add {cpus}", "added")

    def remove_node(self) -> None:
        """Ends every process of the node that was added last."""
        self._ask("remove", "removed")

    def _ask(self, command: str, answer: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._answer() == answer

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("cluster: "):
                return line.removeprefix("cluster: ").strip()
        raise RuntimeError("the cluster did not start")


def raylet_of(pid: int) -> int:
    """The node of Ray that a process descends from."""
    while not Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _serve(first: int, *others: int) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        # Ray leaves the address of a cluster there, and reads the variable as it is imported.
        os.environ["RAY_TMPDIR"] = folder
        temporary = Path(folder) / "ray"
        temporary.mkdir()
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        cluster = Cluster()
        cluster.add_node(num_cpus=first, include_dashboard=False, temp_dir=str(temporary))
        numbers = itertools.count(2)

        def add(cpus: int) -> None:
            # An address of its own, so that a driver, which is at the first one's, becomes part of the first node.
            cluster.add_node(num_cpus=cpus, temp_dir=str(temporary), node_ip_address=f"127.0.0.{next(numbers)}")

        for cpus in others:
            add(cpus)
        print("cluster:", cluster.address, flush=True)
        for line in sys.stdin:
            if line.startswith("add "):
                add(int(line.split()[1]))
                print("cluster: added", flush=True)
            if line.strip() == "remove":
                cluster.remove_node(sorted(cluster.worker_nodes, key=id)[-1], allow_graceful=False)
                print("cluster: removed", flush=True)
        cluster.shutdown()


if __name__ == "__main__":
    # A test that is killed leaves no cluster: raylets die with this process.
    die_with(int(sys.argv[1]))
    _serve(*map(int, sys.argv[2:]))
