"""Episodes with a door, on a stream that answers with the texts that a test writes."""

from __future__ import annotations

import json
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from episode_streams import FakeStream, check, response
from factories import FULL, make_trajectory

from moerl.contract.episodes import AgentEndpoint, Message, Session, in_thread
from moerl.contract.ports import Chat, Prompt, RolloutRecord, RolloutRequest
from moerl.contract.trajectory import FinishReason, Lineage
from moerl.episodes.play import Episode, PlayedEpisode, play
from moerl.episodes.session import Texts

END, END_TEXT = 1, "<|im_end|>"
_CHARACTERS = string.printable[:97]
QUESTION = {"role": "user", "content": "two and two?"}
MORE = {"role": "user", "content": "and one?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def encode(text: str) -> list[int]:
    """Tokens are characters, but for the end of a turn."""
    ids = list[int]()
    for number, part in enumerate(text.split(END_TEXT)):
        ids += [END] * bool(number) + [2 + _CHARACTERS.index(each) for each in part]
    return ids


def decode(ids: Sequence[int]) -> str:
    return "".join(END_TEXT if each == END else _CHARACTERS[each - 2] for each in ids)


def hermes(messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
    """The template of Hermes and Qwen, in short."""
    text = "".join(f"<|im_start|>tools\n{json.dumps(each)}{END_TEXT}\n" for each in tools)
    for message in messages:
        calls = "".join(
            f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in message.get("tool_calls", ())
        )
        text += f"<|im_start|>{message['role']}\n{message['content']}{calls}{END_TEXT}\n"
    return text + ("<|im_start|>assistant\n" if ask else "")


TEXTS = Texts(encode, decode, hermes)


def says(*answers: str, encode: Callable[[str], list[int]] = encode) -> FakeStream:
    """A stream of these answers, each with its end."""
    left = list(answers)

    def answer(request: RolloutRequest) -> list[RolloutRecord]:
        ids = [*encode(left.pop(0)), END][: request.max_new_tokens]
        made = make_trajectory(
            np.random.default_rng(0), num_prompt=len(request.prompt_ids), num_sampled=len(ids), sampling=FULL
        )
        reason = FinishReason.STOP if ids[-1] == END else FinishReason.LENGTH
        whole = np.array([*request.prompt_ids, *ids], np.int32)
        return [response(request, reason, **_arrays(made), token_ids=whole)]

    return FakeStream(answer)


def _arrays(made: Any) -> dict[str, Any]:
    names = ("sampled", "rollout_logprobs", "kept_logmass", "policy_versions", "truncated", "expert_ids", "routed")
    return {name: getattr(made, name) for name in (*names, "kept", "turns")}


def played(
    agent: Callable[[AgentEndpoint, Session], Awaitable[None]],
    stream: FakeStream,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    ignored: Sequence[str] = (),
    max_tokens: int = 2000,
    render: Callable[[Sequence[Message], Sequence[Message], bool], str] = hermes,
    encode: Callable[[str], list[int]] = encode,
    decode: Callable[[Sequence[int]], str] = decode,
    stop_ids: tuple[int, ...] = (END,),
) -> PlayedEpisode:
    """Plays one episode in which an agent has the door."""
    chat = Chat((QUESTION,), tuple(tools))
    prompt = Prompt("p", render(chat.messages, chat.tools, True), {}, chat)

    async def environment(session: Session) -> Mapping[str, float]:
        async with session.serve(prompt, ignored) as endpoint:
            await agent(endpoint, session)
        return {"reward": 1.0}

    request = RolloutRequest(Lineage("r0", "p", "g"), tuple(encode(prompt.text)), FULL, max_tokens, stop_ids)
    texts = Texts(encode, decode, render)
    (episode,) = play([Episode(request, environment)], stream, check, texts, turn_seconds=300.0)
    return episode


async def ask(endpoint: AgentEndpoint, messages: Sequence[Mapping[str, Any]], **fields: Any) -> httpx.Response:
    """Asks for a completion, in a thread: an agent may block."""
    body = {"model": "any", "messages": list(messages), **fields}
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        return await in_thread(lambda: client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers))


async def message(endpoint: AgentEndpoint, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    """Returns the message of the first choice."""
    answer = await ask(endpoint, messages, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def texts(episode: PlayedEpisode) -> list[str]:
    """Whole texts of the sessions of an episode that has no error."""
    assert episode.error is None
    return [decode(record.values["token_ids"].tolist()) for record in episode.records]
