"""Conditions of `launch` on this machine, checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from moerl.config.placement import (
    LOOPBACK_ADDRESS,
    check_placement,
    check_ray,
    controller_address,
    forget_token,
    set_ray_variables,
)
from moerl.config.schema import LaunchConfig
from moerl.errors import ConfigError


def launch(**values: Any) -> LaunchConfig:
    return LaunchConfig(**{"on": "ray", "address": None, **values})


def test_an_address_without_ray_is_refused():
    with pytest.raises(ConfigError, match=r"launch\.address: .*seen: launch\.on=local"):
        check_placement(launch(on="local", address="10.0.0.1:6379"))
    check_placement(launch(address="10.0.0.1:6379"))


def test_a_missing_ray_is_named_with_what_installs_it():
    with pytest.raises(ConfigError, match=r'pip install "moerl\[ray\]"'):
        check_ray(launch(), {}, is_installed=lambda name: name != "ray")
    check_ray(launch(on="local"), {}, is_installed=lambda name: False)


def test_a_cluster_without_a_token_is_refused():
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=disabled"):
        check_ray(launch(address="10.0.0.1:6379"), {"RAY_AUTH_MODE": "disabled"}, is_installed=lambda name: True)
    check_ray(launch(address="10.0.0.1:6379"), {"RAY_AUTH_MODE": "token"}, is_installed=lambda name: True)


def test_a_cluster_of_the_run_gets_a_token_of_its_own_that_later_children_do_not_inherit():
    first, second = {"RAY_AUTH_TOKEN": "another"}, dict[str, str]()
    set_ray_variables(launch(), first)
    set_ray_variables(launch(), second)
    assert first["RAY_AUTH_MODE"] == second["RAY_AUTH_MODE"] == "token"
    assert len({first["RAY_AUTH_TOKEN"], second["RAY_AUTH_TOKEN"], "another"}) == 3
    forget_token(launch(), first)
    assert "RAY_AUTH_TOKEN" not in first


def test_the_token_of_a_cluster_that_runs_is_left_alone():
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs"}
    there = launch(address="10.0.0.1:6379")
    set_ray_variables(there, environment)
    forget_token(there, environment)
    assert environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs", "RAY_USAGE_STATS_ENABLED": "0"}


def test_ranks_on_this_machine_meet_the_controller_on_the_loopback_address():
    assert controller_address(launch()) == LOOPBACK_ADDRESS
    assert controller_address(launch(address="127.0.0.1:6379")) == LOOPBACK_ADDRESS


def test_an_address_that_no_name_server_knows_is_refused():
    with pytest.raises(ConfigError, match=r"launch\.address: not to be reached"):
        controller_address(launch(address="no-such-host.invalid:6379"))
