"""What a run needs of its SGLang servers, checked before anything of the run starts. Torch-free; first process."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from moerl.config.interfaces import interface_variables, own_address
from moerl.config.placement import LOOPBACK_ADDRESS
from moerl.config.rollouts import RolloutConfig, ServerRolloutConfig, SGLangRolloutConfig
from moerl.errors import EngineError
from moerl.rollout.fleet.endpoint import Endpoint, read_endpoint
from moerl.rollout.sglang.install import device_of, site_packages
from moerl.rollout.sglang.patches import verify_installation
from moerl.rollout.sglang.server import answers_health
from moerl.rollout.sglang.server_args import check_server_args


def prepare_for_servers(
    rollout: RolloutConfig, environment: MutableMapping[str, str] = os.environ, *, host: str = LOOPBACK_ADDRESS
) -> None:
    """Checks what servers will need, and has process groups of this run listen where its servers are met.

    Args:
        environment: of this process; its ranks inherit it.
        host: address of this machine for servers of our own.

    Raises:
        EngineError: the servers' environment is missing or not this version's; a server file is missing or unreadable,
            or of a server that has ended; an argument that is passed on is unknown there.
    """
    address = host
    if isinstance(rollout, SGLangRolloutConfig):
        device_of(rollout.environment)
        verify_installation(site_packages(rollout.environment))
        check_server_args(rollout.environment, rollout.server_args)
    elif isinstance(rollout, ServerRolloutConfig):
        endpoints = [read_endpoint(file) for file in rollout.server]
        for endpoint in endpoints:
            _refuse_ended(endpoint)
        address = _met_at(endpoints)
    environment.update(interface_variables(address, environment))


def _refuse_ended(endpoint: Endpoint) -> None:
    """A server that starts is waited for; one whose process is gone never answers."""
    parts = urlsplit(endpoint.url)
    is_here = ip_address(parts.hostname or "").is_loopback
    if is_here and endpoint.pid > 0 and not _is_running(endpoint.pid) and not answers_health(endpoint):
        raise EngineError(
            f"the SGLang server at {endpoint.url} has ended",
            seen=f"no process {endpoint.pid}, no answer",
            expected="a server that runs",
            remedy="start it again with `moerl serve`; its log is beside the server file",
        )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _met_at(endpoints: list[Endpoint]) -> str:
    """Our own address as the first server sees it that is not on this machine's loopback."""
    for endpoint in endpoints:
        parts = urlsplit(endpoint.url)
        host = parts.hostname or ""
        if not ip_address(host).is_loopback:
            return own_address(host, parts.port or 80)
    return LOOPBACK_ADDRESS
