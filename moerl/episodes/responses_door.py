"""Responses of agents on OpenAI's newer API: requests become those of the chat door, its answers items of this wire.

    here                                             chat completions
    `instructions`, messages `system`, `developer`   messages `system`
    an output message, and calls behind it           one message `assistant`
    `function_call_output`                           a message `tool`

No response is stored: agents send the whole history. Other items and orders are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from moerl.episodes.chat_door import ChatDoor
from moerl.episodes.chat_request import ChatMessage, ChatRequest, Limit, StrictFields, Wire, function_call, read_fields
from moerl.http.server import JsonReply

_WHAT = "/v1/responses"
_AS_PARTS = BeforeValidator(lambda text: [{"type": "input_text", "text": text}] if isinstance(text, str) else text)


def _as_items(items: Any) -> Any:
    """Returns items with the type of each, which a message may lack."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        return items
    untyped = [isinstance(each, dict) and "type" not in each and "role" in each for each in items]
    return [{"type": "message", **each} if bare else each for each, bare in zip(items, untyped, strict=True)]


class _Item(StrictFields):
    id: Any = None  # a label, as is the status
    status: Any = None


class _Text(StrictFields):
    type: Literal["input_text", "output_text"]
    text: str
    # What comes back of an answer has none.
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


_Texts = Annotated[tuple[_Text, ...], _AS_PARTS]


class _Message(_Item):
    type: Literal["message"]
    role: Literal["user", "system", "developer", "assistant"]
    content: _Texts = ()


class _Call(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Texts = ()


class _Tool(StrictFields):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        """Returns the fields that came, as chat completions have them."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


class _PlainFormat(StrictFields):
    type: Literal["text"]


class _TextOptions(StrictFields):
    format: _PlainFormat | None = None


class _Request(StrictFields):
    input: Annotated[
        list[Annotated[_Message | _Call | _CallOutput, Field(discriminator="type")]],
        Field(min_length=1),
        BeforeValidator(_as_items),
    ]
    instructions: str | None = None
    model: str = "policy"
    max_output_tokens: Limit | None = None
    tools: tuple[_Tool, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: _TextOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    # A policy has no reasoning apart from its answer.
    include: tuple[Literal["reasoning.encrypted_content"], ...] = ()
    # Labels. Nothing is stored, whatever `store` says.
    store: Any = None
    metadata: Any = None
    client_metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None

    def chat(self) -> tuple[ChatRequest, Wire]:
        """Returns the same as a chat request, and the words for its errors."""
        messages = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        places = ["instructions"] * len(messages)
        for place, item in enumerate(self.input):
            if isinstance(item, _Call):
                call = function_call(item.call_id, item.name, item.arguments)
                answer = messages[-1] if messages else None
                if answer is not None and answer.role == "assistant":
                    messages[-1] = answer.model_copy(update={"tool_calls": [*answer.tool_calls, call]})
                    continue
                messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            elif isinstance(item, _CallOutput):
                messages.append(ChatMessage(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append(ChatMessage(role=role, content=_joined(item.content)))
            places.append(f"input.{place}")
        request = ChatRequest(
            messages=messages,
            model=self.model,
            max_tokens=self.max_output_tokens,
            tools=[each.chat() for each in self.tools],
            tool_choice=self.tool_choice,
            temperature=self.temperature,
            top_p=self.top_p,
        )
        return request, Wire(_WHAT, places)


async def create(chat: ChatDoor, body: object) -> JsonReply:
    """Answers a request by a chat door. Raises MoerlError if it cannot be carried out."""
    request = read_fields(_Request, _WHAT, body, chat.ignored)
    response = _response(request, await chat.completion(*request.chat()))
    return JsonReply(_events(response), is_stream=True, names_events=True) if request.stream else JsonReply(response)


def _joined(parts: Sequence[_Text]) -> str:
    return "".join(each.text for each in parts)


def _response(request: _Request, completion: dict[str, Any]) -> dict[str, Any]:
    """Returns a completion as a response."""
    choice, usage, stem = completion["choices"][0], completion["usage"], completion["id"].removeprefix("chatcmpl-")
    text, calls = choice["message"]["content"], choice["message"].get("tool_calls", ())
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if text or not calls:
        part = {"type": "output_text", "text": text or "", "annotations": [], "logprobs": []}
        said = {"type": "message", "id": f"msg-{stem}", "role": "assistant"}
        output.append({**said, "content": [part], "status": status})
    for each in calls:
        call = {"type": "function_call", "id": f"fc-{stem}-{each['id']}", "call_id": each["id"], **each["function"]}
        output.append({**call, "status": "completed"})
    return {
        "id": f"resp-{stem}",
        "object": "response",
        "created_at": completion["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": completion["model"],
        "output": output,
        "instructions": request.instructions,
        "tools": [each.model_dump() for each in request.tools],
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "metadata": request.metadata or {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _events(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a response as the events of a stream."""
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(cast("list[dict[str, Any]]", response["output"])):
        place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            place["content_index"] = 0
            kind, field, empty = "output_text", "text", {"content": []}
            more: dict[str, Any] = {"logprobs": []}
            around = [
                {"type": f"response.content_part.{name}", **place, "part": each}
                for name, each in (("added", {**part, "text": ""}), ("done", part))
            ]
            written = part["text"]
        else:
            kind, field, empty, more, around = "function_call_arguments", "arguments", {"arguments": ""}, {}, []
            written = item["arguments"]
        events += [
            {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**item, **empty, "status": "in_progress"},
            },
            *around[:1],
            {"type": f"response.{kind}.delta", **place, "delta": written, **more},
            {"type": f"response.{kind}.done", **place, field: written, **more},
            *around[1:],
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]
