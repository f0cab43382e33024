"""Messages of agents on Anthropic's API: requests become those of the chat door, and its answers messages of this wire.

    here                          chat completions
    `system`                      a message `system` in front; messages `system` stay in their places
    `tool_result`                 a message `tool`, whose text begins with `error: ` if `is_error` is set
    texts of a user               a message `user`, behind the results
    text and `tool_use`           one message `assistant`

An answer comes back as it was given: at most one text, then the calls. All other blocks and orders are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from moerl.episodes.chat_door import ChatDoor
from moerl.episodes.chat_request import (
    ChatMessage,
    ChatRequest,
    Limit,
    StopTexts,
    StrictFields,
    Wire,
    function_call,
    read_fields,
)
from moerl.http.server import JsonReply

_WHAT = "/v1/messages"
_ENDED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_AS_BLOCKS = BeforeValidator(lambda text: [{"type": "text", "text": text}] if isinstance(text, str) else text)
_TAG = Field(discriminator="type")


class _Block(StrictFields):
    cache_control: Any = None  # changes no token


class _Text(_Block):
    type: Literal["text"]
    text: str


_Texts = Annotated[tuple[_Text, ...], _AS_BLOCKS]


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict[str, Any])


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = ()
    is_error: bool = False


class _UserMessage(StrictFields):
    role: Literal["user"]
    content: Annotated[tuple[Annotated[_Text | _ToolResult, _TAG], ...], _AS_BLOCKS] = ()

    @field_validator("content")
    @classmethod
    def _results_first(cls, content: Sequence[_Block]) -> Sequence[_Block]:
        if list(content) != sorted(content, key=lambda each: isinstance(each, _Text)):
            raise ValueError("results of tools in front of texts")
        return content

    def chat(self) -> list[ChatMessage]:
        messages = [
            ChatMessage(
                role="tool", content="error: " * each.is_error + _joined(each.content), tool_call_id=each.tool_use_id
            )
            for each in self.content
            if isinstance(each, _ToolResult)
        ]
        if not messages or len(messages) < len(self.content):
            messages.append(ChatMessage(role="user", content=_joined(self.content)))
        return messages


class _SystemMessage(StrictFields):
    role: Literal["system"]
    content: _Texts = ()

    def chat(self) -> list[ChatMessage]:
        return [ChatMessage(role="system", content=_joined(self.content))]


class _AssistantMessage(StrictFields):
    role: Literal["assistant"]
    content: Annotated[tuple[Annotated[_Text | _ToolUse, _TAG], ...], _AS_BLOCKS] = ()

    @field_validator("content")
    @classmethod
    def _as_answered(cls, content: Sequence[_Block]) -> Sequence[_Block]:
        if any(isinstance(each, _Text) for each in content[1:]):
            raise ValueError("an answer as it was given: at most one text, then calls")
        return content

    def chat(self) -> list[ChatMessage]:
        calls = [
            function_call(each.id, each.name, json.dumps(each.input, ensure_ascii=False))
            for each in self.content
            if isinstance(each, _ToolUse)
        ]
        return [ChatMessage(role="assistant", content=_joined(self.content), tool_calls=calls)]


class _Tool(_Block):
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def chat(self) -> dict[str, Any]:
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class _ToolChoice(StrictFields):
    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: Literal[False] = False


class _NoThinking(StrictFields):
    type: Literal["disabled"]


class _Request(_Block):
    messages: Annotated[
        list[Annotated[_UserMessage | _SystemMessage | _AssistantMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: _Texts = ()
    model: str = "policy"
    max_tokens: Limit | None = None
    stop_sequences: StopTexts = Field(default_factory=list[str])
    tools: tuple[_Tool, ...] = ()
    tool_choice: _ToolChoice = _ToolChoice()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    # The thinking of a policy is text of its answer: it has no blocks, and no budget.
    thinking: _NoThinking | None = None
    # Labels.
    metadata: Any = None
    service_tier: Any = None

    def chat(self) -> tuple[ChatRequest, Wire]:
        """Returns the same as a chat request, and the words for its errors."""
        messages = [ChatMessage(role="system", content=_joined(self.system))] if self.system else []
        places = ["system"] * len(messages)
        for place, message in enumerate(self.messages):
            written = message.chat()
            messages += written
            places += [f"messages.{place}"] * len(written)
        request = ChatRequest(
            messages=messages,
            model=self.model,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            tools=[each.chat() for each in self.tools],
            tool_choice=self.tool_choice.type,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )
        return request, Wire(_WHAT, places)


async def create(chat: ChatDoor, body: object) -> JsonReply:
    """Answers a request by a chat door. Raises MoerlError if it cannot be carried out."""
    request = read_fields(_Request, _WHAT, body, chat.ignored)
    message = _message(await chat.completion(*request.chat()))
    return JsonReply(_events(message), is_stream=True, names_events=True) if request.stream else JsonReply(message)


def _joined(blocks: Sequence[_Block]) -> str:
    return "".join(each.text for each in blocks if isinstance(each, _Text))


def _message(completion: dict[str, Any]) -> dict[str, Any]:
    """Returns a completion as a message."""
    choice, usage = completion["choices"][0], completion["usage"]
    text, stopped_by = choice["message"]["content"], choice["stop_reason"]
    calls = [
        {"type": "tool_use", "id": each["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        for each in choice["message"].get("tool_calls", ())
        for function in (each["function"],)
    ]
    # An empty answer has a block, too: agents read the first one.
    texts = [{"type": "text", "text": text or ""}] if text or not calls else []
    ended = "stop_sequence" if stopped_by is not None and not calls else _ENDED[choice["finish_reason"]]
    return {
        "id": completion["id"].replace("chatcmpl", "msg"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": [*texts, *calls],
        "stop_reason": ended,
        "stop_sequence": stopped_by if ended == "stop_sequence" else None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def _events(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a message as the events of a stream."""
    usage = message["usage"]
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**begun, "usage": {**usage, "output_tokens": 0}}}
    ]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        events += [
            {"type": "content_block_start", "index": index, "content_block": {**block, **empty}},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    return [*events, {"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]
