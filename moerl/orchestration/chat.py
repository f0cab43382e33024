"""Prompts from messages, by the tokenizer's own chat template, and checks of that template. Runs in the controller.

A template is code of a model directory. Its text must depend on the messages alone, and lose nothing of them: prompts
are written once, before anything is trained, and a run that goes on must find the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from moerl.contract.ports import Chat, ChatTask, Prompt, Task
from moerl.contract.tokenizer import Tokenizer
from moerl.errors import ConfigError, as_config_error, closing
from moerl.orchestration.templates import FailedTemplateError, Templates, request_of
from moerl.tasks.section import TaskSection
from moerl.telemetry.terminal import excerpt

SHOWN_CHARACTERS = 600
"""Most characters of the prompt that a run shows at its start."""

_QUESTION, _ANSWER, _THOUGHT = "moerl-question", "moerl-answer", "moerl-thought"
_THINKING = f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"


class ChatTemplate:
    """The chat template of a tokenizer, with options.

    Args:
        templates: process that writes the texts.

    Raises:
        ConfigError: the tokenizer has no template, or the template does not know an option, fails on a single question,
            or writes a text that depends on the date.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any], templates: Templates) -> None:
        self._tokenizer, self._options, self._templates = tokenizer, dict(options), templates
        _require_template(tokenizer)
        self._check_options()
        self._check_date()

    def render(self, chat: Chat) -> str:
        """Returns the text of a prompt: the messages, and the start of the answer.

        Raises:
            ConfigError: the template fails on the messages, or leaves out text of one.
        """
        text = self._write(chat.messages, chat.tools, ask=True)
        for number, message in enumerate(chat.messages):
            content = str(message["content"]).strip()
            if message["role"] != "tool" and content not in text:
                self._refuse_loss(number, message["role"], content, text)
        for tool in chat.tools:
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if name is not None and str(name) not in text:
                raise ConfigError(
                    "the chat template leaves out the tools",
                    seen=f"no {name!r} in what it writes",
                    expected="all tools of the row",
                    remedy="take a model whose template knows tools, or leave task.tools away",
                )
        return text

    def notes(self) -> list[str]:
        """Returns notes on how the template changes conversations of several turns, one line each."""
        found = []
        first = [{"role": "user", "content": _QUESTION}]
        more = [*first, {"role": "assistant", "content": _THINKING}, {"role": "user", "content": _QUESTION}]
        try:
            prompt = self._write(first, (), ask=True)
            answered = self._write([*first, {"role": "assistant", "content": _ANSWER}], (), ask=False)
            if not answered.startswith(prompt):
                found.append(
                    "note: the chat template is not a prefix of itself: with an answer behind it, a prompt is written"
                    " differently; rows of several turns are other texts than what was sampled"
                )
            if _THOUGHT not in self._write(more, (), ask=True):
                found.append("note: the chat template drops thinking: that of earlier answers is not in later prompts")
        except FailedTemplateError as error:
            found.append(f"note: the chat template takes a single question alone: {error.seen}")
        return found

    def _write(self, messages: Any, tools: Any, *, ask: bool, day: str | None = None) -> str:
        request = request_of(self._tokenizer, messages, tools=tools, ask=ask, options=self._options, day=day)
        return self._templates.write(request)

    def _variables(self) -> set[str]:
        return self._templates.variables(str(self._tokenizer.get_chat_template()))

    def _check_options(self) -> None:
        known = self._variables()
        unknown = sorted(self._options.keys() - known)
        if unknown:
            raise ConfigError(
                f"task.chat_options.{unknown[0]}: the chat template does not read it",
                seen=unknown[0],
                expected=f"one of {', '.join(sorted(known - _OURS)) or 'none: it has no options'}",
                remedy="correct the name, or leave it away",
            )

    def _check_date(self) -> None:
        """Raises `ConfigError` if texts depend on the date; `strftime_now` alone tells it to a template."""
        messages = [{"role": "system", "content": _QUESTION}, {"role": "user", "content": _QUESTION}]
        for asked in (messages, messages[1:]):
            try:
                texts = {self._write(asked, (), ask=True, day=day) for day in ("1st", "2nd")}
            except FailedTemplateError:
                if len(asked) == 1:
                    raise
                continue
            if len(texts) > 1:
                raise ConfigError(
                    "the chat template is not stable: it writes the date of today",
                    seen="two prompts of the same messages that differ from day to day",
                    expected="the same prompt whenever the run goes on",
                    remedy="give it a fixed date, if it takes one: task.chat_options.date_string='26 Jul 2024';"
                    f" it reads {', '.join(sorted(self._variables() - _OURS))}",
                )

    def _refuse_loss(self, number: int, role: str, content: str, text: str) -> None:
        answer = content.rpartition("</think>")[2].strip()
        drops_thinking = role == "assistant" and "</think>" in content and answer in text
        raise ConfigError(
            f"the chat template {'drops the thinking' if drops_thinking else 'leaves out text'} of message {number}"
            f" ({role})",
            seen=excerpt(content, 120),
            expected="all of its text in the prompt",
            remedy="remove the thinking of earlier turns from the row, or set the option of the template that keeps it"
            if drops_thinking
            else "change the message so that the template takes it, or take another model",
        )


