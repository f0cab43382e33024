"""Addresses of the SGLang servers of a run, before anything of the run starts. Torch-free; the controller."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from moerl.config.placement import LOOPBACK_ADDRESS
from moerl.config.rollouts import RolloutConfig, ServerRolloutConfig
from moerl.errors import EngineError
from moerl.machine.interfaces import interface_variables, own_address
from moerl.processes.parent import is_running
from moerl.rollout.fleet.endpoint import Endpoint, read_endpoint
from moerl.rollout.sglang.server import answers_health


def listen_for_servers(
    rollout: RolloutConfig, environment: MutableMapping[str, str] = os.environ, *, host: str = LOOPBACK_ADDRESS
) -> None:
    """Sets environment variables, so that process groups of this run listen at the address that its servers can reach.

    Args:
        environment: environment of this process; its ranks inherit it.
        host: address of this machine for servers that the run starts.

    Raises:
        EngineError: a server file is missing or unreadable.
    """
    address = host
    if isinstance(rollout, ServerRolloutConfig):
        address = _met_at([read_endpoint(file) for file in rollout.server])
    environment.update(interface_variables(address, environment))


def refuse_ended(endpoint: Endpoint) -> None:
    """Raises `EngineError` if the process of a server on this machine is gone and nothing answers at its address. A
    server that is still starting is no error."""
    parts = urlsplit(endpoint.url)
    is_here = ip_address(parts.hostname or "").is_loopback
    if is_here and endpoint.pid > 0 and not is_running(endpoint.pid) and not answers_health(endpoint):
        raise EngineError(
            f"the SGLang server at {endpoint.url} has ended",
            seen=f"no process {endpoint.pid}, no answer",
            expected="a server that runs",
            remedy="start it again with `moerl serve`; its log is beside the server file",
        )


def _met_at(endpoints: list[Endpoint]) -> str:
    """Returns our own address as seen by the first server that is not on this machine's loopback, else the loopback."""
    for endpoint in endpoints:
        parts = urlsplit(endpoint.url)
        host = parts.hostname or ""
        if not ip_address(host).is_loopback:
            return own_address(host, parts.port or 80)
    return LOOPBACK_ADDRESS
