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
    if isinstance(rollout, ServerRolloutConfig):
        parts = [urlsplit(read_endpoint(file).url) for file in rollout.server]
        away = [each for each in parts if not ip_address(each.hostname or "").is_loopback]
        # Our own address as the first server on another machine sees it.
        host = own_address(away[0].hostname or "", away[0].port or 80) if away else LOOPBACK_ADDRESS
    environment.update(interface_variables(host, environment))


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
            remedy="start it again with `moerl serve`; its log is next to the server file",
        )
