"""Requests on `/v1/messages` and `/v1/responses`, and what stands in them, for tests of these wires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from moerl.contract.episodes import AgentEndpoint, in_thread

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
ADD_FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"of": [2, 2]}}\n</tool_call>'
SAID = {"type": "text", "text": "four"}
USED = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"of": [2, 2]}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "4"}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"of": [2, 2]}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "4"}


async def post(endpoint: AgentEndpoint, path: str, body: Mapping[str, Any]) -> httpx.Response:
    """Sends a request, in a thread. The key is where clients of the wire have it."""
    headers = {"x-api-key": endpoint.key} if path == "messages" else {"Authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        return await in_thread(lambda: client.post(f"{endpoint.url}/{path}", json=body, headers=headers))


async def message(endpoint: AgentEndpoint, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    """Returns a message, as Anthropic's API gives it."""
    answer = await post(endpoint, "messages", {"max_tokens": 500, "messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def response(endpoint: AgentEndpoint, items: object, **fields: Any) -> dict[str, Any]:
    """Returns a response, as OpenAI's API gives it."""
    answer = await post(endpoint, "responses", {"input": items, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()
