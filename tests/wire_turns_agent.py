"""Three turns on each wire, by the clients of Anthropic and OpenAI, as they come; every other turn is a stream.

Addresses and keys come from the environment. Runs with an interpreter that has both clients.
"""

from anthropic import Anthropic
from openai import OpenAI

QUESTION = {"role": "user", "content": "a question"}
claude, openai = Anthropic(max_retries=0), OpenAI(max_retries=0)
messages: list = [QUESTION]
items: list = [QUESTION]
for turn in range(3):
    same = {"model": "policy", "messages": messages, "max_tokens": 5 + turn}
    if turn % 2:
        with claude.messages.stream(**same) as stream:
            message = stream.get_final_message()
    else:
        message = claude.messages.create(**same)
    more = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": f"more {turn}"}]}
    messages += [{"role": "assistant", "content": message.content}, more]

    same = {"model": "policy", "input": items, "instructions": "be brief", "max_output_tokens": 5 + turn}
    if turn % 2:
        *_, last = openai.responses.create(**same, stream=True)
        response = last.response  # of `response.incomplete`, which the client's helper for streams does not know
    else:
        response = openai.responses.create(**same)
    items += [*response.output, {"role": "user", "content": f"and {turn}"}]
