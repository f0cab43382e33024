"""The child process that calls a user's reward function. Started by `moerl.tasks.reward_process` as a script, so it
imports the standard library alone.

It reads JSON lines from its standard input and answers each with one on its standard output:

    {"function": "package.module:function", "sys_path": [...]}   first line   {"ready": true} or {"error": "..."}
    {"row": {...}, "response": "..."}                            all others   {"rewards": {...}} or {"error": "..."}
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TextIO


def load_function(name: str) -> Callable[..., Any]:
    """The callable that ``package.module:function`` names; raises `ImportError` where it is none."""
    module_name, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module_name), attribute, None)
    if not callable(function):
        raise ImportError(f"module {module_name!r} has no function {attribute!r}")
    return function


def checked_rewards(value: object) -> dict[str, float]:
    """A reward function's result as named, finite rewards.

    A number stands for ``{"reward": number}``. `accuracy`, where not given, is 1 if reward >= 1 and else 0.
    Raises `TypeError` or `ValueError` where the result is neither a number nor a mapping of names to finite
    numbers that holds `reward`, or where `accuracy` is neither 0 nor 1.
    """
    named = value if isinstance(value, Mapping) else {"reward": value}
    rewards: dict[str, float] = {}
    for name, reward in named.items():
        if not isinstance(name, str) or not isinstance(reward, Real):
            raise TypeError(f"expected a number or a mapping of names to numbers, got {value!r}")
        rewards[name] = float(reward)
        if not math.isfinite(rewards[name]):
            raise ValueError(f"{name} is not finite: {reward!r}")
    if "reward" not in rewards:
        raise ValueError(f"the mapping holds no 'reward': {value!r}")
    rewards.setdefault("accuracy", float(rewards["reward"] >= 1.0))
    if rewards["accuracy"] not in (0.0, 1.0):
        raise ValueError(f"accuracy is neither 0 nor 1: {rewards['accuracy']!r}")
    return rewards


def _describe(error: Exception) -> str:
    """The error and the innermost line it was raised on."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _listen(requests: TextIO, lines: queue.SimpleQueue[str]) -> None:
    """Hands lines on; ends the process, whatever the function is doing, once the parent is gone."""
    for line in requests:
        lines.put(line)
    os._exit(0)


def main() -> None:
    """Serves one parent until it closes the pipe."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What the function prints must not end up between the replies, nor may it read the requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def reply(message: dict[str, object]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, lines), daemon=True).start()
    hello = json.loads(lines.get())
    sys.path[:] = hello["sys_path"]
    try:
        function = load_function(hello["function"])
    except Exception as error:  # noqa: BLE001 - process boundary: a user's module can raise anything
        reply({"error": _describe(error)})
        return
    reply({"ready": True})
    while True:
        request = json.loads(lines.get())
        try:
            reply({"rewards": checked_rewards(function(request["row"], request["response"]))})
        except Exception as error:  # noqa: BLE001 - process boundary: a user's function can raise anything
            reply({"error": _describe(error)})


if __name__ == "__main__":
    main()
