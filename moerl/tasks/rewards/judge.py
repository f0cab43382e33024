"""A language model as a judge, asked over HTTP. Runs in the controller, in threads of its own."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any

import msgspec

from moerl.contract.ports import Prompt
from moerl.errors import RewardError
from moerl.http.client import BlockingClient, NoAnswerError, Request, decoded, excerpt_of
from moerl.http.keys import read_key
from moerl.tasks.rewards.process import PLAIN_RESPONSE, UNSCORED, Rewards
from moerl.tasks.rewards.section import FIELD, JudgeReward
from moerl.telemetry.terminal import excerpt

MAX_ANSWER_BYTES = 1 << 22
"""Longest answer of the address."""

MAX_TOKEN_CHARACTERS = 16
"""Characters of a token of a reply, on average. A search for the score in more text could take hours, and stop the
controller."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
"""Pause before the first repetition, and the longest one; each is twice the one before, give or take half."""

_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
"""Statuses after which the same request may succeed."""

_OF_QUESTION = {400, 413, 422}
"""Statuses that refuse a question for what it holds, its length for example."""


class _Message(msgspec.Struct):
    """Part of a message that is read. Whatever else an answer has is passed over, and no object is made of it."""

    content: str


class _Choice(msgspec.Struct):
    """Part of a choice that is read."""

    message: _Message


class _Reply(msgspec.Struct):
    """Part of an answer that is read."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


_REPLY = msgspec.json.Decoder(_Reply)


class _FailedError(Exception):
    """A request that gave no reply.

    Args:
        again: the same request may succeed later.
        pause_seconds: pause that the address asks for.
        may_be_response: the response may have caused the failure.
    """

    def __init__(self, cause: str, *, again: bool, pause_seconds: float = 0.0, may_be_response: bool = True) -> None:
        super().__init__(cause)
        self.again, self.pause_seconds, self.may_be_response = again, pause_seconds, may_be_response


class _UnusableAnswerError(RewardError):
    """An answer without a score. The response may have made the judge give it."""


class Judge:
    """A judge that scores each response by a request.

    Args:
        config: keys of the reward.
        name: dotted path of the reward, for errors.

    Raises:
        ConfigError: The file with the API key cannot be read, is open to others, or holds something else.
    """

    def __init__(self, config: JudgeReward, name: str) -> None:
        self._config, self._name = config, name
        self._key = None if config.key_file is None else read_key(config.key_file, f"{name}.key_file")
        self._client = BlockingClient(max_connections=config.workers, uses_proxies=True)
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="judge")
        self._left, self._lock = config.budget, threading.Lock()
        self._is_closed = threading.Event()

    def submit(self, prompt: Prompt, response: str) -> Future[Rewards]:
        return self._pool.submit(self._score, prompt, response)

    def close(self) -> None:
        self._is_closed.set()
        # Cancel waiting calls first: a free thread would begin the next one.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _score(self, prompt: Prompt, response: str) -> Rewards:
        """Returns the judge's score. If the judge gives the response none, but gives one to `PLAIN_RESPONSE`, the
        response is to blame, and the score is 0."""
        try:
            return {**self._scored(prompt, response), UNSCORED: 0.0}
        except _UnusableAnswerError as error:
            try:
                plain = self._scored(prompt, PLAIN_RESPONSE)
            except RewardError:
                raise error from None
            return {**dict.fromkeys(plain, 0.0), UNSCORED: 1.0}

    def _scored(self, prompt: Prompt, response: str) -> Rewards:
        config = self._config
        reply = self._ask(self._question(prompt, response))
        found = re.findall(config.pattern, reply)
        try:
            score = (float(found[-1]) - config.lowest) / (config.highest - config.lowest)
        except (IndexError, ValueError):
            raise _UnusableAnswerError(
                "the judge's reply has no score",
                seen=self._shown(reply[-2000:])[-200:],
                expected=f"a number in the group of {config.pattern}",
                remedy=f"ask for it in {self._name}.question, or change {self._name}.pattern",
            ) from None
        if not 0.0 <= score <= 1.0:
            raise _UnusableAnswerError(
                "the judge's score is out of range",
                seen=excerpt(self._shown(found[-1][:2000]), 200),
                expected=f"{config.lowest:g} to {config.highest:g}",
                remedy=f"say the range in {self._name}.question, or change {self._name}.lowest and highest",
            )
        return {"reward": score, "accuracy": float(score >= 1.0)}

    def _shown(self, text: str) -> str:
        """Returns a text of the judge without the key."""
        return excerpt(text if self._key is None else self._key.hide(text), 2000)

    def _question(self, prompt: Prompt, response: str) -> str:
        """Returns the question with its fields filled in; texts put in are not searched for fields."""
        values: dict[str, Any] = {**prompt.facts, "prompt": prompt.text, "response": response}

        def field(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in values:
                raise RewardError(
                    f"{self._name}.question names a column that the row does not have",
                    seen=f"{{{name}}}",
                    expected=", ".join(values),
                    remedy="name one of the columns",
                )
            value = values[name]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return re.sub(FIELD, field, self._config.question)

    def _ask(self, question: str) -> str:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(self._config.retries + 1):
            self._spend()
            try:
                return self._request(question)
            except _FailedError as error:
                if not error.again or attempt == self._config.retries or self._is_closed.is_set():
                    kind = _UnusableAnswerError if error.may_be_response else RewardError
                    raise kind(
                        f"the judge at {self._config.url} gave no reply, asked {attempt + 1} times",
                        seen=str(error),
                        expected="a reply of an OpenAI-compatible address",
                        remedy=f"look at the judge; more patience: {self._name}.retries, {self._name}.timeout_seconds",
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
                    remedy=f"raise {self._name}.budget, and go on with the run",
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
        # ASCII alone: texts can hold halves of surrogate pairs, which are no UTF-8.
        content = json.dumps(body).encode()
        request = Request("POST", f"{config.url.rstrip('/')}/chat/completions", content, self._key)
        try:
            answer = self._client.ask(request, MAX_ANSWER_BYTES, config.timeout_seconds)
        except NoAnswerError as error:
            raise _FailedError(f"{error.what}: {error.seen}", again=True, may_be_response=False) from error
        if answer.status != 200:
            pause = answer.headers.get("Retry-After", "")
            raise _FailedError(
                f"status {answer.status}: {excerpt_of(answer.content, self._key)}",
                again=answer.status in _AGAIN,
                may_be_response=answer.status in _OF_QUESTION,
                pause_seconds=float(pause) if re.fullmatch("[0-9]+", pause) else 0.0,
            )
        try:
            reply = decoded(answer.content, _REPLY.decode).choices[0].message.content
        except NoAnswerError as error:
            said = excerpt_of(answer.content, self._key)
            raise _FailedError(f"no choices[0].message.content: {error.seen}: {said}", again=True) from error
        if len(reply) > MAX_TOKEN_CHARACTERS * config.max_tokens:
            raise _FailedError(
                f"a reply of {len(reply):,} characters, more than {self._name}.max_tokens={config.max_tokens} have",
                again=True,
            )
        return reply
