"""An agent on the Responses API of OpenAI's own client, as it comes: tools side by side, a stream, an edited history.

Its address and key come from the environment; it prints what it saw as JSON. Runs with an interpreter that has the
client.
"""

import json

from openai import BadRequestError, OpenAI

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
client, seen = OpenAI(max_retries=0), {}
same = {"model": "policy", "tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
items: list = [{"role": "user", "content": "two and two?"}]


def output(call, text):
    """Returns the item of a tool's result."""
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


first = client.responses.create(input=items, **same)
calls = [item for item in first.output if item.type == "function_call"]
seen["first"], seen["status"] = [item.type for item in first.output], first.status
seen["calls"] = [json.loads(call.arguments) for call in calls]
items += [*first.output, *(output(call, str(sum(json.loads(call.arguments)["of"]))) for call in calls)]

with client.responses.stream(input=items, **same) as stream:
    seen["events"] = [event.type for event in stream]
    second = stream.get_final_response()
seen["streamed"], seen["usage"] = second.output_text, [second.usage.input_tokens, second.usage.output_tokens]
call = next(item for item in second.output if item.type == "function_call")
items += [*(item.model_dump() for item in second.output), output(call, [{"type": "input_text", "text": "5"}])]
items.append({"role": "user", "content": [{"type": "input_text", "text": "and in words?"}]})
third = client.responses.create(input=items, max_output_tokens=4, **same)
seen["answer"], seen["cut"] = third.output_text, [third.status, third.incomplete_details.reason]

seen["refused"] = []
edited = [*items, {"role": "assistant", "content": "six"}, {"role": "user", "content": "sure?"}]
for fields in ({"input": edited}, {"input": items, "previous_response_id": third.id}):
    try:
        client.responses.create(**fields, **same)
    except BadRequestError as error:
        seen["refused"].append([error.code, str(error)])
print(json.dumps(seen))
