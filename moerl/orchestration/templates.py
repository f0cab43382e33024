"""Chat templates in a process of their own, with limits of time and memory. Runs in the controller.

A template is a program that came with a model. Nested loops run for days, a product of a text fills all memory, and
both may wait for one special message; so every text is written in a process in which that does no harm.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from moerl.contract.tokenizer import Tokenizer
from moerl.errors import ConfigError, closing
from moerl.processes.child import Child, module_program
from moerl.telemetry.terminal import excerpt

SECONDS = 30.0
"""Longest time for one text. Templates of models take milliseconds."""

START_SECONDS = 120.0
"""Longest time until the process can begin; usually it takes one or two seconds."""

MEMORY_BYTES = 1 << 30
"""Memory of the process. Templates of models need 70 MB with all that they load."""

PROGRAM = module_program("moerl.orchestration.template_worker", str(MEMORY_BYTES))

Request = dict[str, Any]


class FailedTemplateError(ConfigError):
    """A template raised an error on some messages, or wrote too much; it may still take others."""


class Templates:
    """A process that writes messages by templates. It starts at the first request; one thread uses it."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def close(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.release()

    def write(self, request: Request) -> str:
        """Returns the text of messages.

        Args:
            request: from `request_of`.

        Raises:
            FailedTemplateError: the template failed, took too much memory or wrote too much.
            ConfigError: the template does not come to an end, or the process does not start.
        """
        return str(self._ask(request)["text"])

    def variables(self, template: str) -> set[str]:
        """Returns the names that a template reads from outside. Raises as `write` does."""
        return set(self._ask({"template": template})["variables"])

    def _ask(self, request: Request) -> dict[str, Any]:
        try:
            reply = json.loads(self._started().ask(json.dumps(request).encode(), SECONDS)[0])
        except TimeoutError as error:
            self.close()
            raise ConfigError(
                "the chat template does not come to an end",
                seen=f"no text after {SECONDS:g} s",
                expected="a template that writes a conversation in milliseconds",
                remedy="look at chat_template.jinja (or tokenizer_config.json) of the model directory: it may have"
                " been changed to do harm; take the model from where it was published",
            ) from error
        except (OSError, EOFError, MemoryError) as error:
            self.close()
            raise _failed("its process ended, without memory or killed") from error
        if "failed" in reply:
            raise _failed(excerpt(" ".join(str(reply["failed"]).split()), 300))
        return reply

    def _started(self) -> Child:
        if self._child is None:
            self._child = Child(PROGRAM, log=None)
            try:
                self._child.receive(START_SECONDS)
            except (OSError, EOFError) as error:
                self.close()
                raise ConfigError(
                    "the process for chat templates does not start",
                    seen=f"it ended, or was silent for {START_SECONDS:g} s; what it printed stands above",
                    expected="a process that imports transformers and jinja2",
                    remedy="mend the installation (`moerl doctor`)",
                ) from error
        return self._child


def request_of(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    ask: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
    day: str | None = None,
) -> Request:
    """Returns the request that `apply_chat_template` of the tokenizer would get, as plain data.

    Args:
        ask: True adds the start of an answer.
        options: variables of the template.
        day: text that the template gets for every date; None = today.
    """
    return {
        "template": tokenizer.get_chat_template(tools=[dict(each) for each in tools] or None),
        "values": {**_texts(tokenizer.special_tokens_map), **(options or {})},
        "messages": [dict(each) for each in messages],
        "tools": [dict(each) for each in tools],
        "ask": ask,
        "day": day,
    }


def write_once(request: Request) -> str:
    """Returns the text of messages, as `Templates.write` does, from a process for this request alone; the latest eight
    are kept."""
    return _write_once(json.dumps(request))


@functools.lru_cache(maxsize=8)
def _write_once(request: str) -> str:
    with closing(Templates()) as templates:
        return templates.write(json.loads(request))


def _texts(value: Any) -> Any:
    """Returns special tokens as plain texts."""
    if isinstance(value, Mapping):
        return {str(name): _texts(each) for name, each in value.items()}
    return [str(each) for each in value] if isinstance(value, list | tuple) else str(value)


def _failed(seen: str) -> FailedTemplateError:
    return FailedTemplateError(
        "the chat template fails",
        seen=seen,
        expected="messages that the model's template takes",
        remedy="change the messages (roles, their order, a system message), or take another model",
    )
