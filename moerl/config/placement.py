"""Needs of `launch` on this machine, and the address at which ranks of a run meet its controller. Torch-free."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from urllib.parse import urlsplit

from moerl.config.schema import LaunchConfig
from moerl.config.trackers import is_package_installed
from moerl.errors import ConfigError
from moerl.machine.interfaces import own_address

LOOPBACK_ADDRESS = "127.0.0.1"
TOKEN_MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Variables that have Ray ask for a token, and that hold it."""
_GPUS = "CUDA_VISIBLE_DEVICES"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray then takes the loopback address for that of this machine, as it does on other systems, and listens there alone.
Its own option for the address turns 127.0.0.1 into the machine's address in the network (2.60)."""


def check_placement(launch: LaunchConfig) -> None:
    """Raises `ConfigError` if `launch` contradicts itself."""
    if launch.address is not None and launch.on != "ray":
        raise ConfigError(
            "launch.address: the address of a Ray cluster that would not be used",
            seen=f"launch.on={launch.on}",
            expected="launch.on=ray",
            remedy="add launch.on=ray, or leave the address away",
        )


def check_ray(
    launch: LaunchConfig,
    environment: Mapping[str, str] = os.environ,
    is_installed: Callable[[str], bool] = is_package_installed,
) -> None:
    """Checks what ``launch.on=ray`` needs here; imports nothing.

    Raises:
        ConfigError: Ray is not installed, or a cluster is to be used without its token.
    """
    if launch.on != "ray":
        return
    if not is_installed("ray"):
        raise ConfigError(
            "launch.on=ray: Ray is not installed",
            seen="no package ray",
            expected="what it needs in the environment of moerl, on every node",
            remedy='pip install "moerl[ray]"',
        )
    if launch.address is not None and environment.get(TOKEN_MODE) != "token":
        raise ConfigError(
            "launch.address: a Ray cluster without a token runs the code of anybody who reaches it",
            seen=f"{TOKEN_MODE}={environment.get(TOKEN_MODE, '')}",
            expected=f"{TOKEN_MODE}=token, here and for the commands that start its nodes",
            remedy="start it as docs/ray.md says, and set the same variables here",
        )


def set_ray_variables(launch: LaunchConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that Ray reads as it is imported; for a cluster on this machine alone the loopback address and
    a token of its own."""
    environment.update(_QUIET)
    if launch.address is None:
        environment.update({**_LOOPBACK, TOKEN_MODE: "token", TOKEN: secrets.token_hex(32)})
    elif launch.address.rpartition(":")[0] in ("localhost", LOOPBACK_ADDRESS):
        environment.update(_LOOPBACK)


def without_ray(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables without Ray's own, its token first of all: for a child of an actor, which is no part of the
    cluster."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}


def shown_gpus(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the GPUs that this process is shown, as CUDA_VISIBLE_DEVICES names them; empty if nothing says it."""
    return environment.get(_GPUS, "")


def show_gpus(gpus: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Shows these GPUs, and no others, to the processes that this one starts from now on."""
    environment[_GPUS] = gpus


def forget_token(launch: LaunchConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Removes the token of this machine's own cluster, once it runs: later child processes are no part of it."""
    if launch.address is None:
        environment.pop(TOKEN, None)


def controller_address(launch: LaunchConfig) -> str:
    """Returns the address at which ranks reach this machine. Raises `ConfigError` if it cannot reach the cluster."""
    if launch.address is None:
        return LOOPBACK_ADDRESS
    parts = urlsplit(f"//{launch.address}")
    try:
        return own_address(parts.hostname or "", parts.port or 80)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "launch.address: not to be reached from here",
            seen=f"{launch.address}: {error}",
            expected="HOST:PORT of a Ray cluster that this machine is part of",
            remedy="take the address that `ray start --head` prints",
        ) from error
