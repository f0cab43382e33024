"""The process that calls a user's reward function. Started by `moerl.processes.guard` as a script, so it imports
the standard library alone.

    worker.py FAULTS

FAULTS is a descriptor that gets the function's stack when the process crashes or gets `DUMP_SIGNAL`. Requests come on
standard input, each as its length in `LENGTH_DIGITS` digits, then JSON; replies go to standard output, a line each:

    {"function": "package.module:function", "sys_path": [...]}   first one    {"ready": true} or {"raised": ...}
    {"rows": [{...}, ...], "responses": ["...", ...]}            all others   {"results": [...]}

The first may hold `settings`, with which the function is called to give the one that rewards, and `many`: that function
takes lists of rows and responses. A result is {"rewards": {...}}, {"raised": ...} or {"returned": ...}, one for each
row; `together` in it says that a function of lists failed, and with it all rows. An async function is awaited; those of
the rows of a request run side by side.

A number of `CALL_BYTES` bytes follows each request and is sent back with the reply. It stays in the pipe until the
function has returned: while the function runs, nothing in its process knows the number.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import math
import os
import reprlib
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

LENGTH_DIGITS = 12
CALL_BYTES = 32
MAX_NAMES = 64
MAX_TEXT = 500
MAX_FRAMES = 20
MAX_REWARD = 1e12
"""Largest magnitude of a reward: the trainer squares differences of rewards in float32."""

DUMP_SIGNAL = signal.SIGRTMIN
"""Signal that dumps the function's stack, `moerl.processes.guard.HANDED_ON`. Not one that schedulers send: one dump in
a thousand crashes Python 3.12."""

OUT_OF_MEMORY = 86
"""Exit code if there is no memory left to answer with."""

_repr = reprlib.Repr(maxstring=120, maxother=120, maxdict=6, maxlist=6)


class NotARewardError(Exception):
    """Error of a function whose result is not a reward."""


def load_function(name: str) -> Callable[..., Any]:
    """Returns the callable that ``package.module:function`` names. Raises `ImportError` if there is none."""
    module_name, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module_name), attribute, None)
    if not callable(function):
        raise ImportError(f"module {module_name!r} has no function {attribute!r}")
    return function


def checked_rewards(value: object) -> dict[str, float]:
    """Returns a reward function's result as named, finite rewards.

    A number stands for ``{"reward": number}``. `accuracy`, if not given, is 1 if reward >= 1, else 0.

    Raises:
        NotARewardError: the result is neither a number nor a mapping of names to finite numbers that holds `reward`, or
            `accuracy` is neither 0 nor 1.
    """
    if isinstance(value, Mapping):
        names = len(value) + ("accuracy" not in value)
        if names > MAX_NAMES:
            raise NotARewardError(f"a mapping of {names} names with 'accuracy'; expected at most {MAX_NAMES} names")
        rewards = {_name(name): _number(_repr.repr(name), each) for name, each in value.items()}
    else:
        rewards = {"reward": _number("the result", value)}
    if "reward" not in rewards:
        raise NotARewardError(f"a mapping without 'reward': {_repr.repr(value)}")
    rewards.setdefault("accuracy", float(rewards["reward"] >= 1.0))
    if rewards["accuracy"] not in (0.0, 1.0):
        raise NotARewardError(f"an accuracy that is neither 0 nor 1: {rewards['accuracy']!r}")
    return rewards


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise NotARewardError(f"a mapping with a name that is no text: {_repr.repr(name)}")
    return name


def _number(what: str, value: object) -> float:
    number = value
    # Numbers of numpy and torch of no dimension become Python's; their booleans are no `Real`.
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        number = value.item()  # type: ignore[attr-defined]
    if not isinstance(number, Real):
        raise NotARewardError(f"{what} is {_kind(value)}, not a number: {_repr.repr(value)}")
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise NotARewardError(f"{what} is not finite: {_repr.repr(value)}")
    if abs(result) > MAX_REWARD:
        raise NotARewardError(f"{what} is {result!r}, beyond {MAX_REWARD:g}: float32 cannot square it")
    return result


def _kind(value: object) -> str:
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator (the function says yield, not return)"
    return "None (the function returned nothing)" if value is None else f"of type {type(value).__name__}"


def score_all(
    function: Callable[..., Any], rows: list[Any], responses: list[str], *, many: bool
) -> list[dict[str, Any]]:
    """Calls the function for each row, or once for all of them; returns a result for each row."""
    if many:
        return _score_many(function, rows, responses)
    calls = [_score(function, row, response) for row, response in zip(rows, responses, strict=True)]
    if not any(inspect.isawaitable(call) for call in calls):
        return calls  # type: ignore[return-value]

    import asyncio  # takes as long as the rest of a start, and few functions are async

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*(_reply_later(function, call) for call in calls))

    return asyncio.run(together())


def _score(function: Callable[..., Any], row: Any, response: str) -> dict[str, Any] | Awaitable[Any]:
    """Returns the result for one row, or an awaitable of it."""
    try:
        value = function(row, response)
    except Exception as error:  # noqa: BLE001 - process boundary: a user's function can raise anything
        return _raised(error, _definition(function))
    return value if inspect.isawaitable(value) else _reply(function, value)


async def _reply_later(function: Callable[..., Any], call: dict[str, Any] | Awaitable[Any]) -> dict[str, Any]:
    if isinstance(call, dict):
        return call
    try:
        value = await call
    except Exception as error:  # noqa: BLE001 - process boundary: a user's function can raise anything
        return _raised(error, _definition(function))
    return _reply(function, value)


def _score_many(function: Callable[..., Any], rows: list[Any], responses: list[str]) -> list[dict[str, Any]]:
    try:
        values = function(rows, responses)
        if inspect.isawaitable(values):
            import asyncio

            values = asyncio.run(_value_of(values))
    except Exception as error:  # noqa: BLE001 - process boundary: a user's function can raise anything
        return [{**_raised(error, _definition(function)), "together": True}] * len(rows)
    if not isinstance(values, list | tuple) or len(values) != len(rows):
        got = f"{len(values)} of them" if isinstance(values, list | tuple) else _kind(values)
        wrong = {"returned": f"not a list of {len(rows)} rewards: {got}", "frames": _definition(function)}
        return [{**wrong, "together": True}] * len(rows)
    return [_reply(function, value) for value in values]


async def _value_of(value: Awaitable[Any]) -> Any:
    return await value


def _reply(function: Callable[..., Any], value: object) -> dict[str, Any]:
    try:
        return {"rewards": checked_rewards(value)}
    except NotARewardError as error:
        return {"returned": str(error)[:MAX_TEXT], "frames": _definition(function)}


def _raised(error: BaseException, otherwise: list[list[object]]) -> dict[str, Any]:
    """Returns an error with the lines it came through, innermost first. otherwise: lines if there are none."""
    frames = [
        [frame.filename, frame.lineno, frame.name]
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if frame.filename not in (__file__, importlib.__file__)
    ]
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - process boundary: so can the text of an error
        text = type(error).__name__
    return {
        "raised": text[:MAX_TEXT],
        "frames": frames[:MAX_FRAMES] or otherwise,
        "memory": isinstance(error, MemoryError),
    }


def _definition(function: Callable[..., Any]) -> list[list[object]]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return [] if code is None else [[code.co_filename, code.co_firstlineno, code.co_name]]


def _exactly(descriptor: int, size: int) -> bytes:
    """Reads the next `size` bytes. Ends the process if the other side is gone."""
    parts = []
    while size:
        parts.append(os.read(descriptor, min(size, 1 << 20)))
        if not parts[-1]:
            os._exit(0)
        size -= len(parts[-1])
    return b"".join(parts)


def _serve(requests: int, replies: int) -> None:
    def request() -> dict[str, Any]:
        return json.loads(_exactly(requests, int(_exactly(requests, LENGTH_DIGITS))))

    def reply(message: dict[str, Any]) -> None:
        call = _exactly(requests, CALL_BYTES).decode()
        line = json.dumps({**message, "call": call}).encode() + b"\n"
        while line:
            line = line[os.write(replies, line) :]

    hello = request()
    sys.path[:] = hello["sys_path"]
    try:
        function = load_function(hello["function"])
        if "settings" in hello:
            function = function(**hello["settings"])
    except Exception as error:  # noqa: BLE001 - process boundary: a user's module can raise anything
        reply(_raised(error, []))
        return
    reply({"ready": True})
    while True:
        asked = request()
        reply({"results": score_all(function, asked["rows"], asked["responses"], many=bool(hello.get("many")))})


def _be_spared() -> None:
    """Handles the signals to a whole job, which were blocked when this process started, so that they do not end it.
    Processes that the function starts end by them, as usual."""
    spared = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in spared:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in spared])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, spared)


def main(faults: int) -> None:
    """Serves until nobody holds the other end of the requests any more."""
    requests, replies = os.dup(0), os.dup(1)
    # What the function prints must not end up between the replies, nor may it read the requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(faults, False)
    faulthandler.enable(faults, all_threads=False)
    faulthandler.register(DUMP_SIGNAL, faults, all_threads=False)
    _be_spared()
    try:
        _serve(requests, replies)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main(int(sys.argv[1]))
