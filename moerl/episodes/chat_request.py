"""Requests for chat completions: each field has an effect, asks for nothing by its value, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moerl.contract.fields import SamplingParams
from moerl.errors import EpisodeError

Zero = Annotated[float, Field(ge=0, le=0)]
Limit = Annotated[int, Field(ge=1)]
StopTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
_SHOWN = 80


class StrictFields(BaseModel):
    """Base of requests: fields without a value are left out, and unknown ones refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, values: Any) -> Any:
        """Leaves out fields without a value: clients send back what they got, with null for what is not there."""
        if not isinstance(values, dict):
            return values
        return {name: each for name, each in cast("dict[Any, Any]", values).items() if each not in (None, [], {})}


class ChatMessage(StrictFields):
    """One message of a request."""

    role: str
    """Role as the template knows it."""
    content: str = ""
    """Text; parts are joined."""
    name: str | None = None
    """Name of who speaks, or of a tool."""
    tool_calls: list[dict[str, Any]] = []
    """Calls of an answer, as they were given."""
    tool_call_id: str | None = None
    """Id of the call that a tool answers."""

    @field_validator("content", mode="before")
    @classmethod
    def _join(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = [cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("parts that are texts")
        return "".join(cast("list[str]", texts))

    def plain(self) -> dict[str, Any]:
        """Returns the fields that have a value, for a template."""
        return self.model_dump(exclude_defaults=True) | {"content": self.content}

    def is_same(self, other: ChatMessage) -> bool:
        """Returns True if two messages say the same, however the JSON of their calls is written."""
        return _comparable(self) == _comparable(other)


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a call of an answer. arguments: JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class StreamOptions(StrictFields):
    """Options of a stream."""

    include_usage: bool = False
    """True if the stream ends with the numbers of tokens."""


class SamplingFields(StrictFields):
    """Distribution that a request names."""

    temperature: float | None = None
    """Temperature of the run, or nothing."""
    top_p: float | None = None
    """Nucleus mass of the run, or nothing."""
    top_k: int | None = None
    """Value of the run, -1 if it cuts none, or nothing."""
    min_p: float | None = None
    """Value of the run, or nothing."""
    frequency_penalty: Zero = 0.0
    """None."""
    presence_penalty: Zero = 0.0
    """None."""


class ChatRequest(SamplingFields):
    """A request for a chat completion, as OpenAI's clients send it."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """Whole conversation."""
    model: str = "policy"
    """Name that the answer repeats."""
    tools: list[dict[str, Any]] = []
    """Schemas as they came."""
    tool_choice: Literal["auto", "none"] = "auto"
    """Reading of calls, `none` leaves them in the text; what the policy samples is never forced."""
    max_tokens: Limit | None = None
    """Limit of the answer."""
    max_completion_tokens: Limit | None = None
    """Limit of the answer, by its newer name."""
    n: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of answers."""
    stream: bool = False
    """True for server-sent events; they come once the answer is whole."""
    stream_options: StreamOptions = StreamOptions()
    """Options of a stream."""
    logprobs: bool = False
    """True if the log-prob of each sampled token is asked for."""
    return_token_ids: bool = False
    """True if ids of prompt and answer are asked for."""
    # Fields that change no token; `stop` ends an answer.
    user: Any = None
    """Label."""
    metadata: Any = None
    """Label."""
    store: Any = None
    """Label."""
    parallel_tool_calls: Literal[True] = True
    """Calls side by side are the policy's choice."""
    stop: StopTexts = []
    """Texts that end an answer, and are left out of it."""
    # Fields that other values than these would give an effect.
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    """Nothing is known of tokens that were not sampled."""

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None if there is no limit."""
        return min((each for each in (self.max_tokens, self.max_completion_tokens) if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class Wire:
    """Words of the request that a chat request was made of, for errors."""

    name: str
    """Name of the wire."""
    places: Sequence[str]
    """Place of each message in the client's own request."""


def read_fields[M: BaseModel](model: type[M], what: str, body: object, ignored: Collection[str]) -> M:
    """Returns a body as a model has it, without fields that are left aside. Raises EpisodeError, which begins with
    `what`."""
    if isinstance(body, dict):
        body = {name: each for name, each in cast("dict[Any, Any]", body).items() if name not in ignored}
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise refused(f"{what}: {place}", first.get("input"), first["msg"]) from None


def require_sampling(what: str, request: SamplingFields, sampling: SamplingParams) -> None:
    """Raises EpisodeError, which begins with `what`, if a request asks for another distribution than the run's."""
    own: Mapping[str, float] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
    }
    for name, value in own.items():
        seen = getattr(request, name)
        if seen is not None and seen != value:
            raise refused(f"{what}: {name}", seen, f"{value}, as the run samples")


def _comparable(message: ChatMessage) -> object:
    calls = list[object]()
    for call in message.tool_calls:
        function: object = call.get("function")
        if isinstance(function, dict):
            written = cast("dict[str, Any]", function)
            function = {**written, "arguments": _parsed(written.get("arguments"))}
        calls.append((call.get("id"), function))
    return message.role, message.content, message.name, message.tool_call_id, calls


def _parsed(arguments: object) -> object:
    """Returns the value of JSON, or what came if it is none."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def token_usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """Returns the numbers of tokens as an answer has them."""
    total = num_prompt + num_sampled
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": total}


def refused(what: str, seen: object, expected: str) -> EpisodeError:
    """Returns the error for a field."""
    text = repr(seen)
    return EpisodeError(
        what,
        seen=text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...",
        expected=expected,
        remedy="leave it out, or name it in `ignored` of session.serve",
    )
