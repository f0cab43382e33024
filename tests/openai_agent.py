"""An agent on OpenAI's own client, as it comes: tools side by side, a stream, several answers, an error.

Its address and key come from the environment; it prints what it saw as JSON. Runs with an interpreter that has the
client.
"""

import json

from openai import BadRequestError, OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
client, seen = OpenAI(), {}
messages = [{"role": "user", "content": "two and two?"}]

seen["models"] = [model.id for model in client.models.list()]
first = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], logprobs=True).choices[0]
seen["calls"] = [json.loads(call.function.arguments) for call in first.message.tool_calls]
seen["finish_reason"], seen["logprobs"] = first.finish_reason, len(first.logprobs.content)
messages.append(first.message)
for call in first.message.tool_calls:
    total = sum(json.loads(call.function.arguments)["of"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
second = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
seen["answer"], seen["usage"] = second.choices[0].message.content, second.usage.completion_tokens

messages += [second.choices[0].message, {"role": "user", "content": "sure?"}]
stream = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], stream=True)
seen["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

several = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], n=2)
seen["several"] = sorted(choice.message.content for choice in several.choices)
try:
    client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], temperature=0.3)
except BadRequestError as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
