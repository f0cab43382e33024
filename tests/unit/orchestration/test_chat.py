"""Prompts of messages: by the tokenizer's own template, and none by one that is not stable."""

from __future__ import annotations

import json
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_models import BARS_THINKING, CHATML_THINKING, DATED, NO_SYSTEM, chat_tokenizer
from transformers import PreTrainedTokenizerFast

from moerl.config.load import load_config
from moerl.contract.ports import Chat
from moerl.contract.tokenizer import encode_checked
from moerl.errors import ConfigError, closing
from moerl.orchestration.chat import ChatTemplate, ChatWriter, write_prompts
from moerl.orchestration.ends import read_ends
from moerl.orchestration.templates import Templates

TEMPLATES = Templates()


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    TEMPLATES.close()


ROOT = Path(__file__).parents[3]
RUNS = re.compile(r"apply_chat_template\(|render_jinja_template\(|SandboxedEnvironment\(|find_undeclared_variables\(")
"""Calls that parse or run a template: parsing computes what is constant in it."""

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "What is 3 < 4? Ünïcode 🙂\n"}
SYSTEM = {"role": "system", "content": "Be short."}
ANSWERED = [USER, {"role": "assistant", "content": "Yes."}, USER]

CASES = [
    (CHATML_THINKING, [USER], (), {}),
    (CHATML_THINKING, [SYSTEM, USER], (), {"enable_thinking": False}),
    (CHATML_THINKING, [SYSTEM, USER], (TOOL,), {"enable_thinking": True}),
    (CHATML_THINKING, [SYSTEM, *ANSWERED], (), {}),
    (CHATML_THINKING, [USER, {"role": "tool", "content": "12 degrees"}], (TOOL,), {}),
    (BARS_THINKING, [USER], (), {}),
    (BARS_THINKING, [SYSTEM, *ANSWERED], (), {}),
    (DATED, [SYSTEM, USER], (), {"date_string": "26 Jul 2024"}),
]


@pytest.mark.parametrize(("template", "messages", "tools", "options"), CASES)
def test_a_prompt_is_token_by_token_what_the_tokenizer_makes_of_the_messages(
    template: str, messages: list[Any], tools: tuple[Any, ...], options: dict[str, Any]
):
    tokenizer = chat_tokenizer(template)
    text = ChatTemplate(tokenizer, options, TEMPLATES).render(Chat(tuple(messages), tools))
    wanted = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    assert encode_checked(tokenizer, text) == wanted


def refusal(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, str], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(tokenizer, options, TEMPLATES).render(Chat(messages))
    return str(caught.value)


def test_a_template_that_writes_the_date_is_refused_and_the_option_that_fixes_it_named():
    message = refusal(chat_tokenizer(DATED), USER)
    assert "the chat template is not stable: it writes the date of today" in message
    assert "it reads date_string" in message


def test_dropped_thinking_of_a_row_is_named_and_so_is_a_template_that_would_drop_it():
    tokenizer = chat_tokenizer(CHATML_THINKING)
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
    message = refusal(tokenizer, USER, thinking, USER)
    assert "the chat template drops the thinking of message 1 (assistant)" in message
    [note] = ChatTemplate(tokenizer, {}, TEMPLATES).notes()
    assert "drops thinking" in note


def test_a_template_that_is_no_prefix_of_itself_is_named():
    notes = ChatTemplate(chat_tokenizer(BARS_THINKING), {}, TEMPLATES).notes()
    assert any("not a prefix of itself" in note for note in notes)
    assert ChatTemplate(chat_tokenizer(DATED), {"date_string": "x"}, TEMPLATES).notes() == []


def test_a_message_that_the_template_leaves_out_is_refused():
    leaves_out = "{%- for m in messages %}{%- if m.role == 'user' %}{{- m.content }}{%- endif %}{%- endfor %}"
    assert "leaves out text of message 0 (system)" in refusal(chat_tokenizer(leaves_out), SYSTEM, USER)


def test_tools_that_the_template_leaves_out_are_refused():
    with pytest.raises(ConfigError, match="leaves out the tools; seen: no 'weather'"):
        ChatTemplate(chat_tokenizer(BARS_THINKING), {}, TEMPLATES).render(Chat((USER,), (TOOL,)))


