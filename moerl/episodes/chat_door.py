"""Chat completions of agents: each request goes on with a session of the episode. Other wires (`messages_door`,
`responses_door`) turn their requests into chat requests, and get the same completions.

A client sends the whole conversation each time. The door looks for the conversation whose answers the messages begin
with, goes on there, and encodes only what is new; so every token that was sampled stays as it was:

    messages                                       what happens
    go on behind the latest answer                 the session goes on
    go on behind an earlier answer, or repeat      a fork behind the last answer that is the same
    hold no answer, and begin in another way       a session of its own (a sub-agent, another system prompt)
    hold an answer that the policy did not give    refused by name
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import SampledTurn
from moerl.contract.ports import Chat
from moerl.contract.tool_calls import ToolFormat
from moerl.contract.trajectory import FinishReason
from moerl.episodes.chat_request import (
    ChatMessage,
    ChatRequest,
    Wire,
    function_call,
    read_fields,
    require_sampling,
    token_usage,
)
from moerl.episodes.session import TokenSession
from moerl.errors import EpisodeError
from moerl.http.server import JsonReply

_WHAT = "chat completions"


@dataclass(slots=True, eq=False)
class Branch:
    """A conversation of the episode."""

    conversation: Conversation
    """Its messages, with the policy's answers as they were sampled."""
    shown: list[ChatMessage]
    """The same messages as a client knows them: calls stand apart from the text."""
    num_tokens: int = field(init=False)
    """Tokens of its session behind the latest answer, or of its prompt."""
    is_busy: bool = False
    """True while an answer is being sampled."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.session.token_ids)

    @property
    def session(self) -> TokenSession:
        session = self.conversation.session
        assert isinstance(session, TokenSession)
        return session

    @property
    def is_open(self) -> bool:
        """True if an answer can be sampled behind the latest one."""
        end = self.conversation.length(self.conversation.num_turns)
        return not self.is_busy and len(self.conversation.messages) == end

    def turns_shared(self, messages: Sequence[ChatMessage]) -> int:
        """Returns behind how many answers of this conversation `messages` can go on; -1 if behind none, nor behind
        its beginning."""
        pairs = zip(messages, self.shown, strict=False)
        num_same = next((i for i, (a, b) in enumerate(pairs) if not a.is_same(b)), min(len(messages), len(self.shown)))
        for num_turns in range(self.conversation.num_turns, -1, -1):
            length = self.conversation.length(num_turns)
            if length > len(self.shown):
                continue  # an answer that waits for others of its request: no client has seen it
            new = messages[length:]
            ends_with_answer = self.shown[length - 1].role == "assistant"
            goes_on = length <= num_same and not any(each.role == "assistant" for each in new)
            if goes_on and bool(new) == ends_with_answer:
                return num_turns
        return -1


@dataclass(slots=True, eq=False)
class _Choice:
    branch: Branch
    turn: SampledTurn
    prompt_ids: tuple[int, ...]
    message: ChatMessage
    stopped_by: str | None
    """Text of `stop` that ended the turn."""


class ChatDoor:
    """Conversations of one episode, by their messages. Belongs to the event loop of the episodes.

    Attributes:
        ignored: fields of requests that are left aside.
    """

    def __init__(self, session: TokenSession, conversation: Conversation, ignored: Collection[str]) -> None:
        self._session, self.ignored = session, ignored
        # A template may know more fields of the task's messages than a client can send.
        shown = [
            ChatMessage.model_validate({name: each[name] for name in ChatMessage.model_fields if name in each})
            for each in conversation.messages
        ]
        self._branches = [Branch(conversation, shown)]
        self._formats: dict[str, ToolFormat] = {}
        self._call_numbers = itertools.count(1)

    async def complete(self, body: object) -> JsonReply:
        """Answers a request. Raises MoerlError if it cannot be carried out."""
        request = read_fields(ChatRequest, _WHAT, body, self.ignored)
        whole = await self.completion(request, Wire(_WHAT, [f"message {i}" for i in range(len(request.messages))]))
        return JsonReply(_chunks(whole, request), is_stream=True) if request.stream else JsonReply(whole)

    async def completion(self, request: ChatRequest, wire: Wire) -> dict[str, Any]:
        """Returns the completion of a request. Raises MoerlError, in the words of the wire, if it cannot be carried
        out."""
        require_sampling(wire.name, request, self._session.request.sampling)
        choices = await self._choices(request, wire)
        first = choices[0]
        content: dict[str, Any] = {
            "id": f"chatcmpl-{first.branch.session.rollout_id}-{first.branch.conversation.num_turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [_choice(request, index, each) for index, each in enumerate(choices)],
            "usage": token_usage(len(first.prompt_ids), sum(len(each.turn.token_ids) for each in choices)),
        }
        return content | ({"prompt_token_ids": list(first.prompt_ids)} if request.return_token_ids else {})

    async def _choices(self, request: ChatRequest, wire: Wire) -> list[_Choice]:
        """Returns all answers, or none: if one fails, or the client gives up, the others are forgotten."""
        tool_format = await self._format(request)
        branches: list[Branch] = []
        try:
            for _ in range(request.n):
                branches.append(await self._branch(request, wire))
            tasks = [asyncio.ensure_future(self._sample(branch, request)) for branch in branches]
            try:
                turns = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                _forget(branches, await asyncio.gather(*tasks, return_exceptions=True))
                raise
        finally:
            for branch in branches:
                branch.is_busy = False
        choices: list[_Choice] = []
        for branch, (turn, prompt_ids) in zip(branches, turns, strict=True):
            content, stopped_by = _before(turn.text, request.stop)
            message = self._message(content, tool_format)
            branch.shown += [*request.messages[len(branch.shown) :], message]
            branch.num_tokens = len(branch.session.token_ids)
            branch.session.count_calls(len(message.tool_calls))
            choices.append(_Choice(branch, turn, prompt_ids, message, stopped_by))
        return choices

    async def _branch(self, request: ChatRequest, wire: Wire) -> Branch:
        """Returns a conversation that can go on with the request, marked as busy."""
        tools = tuple(request.tools)
        found, num_turns, is_open = None, -1, False
        for branch in self._branches:
            shared = branch.turns_shared(request.messages) if branch.conversation.tools == tools else -1
            ends_here = branch.is_open and shared == branch.conversation.num_turns
            # All that share something share it up to the last answer of the request.
            if shared >= 0 and (found is None or (ends_here and not is_open)):
                found, num_turns, is_open = branch, shared, ends_here
        if found is None:
            if any(each.role == "assistant" for each in request.messages):
                raise self._foreign_answer(request, wire)
            chat = Chat(tuple(each.plain() for each in request.messages), tools)
            name = f"agent-{len(self._branches)}"
            found = Branch(await Conversation.opened(self._session, chat, name), list(request.messages))
            self._branches.append(found)
        elif not is_open:
            shown = found.shown[: found.conversation.length(num_turns)]
            found = Branch(found.conversation.fork(num_turns), shown)
            self._branches.append(found)
        found.is_busy = True
        return found

    async def _sample(self, branch: Branch, request: ChatRequest) -> tuple[SampledTurn, tuple[int, ...]]:
        """Returns an answer, and the ids before it."""
        conversation, session = branch.conversation, branch.session
        if len(session.token_ids) != branch.num_tokens:
            raise used_without_door(len(session.token_ids), branch.num_tokens)
        new = request.messages[len(branch.shown) :]
        if new:
            await conversation.observe(*(each.plain() for each in new))
        prompt_ids = tuple(session.token_ids)
        return await conversation.sample(request.limit, request.stop), prompt_ids

    def _message(self, text: str, tool_format: ToolFormat | None) -> ChatMessage:
        """Returns an answer as a client is to see it, and to send it back."""
        content, calls = (text, []) if tool_format is None else tool_format.parse(text)
        written = [
            function_call(f"call_{next(self._call_numbers)}", call.name, json.dumps(call.arguments, ensure_ascii=False))
            for call in calls
        ]
        return ChatMessage(role="assistant", content=content, tool_calls=written)

    async def _format(self, request: ChatRequest) -> ToolFormat | None:
        """Returns the form of calls; None if none are to be read."""
        if not request.tools or request.tool_choice == "none":
            return None
        key = json.dumps(request.tools, sort_keys=True)
        if key not in self._formats:
            self._formats[key] = await ToolFormat.of(self._session.render, request.tools)
        return self._formats[key]

    def _foreign_answer(self, request: ChatRequest, wire: Wire) -> EpisodeError:
        if any(branch.turns_shared(request.messages) >= 0 for branch in self._branches):
            return EpisodeError(
                f"{wire.name}: tools: others than before, and the history has answers",
                seen=f"{len(request.tools)} tools",
                expected="the tools with which the conversation began: the template writes them in front of it",
                remedy="send the same tools with every request, or begin without answers",
            )
        known = [each for branch in self._branches for each in branch.shown if each.role == "assistant"]
        answers = ((i, each) for i, each in enumerate(request.messages) if each.role == "assistant")
        place = next((i for i, each in answers if not any(each.is_same(other) for other in known)), None)
        return EpisodeError(
            f"{wire.name}: the history is none that this episode had",
            seen="answers in another order, or behind other messages"
            if place is None
            else f"{wire.places[place]} is no answer of the policy",
            expected="messages so far as they were sent and answered, and others behind",
            remedy="send the history unchanged; for a conversation of its own, begin without answers",
        )


def _forget(branches: Sequence[Branch], ends: Sequence[object]) -> None:
    """Forgets the answers that were sampled. ends: of sampling, by branch."""
    for branch, end in zip(branches, ends, strict=True):
        if not isinstance(end, BaseException):
            branch.conversation.retract()
            branch.session.retract()


def _before(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Returns a text up to the first of the texts that end it, and that one."""
    at, ended_by = min(((at, each) for each in stop if (at := text.find(each)) >= 0), default=(len(text), None))
    return text[:at], ended_by