_OURS = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"} | {
    f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
}
"""Variables of a template that are no options."""


class ChatWriter:
    """Writer of conversations by the chat template of a tokenizer, for episodes. Any thread.

    One thread of its own asks the process of templates, which would die with the thread that started it.

    Args:
        options: variables of the template.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._templates, self._thread = Templates(), ThreadPoolExecutor(1, "chat-template")

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], ask: bool) -> str:
        """Returns the text of messages, with the start of an answer if `ask`.

        Raises:
            ConfigError: the tokenizer has no template, or the template fails on the messages.
        """
        _require_template(self._tokenizer)
        request = request_of(self._tokenizer, messages, tools=tools, ask=ask, options=self._options)
        return self._thread.submit(self._templates.write, request).result()

    def close(self) -> None:
        """Ends the process of templates, once it has answered."""
        self._thread.submit(self._templates.close)
        self._thread.shutdown()


def _require_template(tokenizer: Tokenizer) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the tokenizer has no chat template, and the task has messages",
            seen="no chat_template in tokenizer_config.json, no chat_template.jinja",
            expected="a template, as instruction-tuned models have",
            remedy="take such a model, add chat_template.jinja to its directory, or have plain texts continued as"
            " they are (task.text_as=raw)",
        )


def write_prompts(task: Task, tokenizer: Tokenizer, section: TaskSection, notify: Callable[[str], None]) -> None:
    """Writes the prompts of a task that are messages, leaves out prompts that are too long, and shows the first one.

    Raises:
        ConfigError: the template is not usable, or fails on a prompt; names the place of the prompt.
    """
    if not isinstance(task, ChatTask):
        return
    limit, template = section.longest_prompt, None

    def write(prompt: Prompt) -> Prompt | None:
        text = prompt.text
        if prompt.chat is not None and template is not None:
            try:
                text = template.render(prompt.chat)
            except ConfigError as error:
                raise as_config_error(error, f"{task.place(prompt)}: {error.what}") from error
        if limit is not None and len(tokenizer.encode(text, add_special_tokens=False)) > limit:
            return None
        return replace(prompt, text=text)

    with closing(Templates()) as templates:
        if task.has_chats:
            template = ChatTemplate(tokenizer, section.template_options, templates)
            for note in template.notes():
                notify(note)
        if template is not None or limit is not None:
            task.write_prompts(write)
    for note in task.notes():
        notify(note)
    if template is not None and task.size("train"):
        [first] = task.prompts("train", 1)
        notify(f"the prompt {first.prompt_id} as the model sees it: {excerpt(repr(first.text), SHOWN_CHARACTERS)}")
