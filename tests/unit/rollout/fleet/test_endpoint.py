from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from moerl.errors import EngineError
from moerl.rollout.fleet.endpoint import Endpoint, read_endpoint, require_private, write_endpoint

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


def written(**changes: object) -> bytes:
    return json.dumps(
        {"url": "http://127.0.0.1:1", "api_key": "key", "admin_key": "admin", "pid": 7} | changes
    ).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"3",
        b'{"url": "x"}',
        written(url=1),
        written(pid="7"),
        written(more=1),
        written(url="127.0.0.1:1"),
        written(url="https://127.0.0.1:1"),
        written(url="http://127.0.0.1"),
        written(url="http://127.0.0.1:port"),
        written(url="http://8.8.8.8:1"),
        written(api_key=""),
        written(admin_key="two\nlines"),
        written(api_key="sch\u00fcssel"),
        b"\xff\xfe\x00",
        b"[" * 60_000,
        written() + b" " * 70_000,
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "server.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(EngineError, match=r"server file|server address"):
        read_endpoint(path)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str):
    path = tmp_path / "server.json"
    path.mkdir(0o700) if kind == "folder" else os.mkfifo(path, 0o600)
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