def test_a_role_that_the_template_refuses_is_an_error_with_its_words():
    assert "System role not supported" in refusal(chat_tokenizer(NO_SYSTEM), SYSTEM, USER)


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a constant": "{{ 10 ** (10 ** 10) }}",
    "a macro": "{% macro m(n) %}{{ m(n + 1) if n < 40 }}{{ m(n + 1) if n < 40 }}{% endmacro %}{{ m(0) }}",
    "a question alone": "{% if messages[0].content == 'Go on.' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["loops in loops", *(pytest.param(each, marks=pytest.mark.slow) for each in [*ENDLESS][1:])]
)
def test_a_template_that_does_not_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moerl.orchestration.templates.SECONDS", 1.0)
    message = refusal(chat_tokenizer(ENDLESS[name]), {"role": "user", "content": "Go on."})
    assert "the chat template does not come to an end" in message


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{% set n = namespace(s='a' * 10 ** 6) %}{% for i in range(99999) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 10 ** 6 }}{% endfor %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
)
def test_a_template_that_takes_too_much_memory_is_refused(template: str):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refusal(chat_tokenizer(template + "{{ messages[0].content }}"), USER)
    assert "the chat template fails; seen: " in message
    assert "MemoryError" in message or "RecursionError" in message or "characters" in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18


@pytest.mark.timeout(120)
def test_a_template_that_does_not_end_is_refused_where_it_is_asked_for_the_end_of_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moerl.orchestration.templates.SECONDS", 1.0)
    with pytest.raises(ConfigError, match="the chat template does not come to an end"):
        read_ends(tmp_path, chat_tokenizer(ENDLESS["loops in loops"]), 10)


def test_an_option_that_the_template_does_not_read_is_refused():
    message = refusal(chat_tokenizer(CHATML_THINKING), USER, enable_thinkin=False)
    assert "task.chat_options.enable_thinkin: the chat template does not read it" in message
    assert "enable_thinking" in message


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = chat_tokenizer(CHATML_THINKING)
    tokenizer.chat_template = None  # pyright: ignore[reportAttributeAccessIssue]
    assert "the tokenizer has no chat template" in refusal(tokenizer, USER)


def test_the_end_of_a_turn_is_an_end(tmp_path: Path):
    tokenizer = chat_tokenizer(BARS_THINKING)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    turn_end = tokenizer.convert_tokens_to_ids("<｜end▁of▁sentence｜>")
    assert read_ends(tmp_path, tokenizer, len(tokenizer)) == (1, 7, turn_end)


def test_templates_run_in_their_process_alone():
    found = [path for path in (ROOT / "moerl").rglob("*.py") if RUNS.search(path.read_text(encoding="utf-8"))]
    assert [path.name for path in found] == ["template_worker.py"]


ROWS = [{"prompt": f"Add {i} and 1.", "answer": str(i + 1)} for i in range(40)]


def written(tmp_path: Path, rows: list[Any], *overrides: str) -> tuple[Any, list[str]]:
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        "task=dataset",
        f"task.path={tmp_path}/my.jsonl",
        "task.rewards.r.kind=exact",
        "task.rewards.r.column=answer",
    ]
    config = load_config(["recipe=tiny", "sft.steps=0", *keys, *overrides], command="train")
    task, said = config.task.open(), list[str]()
    write_prompts(task, chat_tokenizer(CHATML_THINKING), config.task, said.append)
    return task, said


def test_the_first_prompt_is_shown_as_the_model_sees_it(tmp_path: Path):
    task, said = written(tmp_path, ROWS, "task.chat_options.enable_thinking=false", "task.system='Be short.'")
    [first] = task.prompts("train", 1)
    assert first.text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nAdd ")
    assert first.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert f"the prompt {first.prompt_id} as the model sees it: {first.text!r}" in said


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path):
    rows = [*ROWS, *({"prompt": "x" * 400 + str(i), "answer": "1"} for i in range(10))]
    task, said = written(tmp_path, rows, "task.max_prompt_tokens=100", "task.dev_fraction=0", "task.heldout_fraction=0")
    assert task.size("train") == 40
    assert "data: 10 prompts of train left out (task.max_prompt_tokens)" in said


def test_a_prompt_that_the_template_refuses_is_named_by_its_line(tmp_path: Path):
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
    rows = [{"prompt": [USER]}, {"prompt": [USER, thinking, USER]}]
    with pytest.raises(ConfigError, match=r"my\.jsonl:2: the chat template drops the thinking of message 1"):
        written(tmp_path, rows)


def test_conversations_are_written_for_threads_that_end() -> None:
    """The process of templates would die with the thread that started it."""
    tokenizer = chat_tokenizer(CHATML_THINKING)
    texts: list[str] = []
    with closing(ChatWriter(tokenizer, {})) as writer:
        for _ in range(3):
            thread = threading.Thread(target=lambda: texts.append(writer.write([USER], (), True)))
            thread.start()
            thread.join()
    assert texts == [tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)] * 3


def test_a_conversation_without_a_template_is_refused() -> None:
    tokenizer = chat_tokenizer(CHATML_THINKING)
    tokenizer.chat_template = None
    with closing(ChatWriter(tokenizer, {})) as writer, pytest.raises(ConfigError, match="no chat template"):
        writer.write([USER], (), True)
