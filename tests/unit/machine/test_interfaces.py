from __future__ import annotations

import socket

import pytest

from moerl.machine.interfaces import LOOPBACK, interface_of, interface_variables, own_address


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_gloo_and_nccl_listen_on_loopback_where_others_are_met_there(address: str):
    expected = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    assert interface_variables(address, {}) == expected


def test_what_the_user_chose_stays():
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": ""}
    assert interface_variables("127.0.0.1", chosen) == {"NCCL_SOCKET_IFNAME": LOOPBACK}


def test_an_interface_is_found_by_its_address():
    own = own_address("192.0.2.1", 9)  # nothing is sent
    if own == "127.0.0.1":
        pytest.skip("this machine has no network")
    assert interface_of(own) in {name for _, name in socket.if_nameindex()} - {LOOPBACK}


@pytest.mark.parametrize("address", ["203.0.113.254", "2001:db8::fe"])
def test_an_address_that_this_machine_has_not_has_no_interface(address: str):
    assert interface_of(address) is None
    assert interface_variables(address, {}) == {}


def test_a_server_on_this_machine_reaches_us_at_the_address_that_it_listens_on():
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