def used_without_door(seen: int, expected: int) -> EpisodeError:
    """Returns the error for a session with other tokens than its door has seen."""
    return EpisodeError(
        "episode: a session was used without its door",
        seen=f"{seen} tokens",
        expected=f"{expected}, those of its messages",
        remedy="serve a session before its first turn, once, and leave it to the agent; more can be opened",
    )


def _choice(request: ChatRequest, index: int, choice: _Choice) -> dict[str, Any]:
    turn, message = choice.turn, choice.message
    shown: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.tool_calls:
        shown["tool_calls"] = message.tool_calls
    ended = "stop" if turn.finish_reason is FinishReason.STOP else "length"
    content: dict[str, Any] = {
        "index": index,
        "message": shown,
        "finish_reason": "tool_calls" if message.tool_calls and ended == "stop" else ended,
        "stop_reason": choice.stopped_by,  # as vLLM says it
        "logprobs": None,
    }
    if request.logprobs:
        texts = [choice.branch.session.voice.texts.decode([token]) for token in turn.token_ids]
        rows = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, turn.logprobs, strict=True)
        ]
        content["logprobs"] = {"content": rows, "refusal": None}
    if request.return_token_ids:
        content["token_ids"] = list(turn.token_ids)
    return content


def _chunks(whole: Mapping[str, Any], request: ChatRequest) -> list[dict[str, Any]]:
    """Returns an answer as the events of a stream: of each choice its message, then its end."""
    same = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for choice in whole["choices"]:
        message = dict(choice["message"])
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        begun = {**choice, "delta": message, "finish_reason": None}
        del begun["message"]
        ended = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
        chunks += [{**same, "choices": [begun]}, {**same, "choices": [ended]}]
    if "prompt_token_ids" in whole:
        chunks[0]["prompt_token_ids"] = whole["prompt_token_ids"]
    if request.stream_options.include_usage:
        chunks.append({**same, "choices": [], "usage": whole["usage"]})
    return chunks
