"""Conversations keep the tokens of earlier turns, or refuse by name what would change them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import Message, SampledTurn
from moerl.contract.ports import Chat
from moerl.contract.trajectory import FinishReason
from moerl.errors import EpisodeError

Template = Callable[[Sequence[Message], bool], str]
QUESTION = {"role": "user", "content": "two and two?"}
MORE = {"role": "user", "content": "and one?"}


def chatml(messages: Sequence[Message], ask: bool) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if ask else "")


def without_thinking(messages: Sequence[Message], ask: bool) -> str:
    """Drops the thinking of all answers but the last message."""
    kept = [
        {**m, "content": m["content"].rpartition("</think>")[2]}
        if m["role"] == "assistant" and m is not messages[-1]
        else m
        for m in messages
    ]
    return chatml(kept, ask)


def trimming(messages: Sequence[Message], ask: bool) -> str:
    return chatml([{**m, "content": m["content"].strip()} for m in messages], ask)


class FakeSession:
    """Texts as they came: the prompt, answers with their ends, and observations."""

    def __init__(self, text: str, template: Template, answers: Sequence[tuple[str, str]]) -> None:
        self.text, self.template, self.answers = text, template, list(answers)
        self.opened: list[FakeSession] = []

    @property
    def num_left(self) -> int:
        return 1_000 - len(self.text)

    async def render(self, messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        return "".join(f"[{each['name']}]" for each in tools) + self.template(messages, ask)

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        answer, end = self.answers.pop(0)
        self.text += answer + end
        return SampledTurn(answer, (), FinishReason.STOP if end else FinishReason.LENGTH, end)

    def observe(self, text: str) -> None:
        self.text += text

    def open(self, text: str, agent_id: str = "") -> FakeSession:
        self.opened.append(FakeSession(text, self.template, self.answers))
        return self.opened[-1]


def conversation(template: Template = chatml, *answers: tuple[str, str]) -> tuple[Conversation, FakeSession]:
    session = FakeSession(
        template([QUESTION], True), template, answers or [("four", "<|im_end|>"), ("five", "<|im_end|>")]
    )
    return Conversation(cast(Any, session), Chat((QUESTION,)), session.text), session


def test_the_text_of_the_tokens_is_what_the_template_writes_for_all_messages() -> None:
    async def two_turns() -> None:
        await chat.sample()
        await chat.observe(MORE)
        await chat.sample()

    chat, session = conversation()
    asyncio.run(two_turns())
    assert [each["content"] for each in chat.messages] == ["two and two?", "four", "and one?", "five"]
    assert session.text == chatml(chat.messages, ask=False).removesuffix("\n")


@pytest.mark.parametrize(("end", "between"), [("<|im_end|>", ""), ("", "<|im_end|>"), ("<|end|>", "<|end|><|im_end|>")])
def test_an_answer_that_was_cut_off_or_ended_otherwise_gets_the_end_that_the_template_writes(
    end: str, between: str
) -> None:
    async def two_turns() -> None:
        await chat.sample()
        await chat.observe(MORE)

    chat, session = conversation(chatml, ("fo", end))
    asyncio.run(two_turns())
    behind = session.text.removeprefix(chatml([QUESTION], True) + "fo" + (end if between == "" else ""))
    assert behind == between + "\n" + chatml([MORE], True)


@pytest.mark.parametrize(
    ("template", "answer", "what"),
    [(without_thinking, "<think>2+2</think>four", "earlier turns"), (trimming, " four", "an answer")],
)
def test_a_template_that_rewrites_what_was_sampled_is_refused_by_name(
    template: Template, answer: str, what: str
) -> None:
    async def two_turns() -> None:
        await chat.sample()
        before = session.text
        with pytest.raises(EpisodeError, match=f"writes {what} differently"):
            await chat.observe(MORE)
        assert session.text == before

    chat, session = conversation(template, (answer, "<|im_end|>"))
    asyncio.run(two_turns())


def test_a_whole_history_goes_on_if_it_is_unchanged_and_is_refused_if_it_is_edited() -> None:
    async def histories() -> None:
        first = await chat.answer([QUESTION])
        history = [QUESTION, {"role": "assistant", "content": first.text}, MORE]
        edited = [QUESTION, {"role": "assistant", "content": "4"}, MORE]
        with pytest.raises(EpisodeError, match=r"other messages than before.*message 1 differs"):
            await chat.answer(edited)
        with pytest.raises(EpisodeError, match=r"other messages than before.*1 messages"):
            await chat.answer(history[:1])
        assert (await chat.answer(history)).text == "five"

    chat, session = conversation()
    asyncio.run(histories())
    assert session.text.count("two and two?") == 1


def test_messages_go_behind_answers_and_answers_behind_messages() -> None:
    async def wrong() -> None:
        with pytest.raises(EpisodeError, match="do not go on from an answer"):
            await chat.observe(MORE)
        await chat.sample()
        with pytest.raises(EpisodeError, match="has an answer already"):
            await chat.sample()
        for messages in ([], [{"role": "assistant", "content": "five"}]):
            with pytest.raises(EpisodeError, match="do not go on from an answer"):
                await chat.observe(*messages)

    chat, _ = conversation()
    asyncio.run(wrong())


def test_a_conversation_with_a_prompt_of_its_own_has_its_tools() -> None:
    async def opened() -> Conversation:
        return await Conversation.opened(cast(Any, parent), Chat((MORE,), ({"name": "add"},)), "helper")

    _, parent = conversation()
    chat = asyncio.run(opened())
    assert [each.text for each in parent.opened] == ["[add]" + chatml([MORE], True)]
    assert chat.messages == [MORE]
