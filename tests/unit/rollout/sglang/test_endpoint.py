from __future__ import annotations

import stat
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.sglang.endpoint import Endpoint, read_endpoint, require_private, write_endpoint

ENDPOINT = Endpoint("http://127.0.0.1:1", "key", "admin", 7)


def test_a_server_file_comes_back_and_only_its_owner_can_read_it(tmp_path: Path):
    path = tmp_path / "server.json"
    write_endpoint(ENDPOINT, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_endpoint(path) == ENDPOINT


def test_keys_do_not_show_in_messages():
    assert "key" not in repr(ENDPOINT)
    assert "admin" not in repr(ENDPOINT)


def test_a_server_file_that_others_may_read_is_refused(tmp_path: Path):
    path = tmp_path / "server.json"
    write_endpoint(ENDPOINT, path)
    path.chmod(0o640)
    with pytest.raises(EngineError, match="others may read"):
        read_endpoint(path)


@pytest.mark.parametrize("content", ["", "[]", '{"url": "x"}', '{"url": 1, "api_key": "", "admin_key": "", "pid": 0}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "server.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(EngineError, match="server file"):
        read_endpoint(path)


def test_a_missing_file_says_how_to_get_one(tmp_path: Path):
    with pytest.raises(EngineError, match="moerl serve"):
        read_endpoint(tmp_path / "server.json")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.4", "172.16.0.1"])
def test_private_addresses_pass(host: str):
    require_private(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "localhost", "example.org", ""])
def test_other_addresses_are_refused(host: str):
    with pytest.raises(EngineError, match="server address"):
        require_private(host)
