"""Secrecy of a live server's keys: no answer to the sampling key, error or log shows one; files are the owner's."""

from __future__ import annotations

import stat

import httpx
import pytest
import sglang_live

from moerl.rollout.sglang.server import SGLangServer

pytestmark = pytest.mark.sglang


def get(server: SGLangServer, path: str, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(server.endpoint.url + path, headers=headers, timeout=300.0, trust_env=False)


def shows_a_key(server: SGLangServer, text: str) -> bool:
    return server.endpoint.api_key in text or server.endpoint.admin_key in text


def test_no_answer_to_the_sampling_key_shows_a_key(server: SGLangServer):
    key = server.endpoint.api_key
    paths = [path for path, calls in get(server, "/openapi.json", key).json()["paths"].items() if "get" in calls]
    assert {"/server_info", "/get_server_info", "/model_info"} <= set(paths)
    assert [path for path in paths if shows_a_key(server, get(server, path, key).text)] == []
    info = get(server, "/server_info", key).json()
    assert [info["api_key"], info["admin_api_key"]] == ["[redacted]"] * 2
    assert info["launch_command"].count("[redacted]") == 2
    assert info["internal_states"][0]["admin_api_key"] == "[redacted]"
    assert not shows_a_key(server, get(server, "/server_info", server.endpoint.admin_key).text)


def test_no_error_shows_a_key(server: SGLangServer):
    for body in ({}, {"input_ids": [1], "sampling_params": {"temperature": -1}}, {"text": "needs a tokenizer"}):
        answer = sglang_live.post(server.endpoint, "/generate", body)
        assert answer.status_code != 200
        assert not shows_a_key(server, answer.text)


def test_what_is_on_the_disk_is_the_owners_alone_and_the_log_shows_no_key(server: SGLangServer):
    log = server.log.read_text()
    assert "admin_api_key" in log
    assert not shows_a_key(server, log)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (server.folder, *server.folder.iterdir())}
    assert modes.pop(server.folder.name) == 0o700
    assert set(modes.values()) == {0o600}, modes
