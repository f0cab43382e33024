"""A language model as a judge, asked over HTTP beside the caller. Runs in the controller, in threads of its own."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from moerl.contract.ports import Prompt
from moerl.errors import ConfigError, RewardError
from moerl.tasks.rewards.process import MakeChild
from moerl.tasks.rewards.scorer import Rewards
from moerl.tasks.rewards.section import JudgeReward
from moerl.telemetry.terminal import excerpt

MAX_ANSWER_BYTES = 1 << 22
"""Longest answer of the address."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
"""Before the first repetition, and at most; each pause is twice the one before, give or take half."""

_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
"""Answers after which the same request may succeed."""


class _FailedError(Exception):
    """A request that gave no reply. pause_seconds: that the address asks for."""

    def __init__(self, cause: str, *, again: bool, pause_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.again, self.pause_seconds = again, pause_seconds


class Judge:
    """Asks for a score of each response.

    Args:
        config: its keys.
        key: of the configuration, which errors name.

    Raises:
        ConfigError: The file with the API key cannot be read.
    """

    def __init__(self, config: JudgeReward, key: str) -> None:
        self._config, self._key = config, key
        headers = {} if config.key_file is None else {"Authorization": f"Bearer {_read_key(config, key)}"}
        limits = httpx.Limits(max_connections=config.workers)
        self._client = httpx.Client(headers=headers, timeout=config.timeout_seconds, limits=limits)
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="judge")
        self._left, self._lock = config.budget, threading.Lock()
        self._is_closed = threading.Event()

    def submit(self, prompt: Prompt, response: str) -> Future[Rewards]:
        return self._pool.submit(self._score, prompt, response)

    @property
    def num_processes(self) -> int:
        return 0

    def place(self, make_child: MakeChild) -> None:
        """Requests are sent from here."""

    def close(self) -> None:
        self._is_closed.set()
        self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _score(self, prompt: Prompt, response: str) -> Rewards:
        config = self._config
        reply = self._ask(self._question(prompt, response))
        found = re.findall(config.pattern, reply)
        try:
            score = (float(found[-1]) - config.lowest) / (config.highest - config.lowest)
        except (IndexError, ValueError) as error:
            raise RewardError(
                "the judge's reply has no score",
                seen=excerpt(reply[-200:], 200),
                expected=f"a number in the group of {config.pattern}",
                remedy=f"ask for it in {self._key}.question, or change {self._key}.pattern",
            ) from error
        if not 0.0 <= score <= 1.0:
            raise RewardError(
                "the judge's score is out of range",
                seen=found[-1],
                expected=f"{config.lowest:g} to {config.highest:g}",
                remedy=f"say the range in {self._key}.question, or change {self._key}.lowest and highest",
            )
        return {"reward": score, "accuracy": float(score >= 1.0)}

    def _question(self, prompt: Prompt, response: str) -> str:
        """The question with its fields; texts that are put in are not looked at again."""
        values: dict[str, Any] = {**prompt.facts, "prompt": prompt.text, "response": response}

        def field(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in values:
                raise RewardError(
                    f"{self._key}.question names a column that the row does not have",
                    seen=f"{{{name}}}",
                    expected=", ".join(values),
                    remedy="name one of the columns",
                )
            value = values[name]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return re.sub(r"\{(\w+)\}", field, self._config.question)

    def _ask(self, question: str) -> str:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(self._config.retries + 1):
            self._spend()
            try:
                return self._request(question)
            except _FailedError as error:
                if not error.again or attempt == self._config.retries or self._is_closed.is_set():
                    raise RewardError(
                        f"the judge at {self._config.url} gave no reply, asked {attempt + 1} times",
                        seen=str(error),
                        expected="a reply of an OpenAI-compatible address",
                        remedy=f"look at the judge; more patience: {self._key}.retries, {self._key}.timeout_seconds",
                    ) from error
                waited = max(pause * random.uniform(0.5, 1.5), error.pause_seconds)
                self._is_closed.wait(min(waited, MAX_PAUSE_SECONDS))
                pause *= 2
        raise AssertionError("the loop returns or raises")

    def _spend(self) -> None:
        with self._lock:
            if self._left is None:
                return
            if self._left == 0:
                raise RewardError(
                    "the judge's budget is spent",
                    seen=f"{self._config.budget} requests",
                    expected="fewer",
                    remedy=f"raise {self._key}.budget, and go on with the run",
                )
            self._left -= 1

    def _request(self, question: str) -> str:
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": config.max_tokens,
        }
        deadline = time.monotonic() + config.timeout_seconds
        try:
            with self._client.stream("POST", f"{config.url.rstrip('/')}/chat/completions", json=body) as answer:
                content = b""
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise _FailedError(f"an answer of more than {MAX_ANSWER_BYTES:,} bytes", again=False)
                    if time.monotonic() > deadline:
                        raise _FailedError(f"no whole answer within {config.timeout_seconds:g} s", again=True)
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            raise _FailedError(f"{type(error).__name__}: {error}", again=True) from error
        if answer.status_code != 200:
            seen = f"status {answer.status_code}: {excerpt(content[:200].decode(errors='replace'), 200)}"
            pause = answer.headers.get("retry-after", "")
            raise _FailedError(
                seen,
                again=answer.status_code in _AGAIN,
                pause_seconds=float(pause) if pause.isdigit() else 0.0,
            )
        return _content(content)


def _content(answer: bytes) -> str:
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _FailedError(
            f"no choices[0].message.content in {excerpt(answer[:200].decode(errors='replace'), 200)}", again=True
        ) from error
    if not isinstance(text, str):
        raise _FailedError(f"a content that is no text: {excerpt(repr(text), 80)}", again=True)
    return text


def _read_key(config: JudgeReward, key: str) -> str:
    assert config.key_file is not None
    try:
        return config.key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{key}.key_file: cannot be read",
            seen=f"{config.key_file}: {error.strerror}",
            expected="a file that holds the key",
            remedy="check the path and its permissions",
        ) from error
