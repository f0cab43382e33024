"""Scorer ``kind=server``: log-probs of sampled tokens under the model of an SGLang server, asked over HTTP.

The server may be any release, and needs no patch. Threads of the controller send the requests.
"""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moerl.contract.trajectory import Trajectory
from moerl.errors import ScoreError, closing
from moerl.http.client import BlockingClient, NoAnswerError, Request, decoded, excerpt_of
from moerl.http.keys import read_key
from moerl.scorers.section import ScorerSection
from moerl.sections import CountOrZero, FilePath, HttpAddress, Positive

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first repetition of a request; each is twice the one before, give or take half."""
REACH_SECONDS = 10.0
"""Longest time of a look whether a server is there."""
MAX_TOKEN_BYTES = 200
"""Bytes of an answer for each token, at most."""
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which the same request may succeed."""


class ServerScorer(ScorerSection):
    """Log-prob of each sampled token under the model of an SGLang server with the same tokens, over its vocabulary and
    at a temperature of 1."""

    kind: Literal["server"]
    """Chooses this kind."""
    url: HttpAddress = Field(description="Address of the server, for example http://10.0.0.7:30000.")
    key_file: FilePath | None = Field(default=None, description="File of mode 0600 that holds the API key alone.")
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(default=16, description="Most requests side by side.")
    timeout_seconds: Positive = Field(default=600.0, description="Longest time of one request.")
    retries: CountOrZero = Field(default=5, description="Further requests if one fails.")

    only_at_one = True

    def check_files(self, key: str, vocab_size: int | None) -> None:
        if self.key_file is not None:
            read_key(self.key_file, f"{key}.key_file")

    @property
    def service(self) -> str:
        return self.url

    def reach(self, key: str) -> None:
        once = self.model_copy(update={"retries": 0, "timeout_seconds": min(self.timeout_seconds, REACH_SECONDS)})
        with closing(AskedServer(once, key)) as server:
            server.start()

    def open(self, key: str, log: Path) -> AskedServer:
        return AskedServer(self, key)


class _Meta(msgspec.Struct):
    """Part of an answer that is read."""

    input_token_logprobs: list[tuple[float | None, int, Any]]
    """Log-prob, id and text of each token from `logprob_start_len` on."""


class _Answer(msgspec.Struct):
    """An answer of ``/generate``; all else in it is passed over."""

    meta_info: _Meta


_ANSWER = msgspec.json.Decoder(_Answer)


class AskedServer:
    """A `TokenScorer` by requests to a server.

    Args:
        settings: address, key and limits.
        key: path of the settings, for errors.

    Raises:
        ConfigError: the file with the API key cannot be read, is open to others, or holds something else.
    """

    def __init__(self, settings: ServerScorer, key: str) -> None:
        self._settings, self._path = settings, key
        self._key = None if settings.key_file is None else read_key(settings.key_file, f"{key}.key_file")
        self._client = BlockingClient(max_connections=settings.workers, uses_proxies=True)
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="scorer")
        self._is_closed = threading.Event()

    def start(self) -> None:
        self._ask("/model_info", None, 1 << 20)

    def submit(self, trajectory: Trajectory) -> Future[NDArray[np.float32]]:
        if self._is_closed.is_set():
            future: Future[NDArray[np.float32]] = Future()
            future.set_exception(ScoreError(f"{self._path}: the scorer is closed", expected="scores asked for before"))
            return future
        return self._pool.submit(self._score, trajectory)

    def close(self) -> None:
        self._is_closed.set()
        # Cancel waiting calls first: a free thread would begin the next one.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _score(self, trajectory: Trajectory) -> NDArray[np.float32]:
        ids = trajectory.token_ids.tolist()
        # The server gives the first of these tokens no log-prob.
        first = int(trajectory.sampled.argmax()) - 1
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": first,
        }
        content = self._ask("/generate", json.dumps(body).encode(), MAX_TOKEN_BYTES * len(ids) + (1 << 16))
        try:
            found = decoded(content, _ANSWER.decode).meta_info.input_token_logprobs
        except NoAnswerError as error:
            raise self._failed(f"{error.what}: {error.seen}: {excerpt_of(content, self._key)}") from error
        if [token for _, token, _ in found] != ids[first:]:
            raise self._failed(f"{len(found)} tokens from {first} on, and others than were sent ({len(ids) - first})")
        scores = np.zeros(len(ids), np.float32)
        scores[first:] = [np.nan if logprob is None else logprob for logprob, _, _ in found]
        scores[~trajectory.sampled] = 0.0
        if not np.isfinite(scores).all():
            raise self._failed(f"no finite log-prob of token {int(np.flatnonzero(~np.isfinite(scores))[0])}")
        return scores

    def _ask(self, path: str, body: bytes | None, max_bytes: int) -> bytes:
        """Returns the body of an answer with status 200; asks again if that may help."""
        request = Request("GET" if body is None else "POST", f"{self._settings.url.rstrip('/')}{path}", body, self._key)
        for attempt in range(self._settings.retries + 1):
            try:
                answer = self._client.ask(request, max_bytes, self._settings.timeout_seconds)
            except NoAnswerError as error:
                seen, again = f"{error.what}: {error.seen}", True
            else:
                if answer.status == 200:
                    return answer.content
                seen = f"status {answer.status}: {excerpt_of(answer.content, self._key)}"
                again = answer.status in _AGAIN
            if not again or attempt == self._settings.retries or self._is_closed.is_set():
                raise self._failed(f"{seen}; asked {attempt + 1} times")
            self._is_closed.wait(FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
        raise AssertionError("the loop returns or raises")

    def _failed(self, seen: str) -> ScoreError:
        return ScoreError(
            f"{self._path}: the server at {self._settings.url} does not score",
            seen=seen,
            expected="the log-prob of each sampled token",
            remedy=f"look at the server, then go on with the run; more patience: {self._path}.retries",
        )
