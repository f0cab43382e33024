"""A Hugging Face hub with data sets or models from memory, on loopback; the real client library talks to it by HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from huggingface_hub import constants

from moerl.machine.hub import locate

Sets = Mapping[str, Mapping[str, Mapping[str, bytes]]]
"""Files by name, by revision, by OWNER/NAME."""


@contextmanager
def hub(
    sets: Sets,
    *,
    kind: Literal["datasets", "models"] = "datasets",
    heads: Mapping[str, str] | None = None,
    gated: Sequence[str] = (),
) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that were asked for.

    heads: commits of branches that are not as `commit_of` says; may change meanwhile, as `sets` may. gated: names whose
    files nobody gets.
    """
    asked: list[str] = []

    class Handler(_Handler):
        hub_sets, hub_asked, hub_heads, hub_gated = sets, asked, {} if heads is None else heads, gated
        hub_api, hub_files = f"/api/{kind}", "/datasets" if kind == "datasets" else ""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client_environment(address: str, home: Path, **others: str) -> dict[str, str]:
    """Returns the environment of a process that asks the hub at `address` and has its cache in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("HF_HUB_OFFLINE", None)
    return {**kept, "HF_ENDPOINT": address, "HF_HOME": str(home), **others}


def commit_of(revision: str) -> str:
    """The commit that a revision stands for."""
    return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()


class Cache:
    """A cache of the hub, which the library uses for the time of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)

    def use(self, home: Path, address: str = "", *, offline: bool = False) -> None:
        """Sets cache and hub as the environment of a new process would; without an address the hub stays."""
        self.home = home
        self._patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        self._patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        if address:
            self._patch.setattr(constants, "ENDPOINT", address)
            template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            self._patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        locate.cache_clear()

    def snapshot(self, commit: str) -> Path:
        return self.home / "hub" / "models--owner--moe" / "snapshots" / commit

    @property
    def files(self) -> set[str]:
        """Names of files in snapshots."""
        return {file.name for file in self.home.glob("hub/models--*/snapshots/*/*")}


class _Handler(BaseHTTPRequestHandler):
    hub_sets: Sets
    hub_asked: list[str]
    hub_heads: Mapping[str, str]
    hub_gated: Sequence[str]
    hub_api: str
    hub_files: str

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub_asked.append(path)
        for name, revisions in self.hub_sets.items():
            for revision, files in revisions.items():
                commit = self.hub_heads.get(revision, commit_of(revision))
                if path == f"{self.hub_api}/{name}" and revision == "main":
                    return self._about(name, commit, files)
                for known in (revision, commit):
                    if path == f"{self.hub_api}/{name}/revision/{known}":
                        return self._about(name, commit, files)
                    tree, file = f"{self.hub_api}/{name}/tree/{known}", f"{self.hub_files}/{name}/resolve/{known}/"
                    if path == tree or path.startswith(f"{tree}/"):
                        return self._tree(files, path.removeprefix(tree).strip("/"))
                    if path.startswith(file) and name in self.hub_gated:
                        return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
                    if path.startswith(file) and path.removeprefix(file) in files:
                        return self._file(files[path.removeprefix(file)], commit)
        return self._send(404, b'{"error": "not found"}', {"X-Error-Code": self._missing(path)})

    def _missing(self, path: str) -> str:
        """The code of an answer about what is not there."""
        if any(path.startswith(f"{self.hub_api}/{name}/revision/") for name in self.hub_sets):
            return "RevisionNotFound"
        is_known = any(path.startswith(f"{self.hub_files}/{name}/") for name in self.hub_sets)
        return "EntryNotFound" if is_known else "RepoNotFound"

    do_HEAD = do_GET

    def _about(self, name: str, commit: str, files: Mapping[str, bytes]) -> None:
        plain = {"id": name, "_id": "1", "sha": commit, "private": False, "disabled": False, "gated": False}
        found = {**plain, "downloads": 0, "likes": 0, "tags": [], "siblings": [{"rfilename": each} for each in files]}
        self._send(200, json.dumps(found).encode(), {})

    def _tree(self, files: Mapping[str, bytes], folder: str) -> None:
        inside = {each: data for each, data in files.items() if each.startswith(folder)}
        found = [
            {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for each, data in inside.items()
        ]
        self._send(200, json.dumps(found).encode(), {})

    def _file(self, data: bytes, commit: str) -> None:
        about = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._send(200, data, about)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last or len(data)) + 1]
        about["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self._send(206, part, about)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
