"""HTTP answers are read in one place; the tool that checks it finds a second one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lint_scripts import ROOT, load_script


@pytest.fixture(scope="module")
def check_http() -> Any:
    return load_script("check_http")


def test_make_lint_checks_it():
    assert "$(BIN)/python scripts/check_http.py\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import httpx", "httpx"),
        ("import httpx as h, os", "httpx"),
        ("import aiohttp.client", "aiohttp"),
        ("from aiohttp import ClientSession", "aiohttp"),
        ("import urllib.request", "urllib.request"),
        ("from urllib import request", "urllib.request"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("from http.client import HTTPSConnection", "http.client"),
        ("from http import client", "http.client"),
        ("import requests", "requests"),
        ("def f():\n    import urllib3", "urllib3"),
        ("if TYPE_CHECKING:\n    import httpcore", "httpcore"),
        ("importlib.import_module('httpx')", "httpx"),
        ("import_module('requests.sessions')", "requests"),
        ("__import__('aiohttp')", "aiohttp"),
        ("from jsonschema.validators import validator_for", "jsonschema"),
        ("subprocess.run(['curl', url])", "curl"),
        ("os.system('wget -q ' + url)", "wget"),
    ],
)
@pytest.mark.parametrize("folder", ["moerl/tasks/rewards", "scripts", "bench"])
def test_a_second_reader_is_found(
    folder: str, line: str, name: str, check_http: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_http, "EXCEPTIONS", {})
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "second.py").write_text(f"x = 1\n{line}\n")
    found = check_http.problems(tmp_path)
    assert found
    assert all(each.startswith(f"{folder}/second.py:{name} (line ") for each in found)


@pytest.mark.parametrize(
    "line",
    [
        "from urllib.parse import urlsplit",
        "import http.server",
        "import requests_of_ours",
        "from . import requests",
        "f('httpx')",
        "f('curly')",
    ],
)
def test_what_reads_no_answer_passes(line: str, check_http: Any):
    assert list(check_http.uses(line)) == []


def test_an_exception_that_nothing_needs_is_named(check_http: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_http, "EXCEPTIONS", {"moerl/a.py:httpx": "a reason"})
    assert check_http.problems(tmp_path) == ["moerl/a.py:httpx: no longer used; remove its exception"]
