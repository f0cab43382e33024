"""A Hugging Face hub with data sets from memory, on loopback: the real client library talks to it over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Sets = Mapping[str, Mapping[str, Mapping[str, bytes]]]
"""Files by name, by revision, by OWNER/NAME."""


@contextmanager
def hub(sets: Sets) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(_Handler):
        hub_sets, hub_asked = sets, asked

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def commit_of(revision: str) -> str:
    """The commit that a revision stands for."""
    return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub_sets: Sets
    hub_asked: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub_asked.append(path)
        for name, revisions in self.hub_sets.items():
            for revision, files in revisions.items():
                commit = commit_of(revision)
                if path == f"/api/datasets/{name}" and revision == "main":
                    return self._about(name, commit, files)
                for known in (revision, commit):
                    if path == f"/api/datasets/{name}/revision/{known}":
                        return self._about(name, commit, files)
                    tree, file = f"/api/datasets/{name}/tree/{known}", f"/datasets/{name}/resolve/{known}/"
                    if path == tree or path.startswith(f"{tree}/"):
                        return self._tree(files, path.removeprefix(tree).strip("/"))
                    if path.startswith(file) and path.removeprefix(file) in files:
                        return self._file(files[path.removeprefix(file)], commit)
        code = (
            "EntryNotFound" if any(path.startswith(f"/datasets/{name}/") for name in self.hub_sets) else "RepoNotFound"
        )
        return self._send(404, b'{"error": "not found"}', {"X-Error-Code": code})

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
