"""The first error is the one that is shown, whatever clears up after it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from moerl.errors import CheckpointError, MoerlError, closing, ending, undoing

ROOT = Path(__file__).parents[2]
HARMLESS = {
    # Containers, futures, flags, clocks and texts.
    *("add_note", "append", "call_soon", "cancel", "cancelled", "clear", "discard", "done", "format_exc", "get"),
    *("getattr", "id", "is_alive", "isinstance", "items", "list", "monotonic", "note_later", "perf_counter", "pop"),
    *("print", "printable", "release", "result", "set", "sorted", "startswith", "str", "time", "type"),
    # Signals, timers, logging and lists of libraries, as they were before.
    *("add_safe_globals", "clear_safe_globals", "disable", "setLevel", "setitimer", "signal"),
    # Threads, and children that this process has started.
    *("_exit", "join", "kill", "shutdown", "terminate", "wait"),
}
"""Names of calls that do not fail."""
EXAMINED = {
    "moerl/contract/quarantine.py: difference_update": "a set",
    "moerl/episodes/chat_door.py: _forget": "lists",
    "moerl/episodes/chat_door.py: gather": "returns errors",
    "moerl/episodes/play.py: add": "a set",
    "moerl/episodes/limits.py: clock": "a clock",
    "moerl/episodes/limits.py: expired": "a clock",
    "moerl/episodes/limits.py: reschedule": "a clock, asked before whether it has run out",
    "moerl/episodes/play.py: put": "a queue without an end, which has the error by then",
    "moerl/episodes/play.py: submit": "wakes the caller, who raises the error",
    "moerl/errors.py: undo": "what the rule asks for",
    "moerl/machine/torch_start.py: enable": "a flag of Python",
    "moerl/http/server.py: cleanup": "of a server that nobody has asked yet",
    "moerl/http/server.py: gather": "returns errors",
    "moerl/tasks/games/textarena_game.py: getstate": "random numbers of this process",
    "moerl/tasks/games/textarena_game.py: setstate": "random numbers of this process",
    "moerl/launch/sglang.py: close": "a client, asynchronously",
    "moerl/launch/run_lock.py: _check_ours": "its error says why the file could not be opened",
    "moerl/launch/run_lock.py: lstat": "of a file that the system has just refused to open",
    "moerl/processes/admission.py: _forget": "closes a socket",
    "moerl/processes/admission.py: close": "a socket",
    "moerl/processes/loop_thread.py: call_soon_threadsafe": "of a loop that runs",
    "moerl/processes/loop_thread.py: close": "a loop that was stopped",
    "moerl/processes/host.py: end": "a child of this process",
    "moerl/processes/spared.py: pthread_sigmask": "the mask that there was",
    "moerl/tasks/rewards/code.py: end_group": "a child of this process",
    "moerl/reading.py: close": "a descriptor that was just opened",
    "moerl/trainer/offload.py: setattr": "an attribute that there was",
    "moerl/rollout/conformance/servers.py: close": "a client, asynchronously",
    "moerl/rollout/fleet/engine.py: _reopen": "counters and a wake-up",
    "moerl/rollout/fleet/engine.py: failed": "a list",
    "moerl/rollout/fleet/engine.py: lose": "a task is begun",
    "moerl/rollout/fleet/engine.py: reopen": "counters and a wake-up",
    "moerl/rollout/fleet/engine.py: _give_up": "its error is noted",
    "moerl/rollout/fleet/fleet.py: to_thread": "a launcher ends its own process, asynchronously",
    "moerl/rollout/fleet/updates.py: _close": "assignments",
    "moerl/rollout/fleet/updates.py: _drop": "a list",
    "moerl/rollout/fleet/updates.py: _drop_all": "a list",
    "moerl/rollout/fleet/updates.py: failed": "a list",
    "moerl/rollout/sglang/backend.py: close": "a client, asynchronously",
    "moerl/rollout/sglang/launchers.py: stop": "ends its own process and discards files",
    "moerl/tasks/tools/mcp_server.py: __aexit__": "its error is noted",
    "moerl/telemetry/spans.py: _clock": "a clock",
    "moerl/telemetry/trackers/sink.py: end": "closes a socket and ends its own process",
    "moerl/trainer/saver.py: _abandon": "removes what can be removed",
    "moerl/weights/publish.py: abandon": "hands a call to a thread",
}
"""Other calls that were looked at, by file and name: why they do not fail, or why that does not matter."""


def calls_that_may_hide_an_error(path: str, text: str) -> Iterator[str]:
    """Calls in `finally`, and in handlers that raise again."""
    for node in ast.walk(ast.parse(text)):
        block = node.finalbody if isinstance(node, ast.Try) else []
        if isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
            block = node.body
        for call in (call for statement in block for call in unsuppressed_calls(statement)):
            name = getattr(call.func, "attr", None) or getattr(call.func, "id", "?")
            if name not in HARMLESS:
                yield f"{path}: {name}"


def unsuppressed_calls(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.With) and "suppress(" in ast.unparse(node.items[0]):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from unsuppressed_calls(child)


def test_what_may_fail_is_not_called_where_it_would_hide_the_error_before() -> None:
    """Use `ending`, `undoing` or `closing` of `moerl.errors`, or look at the call and add it to `EXAMINED`."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "moerl").rglob("*.py")}
    found = {call for path, text in sources.items() for call in calls_that_may_hide_an_error(path, text)}
    assert sorted(found - EXAMINED.keys()) == []
    assert sorted(EXAMINED.keys() - found) == []


def test_things_are_closed_by_the_function_that_keeps_the_first_error() -> None:
    importing = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moerl").rglob("*.py")
        if re.search(r"from contextlib import .*\bclosing\b|contextlib\.closing", path.read_text())
    ]
    assert importing == []


def fail(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


LATER = MoerlError("cannot write metrics.jsonl", seen="No space left on device")


@pytest.mark.parametrize("around", [ending, undoing])
def test_the_first_error_is_raised_and_the_later_one_is_its_note(around: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match="not written") as caught, around(fail(LATER)):
        raise CheckpointError("not written")
    assert caught.value.__notes__ == [f"and {LATER}"]


def test_a_later_error_that_says_the_same_is_not_said_twice() -> None:
    with pytest.raises(MoerlError) as caught, ending(fail(MoerlError("gone"))):
        raise MoerlError("gone")
    assert not hasattr(caught.value, "__notes__")


def test_an_error_of_the_system_is_noted_with_its_kind_and_without_control_characters() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, ending(fail(OSError("\x1b[2J"))):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == ["and OSError: \\x1b[2J"]


def test_the_error_of_an_end_is_raised_if_there_was_none_before() -> None:
    with pytest.raises(MoerlError, match=r"cannot write metrics\.jsonl"), ending(fail(LATER)):
        pass
    with undoing(fail(LATER)):
        pass


def test_an_end_that_fails_as_a_generator_is_closed_is_raised() -> None:
    def numbers() -> Generator[int]:
        with ending(fail(LATER)):
            yield 1

    generator = numbers()
    next(generator)
    with pytest.raises(MoerlError, match=r"cannot write metrics\.jsonl"):
        generator.close()


def test_a_thing_is_closed_once_whatever_happens() -> None:
    class Thing:
        closed = 0

        def close(self) -> None:
            self.closed += 1
            raise LATER

    thing = Thing()
    with pytest.raises(ZeroDivisionError), closing(thing):
        raise ZeroDivisionError
    assert thing.closed == 1
