"""An agent on Anthropic's own client, as it comes: tools side by side, one that fails, a stream, an edited history.

Its address and key come from the environment; it prints what it saw as JSON. Runs with an interpreter that has the
client.
"""

import json

from anthropic import Anthropic, BadRequestError

TOOL = {"name": "add", "input_schema": {"type": "object"}}
client, seen = Anthropic(max_retries=0), {}
same = {"model": "policy", "max_tokens": 500, "tools": [TOOL]}
messages = [{"role": "user", "content": "two and two?"}]

first = client.messages.create(messages=messages, **same)
calls = [block for block in first.content if block.type == "tool_use"]
seen["first"] = [block.type for block in first.content]
seen["calls"], seen["ended"] = [call.input for call in calls], first.stop_reason
results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input["of"]))} for call in calls]
results[-1] |= {"content": "no such number", "is_error": True}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]

with client.messages.stream(messages=messages, **same) as stream:
    seen["streamed"] = list(stream.text_stream)
    second = stream.get_final_message()
    seen["again"] = [block.input for block in second.content if block.type == "tool_use"]
    seen["usage"] = [second.usage.input_tokens, second.usage.output_tokens]
results = [{"type": "tool_result", "tool_use_id": second.content[-1].id, "content": [{"type": "text", "text": "5"}]}]
results.append({"type": "text", "text": "and in words?"})
messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": results}]
third = client.messages.create(messages=messages, stop_sequences=["!"], **same)
seen["answer"], seen["stopped"] = third.content[0].text, [third.stop_reason, third.stop_sequence]

seen["refused"] = []
edited = [*messages, {"role": "assistant", "content": "six"}, {"role": "user", "content": "sure?"}]
for fields in ({"messages": edited}, {"messages": messages, "tool_choice": {"type": "any"}}):
    try:
        client.messages.create(**fields, **same)
    except BadRequestError as error:
        seen["refused"].append([error.body["type"], error.body["error"]["message"]])
print(json.dumps(seen))
