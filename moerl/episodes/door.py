"""Door of an episode: an address and a key, behind which an agent's requests go on with its sessions.

POST /v1/chat/completions      messages (`chat_door`)
POST /v1/messages              messages, as Anthropic's clients send them (`messages_door`)
POST /v1/responses             items, as OpenAI's newer API has them (`responses_door`)
POST /inference/v1/generate    token ids (`token_door`)
GET  /v1/models                the name of the policy, and the longest sequence
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import AgentEndpoint
from moerl.contract.ports import Prompt
from moerl.episodes import messages_door, responses_door
from moerl.episodes.chat_door import ChatDoor, used_without_door
from moerl.episodes.session import TokenSession
from moerl.episodes.token_door import TokenDoor
from moerl.errors import MoerlError, SessionOverError
from moerl.http.server import JsonReply, JsonServer, refusal


@asynccontextmanager
async def open_door(
    server: JsonServer, session: TokenSession, prompt: Prompt, ignored: Collection[str]
) -> AsyncIterator[AgentEndpoint]:
    """Opens a door to a session as long as the context lasts; arguments and errors are those of `Session.serve`."""
    if session.token_ids != list(session.request.prompt_ids):
        raise used_without_door(len(session.token_ids), len(session.request.prompt_ids))
    chat = None if prompt.chat is None else ChatDoor(session, Conversation.of(prompt, session), ignored)
    tokens = TokenDoor(session, ignored)

    async def answer(method: str, path: str, body: object) -> JsonReply:
        """Answers a request; what cannot be done is said with status 400 or 404, which no client repeats."""
        try:
            match method, path:
                case "POST", "/v1/chat/completions" if chat is not None:
                    return await chat.complete(body)
                case "POST", "/v1/messages" if chat is not None:
                    return await messages_door.create(chat, body)
                case "POST", "/v1/responses" if chat is not None:
                    return await responses_door.create(chat, body)
                case "POST", "/inference/v1/generate":
                    return await tokens.generate(body)
                case "GET", "/v1/models":
                    card = {"id": "policy", "object": "model", "owned_by": "moerl", "max_model_len": session.longest}
                    return JsonReply({"object": "list", "data": [card]})
                case _:
                    return JsonReply(refusal(f"{method} {path}: no such endpoint", "not_found"), 404)
        except MoerlError as error:
            code = "context_length_exceeded" if isinstance(error, SessionOverError) else "refused"
            return JsonReply(refusal(str(error), code), 400)

    async with server.admit(answer) as (url, key):
        yield AgentEndpoint(f"{url}/v1", key)
