"""`ServerLauncher`s: a server that we start, and one that somebody else starts. Run in the engine's process."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from moerl.errors import EngineError
from moerl.rollout.fleet.endpoint import Endpoint, read_endpoint
from moerl.rollout.sglang.server import ServerOptions, SGLangServer, answers_health

_POLL_SECONDS = 0.5
_NUM_STARTS = 3
"""Starts at most of a server that finds a port taken: servers that start side by side can choose the same one."""


class OwnServer:
    """A server of our own: started by `open`, replaced by the next `open`, stopped by `close`.

    Args:
        folder: for its options, keys and log.
        start_seconds: longest start-up.
    """

    def __init__(self, options: ServerOptions, folder: Path, start_seconds: float) -> None:
        self._options, self._folder, self._start_seconds = options, folder, start_seconds
        self._lock, self._is_closed = threading.Lock(), False
        self.server: SGLangServer | None = None

    def open(self) -> Endpoint:
        for attempt in range(_NUM_STARTS):
            server = self._start()
            try:
                server.wait_until_ready(self._start_seconds)
                return server.endpoint
            except EngineError:
                server.stop()
                if attempt + 1 == _NUM_STARTS or not server.lost_a_port:
                    raise
            except BaseException:  # an interrupt, too, leaves nothing behind
                server.stop()
                raise
        raise AssertionError("the last start returns or raises")

    def _start(self) -> SGLangServer:
        with self._lock:
            if self._is_closed:
                raise EngineError("the launcher of SGLang servers is closed", remedy="make another one")
            self._stop()
            self.server = SGLangServer(self._options, self._folder)
            return self.server

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._stop()

    def _stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


class NamedServer:
    """The server of a `moerl serve`; whoever started it starts it again, `open` waits for that.

    Args:
        file: its `server.json`.
        start_seconds: longest wait for it to serve.
    """

    def __init__(self, file: Path, start_seconds: float) -> None:
        self._file, self._start_seconds, self._closed = file, start_seconds, threading.Event()

    def open(self) -> Endpoint:
        deadline = time.monotonic() + self._start_seconds
        while True:
            endpoint = read_endpoint(self._file) if self._file.exists() else None
            if endpoint is not None and answers_health(endpoint):
                return endpoint
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the SGLang server of {self._file}",
                    seen="no such file" if endpoint is None else f"no answer from {endpoint.url}",
                    expected=f"a server that serves within {self._start_seconds} s",
                    remedy="start it with `moerl serve`; its log is next to the file",
                )
            if self._closed.wait(_POLL_SECONDS):
                raise EngineError(f"the SGLang server of {self._file}", seen="closed while it was waited for")

    def close(self) -> None:
        """Ends the waiting of `open`; the server is not ours to stop."""
        self._closed.set()
