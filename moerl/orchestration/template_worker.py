"""Process that writes messages by chat templates, which are programs of model directories. Started by
`moerl.orchestration.templates`, with limits; loads no torch.

    python -m moerl.orchestration.template_worker MEMORY SOCKET

MEMORY is the number of bytes that this process may use, SOCKET the descriptor of its connection. It sends `{}` once it
can begin. Requests and replies are messages of JSON:

    {"template": ..., "values": {...}, "messages": [...], "tools": [...], "ask": ..., "day": ...}    {"text": ...}
    {"template": ...}                                                                      {"variables": [...]}

`day` is the text that the template gets for every date, null for today. The reply to a template that fails is
{"failed": ...}.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from typing import Any

from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from moerl.processes.channel import receive, send
from moerl.processes.parent import connected

MAX_CHARACTERS = 1 << 25
"""Characters of a text, at most: twice the longest row of a data set."""


def main(memory_bytes: int, descriptor: str) -> None:
    """Serves requests until the connection ends."""
    with connected(descriptor) as connection:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        send(connection, b"{}")
        while True:
            send(connection, json.dumps(_reply(json.loads(receive(connection)[0]))).encode())


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "messages" not in request:
            return {"variables": sorted(_variables(request["template"]))}
        text = _write(request)
    except Exception as error:  # noqa: BLE001 - process boundary: a template can raise anything
        return {"failed": f"{type(error).__name__}: {error}"[:1000]}
    if len(text) > MAX_CHARACTERS:
        return {"failed": f"a text of {len(text):,} characters; at most {MAX_CHARACTERS:,} can be a prompt"}
    return {"text": text}


def _write(request: dict[str, Any]) -> str:
    values, day = request["values"], request["day"]
    if day is not None:
        values["strftime_now"] = lambda _: day
    [text], _ = render_jinja_template(
        conversations=[request["messages"]],
        tools=request["tools"] or None,
        chat_template=request["template"],
        add_generation_prompt=request["ask"],
        **values,
    )
    return text


def _variables(template: str) -> set[str]:
    """Returns the names that a template reads from outside."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    # A tag of transformers, for masks.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    return meta.find_undeclared_variables(environment.parse(plain))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
