"""A user's reward function in a process of its own, so that it can neither hang nor crash the run.

One long-lived child (`moerl.tasks.rewards.child`) for each worker of the pool; it is killed when a call runs past its
time limit and started again at the next call. Runs in the controller.

A function of a built-in kind is ours, and a response that fails by its own fault gets 0. If a call of it fails,
`PLAIN_RESPONSE` is scored with the same row: if that has a reward, the machine, the function and the row are in order,
and the response is to blame.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.errors import RewardError, undoing
from moerl.tasks.rewards.child import MAX_REPLY_BYTES, ChildLostError, ChildProcess, RewardChild, where
from moerl.telemetry.metrics import is_reward_name
from moerl.telemetry.terminal import ShownLines, excerpt
from moerl.user_function import not_loaded

IMPORT_SECONDS = 120.0
"""Longest time of the import of a user's module."""

PLAIN_RESPONSE = "1"
"""A number, a JSON value and a program, which no built-in kind fails at by itself."""

UNSCORED = "unscored"
"""Name next to the rewards of a built-in kind: 1 if they are 0 because the response made the call fail."""

Rewards = dict[str, float]
"""Rewards of a response by name."""

MakeChild = Callable[[int, ShownLines], ChildProcess]
"""Starts a process. Args: most bytes of its memory, and the lines that get what it prints."""

_EXPECTED = "a finite number, or a mapping of names to finite numbers that holds 'reward'"


@dataclass(eq=False)
class RewardProcess:
    """A user's reward function behind a time limit. Belongs to one thread; any thread may `stop` it."""

    function: str
    """``package.module:function``, called with ``(row, response_text)``. Modules are searched for on the import path of
    this process, then in the current directory."""
    timeout_seconds: float
    """Longest time of one call."""
    memory_bytes: int
    """Most memory of the process, and of each that the function starts."""
    key: str = "task.reward"
    """Key of the configuration that names the function; errors name it and its neighbours."""
    settings: Mapping[str, Any] | None = None
    """Settings of a built-in kind, for which `function` names the maker; None = `function` is the user's."""
    many: bool = False
    """True if the function is called with ``(rows, response_texts)``."""
    _make_child: MakeChild = RewardChild
    _child: ChildProcess | None = None
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        self._shown = ShownLines("reward function: ")

    def place(self, make_child: MakeChild) -> None:
        """Ends the process; the next call starts one by `make_child`."""
        self.close()
        self._make_child = make_child

    def start(self) -> ChildProcess:
        """Returns the process; starts it, unless it runs. Raises `ConfigError` if the function cannot be imported,
        `ChildLostError` if something else ended the process meanwhile."""
        if self._child is None:
            self._child = self._make_child(self.memory_bytes, self._shown)
            with undoing(self.close):
                self._import(self._child)
        return self._child

    def score_all(self, rows: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> list[Rewards | RewardError]:
        """Scores responses in one call. Starts the process if need be.

        Returns:
            For each its named rewards, `reward` and `accuracy` among them; or its error: the function raised, or
            returned something else than finite rewards. Of a built-in kind: the plain response has none, either.

        Raises:
            RewardError: The responses failed together, for example because the process hung or crashed. To find the
                one to blame, score each alone; the next call works again.
            ConfigError: The function cannot be imported.
        """
        if self.settings is not None:
            return [self._blamed(row, response) for row, response in zip(rows, responses, strict=True)]
        return self._called(rows, responses)

    def _blamed(self, row: Mapping[str, Any], response: str) -> Rewards | RewardError:
        """Returns the rewards of a built-in kind: 0 if the response alone makes the call fail, an error if something
        else does."""
        result = self._called_alone(row, response)
        if not isinstance(result, RewardError):
            return {**result, UNSCORED: 0.0}
        if self._is_stopped:
            return result
        plain = self._called_alone(row, PLAIN_RESPONSE)
        return result if isinstance(plain, RewardError) else {**dict.fromkeys(plain, 0.0), UNSCORED: 1.0}

    def _called_alone(self, row: Mapping[str, Any], response: str) -> Rewards | RewardError:
        try:
            return self._called([row], [response])[0]
        except RewardError as error:
            return error

    def _called(self, rows: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> list[Rewards | RewardError]:
        asked = {"rows": [dict(row) for row in rows], "responses": list(responses)}
        try:
            reply = self._ask(asked, len(rows) * MAX_REPLY_BYTES)
        except ChildLostError as lost:
            raise self._unanswered(lost) from lost
        results = reply.get("results")
        assert isinstance(results, list), "the worker answers with results"
        read = [self._read(result) for result in results]
        if len(read) > 1 and results[0].get("together") and isinstance(read[0], RewardError):
            raise read[0]
        return read

    def _ask(self, asked: Mapping[str, Any], max_reply_bytes: int) -> dict[str, Any]:
        """Returns the reply of the process.

        If something else may have ended the process, a fresh one is asked once more, so that neither a kill from
        outside nor what earlier calls left in memory fails a sample. A user's function that ended the process itself is
        not called again.
        """
        for is_last in (False, True):
            try:
                reply = self.start().ask(asked, self.timeout_seconds, max_reply_bytes=max_reply_bytes)
            except ChildLostError as lost:
                self._child = None
                if is_last or self._is_stopped or not (lost.kind == "outside" or self.settings is not None):
                    raise
                continue
            if any(result.get("memory") for result in reply["results"]):
                # What earlier calls keep takes memory, too.
                self.close()
                if self.settings is not None and not is_last:
                    continue
            return reply
        raise AssertionError("the last try returns or raises")

    def _read(self, result: Mapping[str, Any]) -> Rewards | RewardError:
        """Returns the rewards of one response, or its error."""
        if "rewards" in result:
            rewards: Rewards = result["rewards"]
            refused = next((name for name in rewards if not is_reward_name(name) or name == UNSCORED), None)
            if refused is None:
                return rewards
            return RewardError(
                f"reward function {self.function} returned a name that no metric can have",
                seen=excerpt(repr(refused)),
                expected=f"names of up to 64 letters, digits and the characters _ . -, but '{UNSCORED}'",
                remedy="rename the entry of the mapping",
            )
        if result.get("memory"):
            return self._out_of_memory(_told(result))
        return RewardError(
            f"reward function {self.function} " + ("raised" if "raised" in result else "returned no reward"),
            seen=_told(result),
            expected=_EXPECTED,
            remedy="make the function return a reward for this row and response",
        )

    def close(self) -> None:
        """Ends the process and all that the function has started. A later call starts a new one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """Ends the process from another thread: a call that is under way fails, and so do later ones."""
        self._is_stopped = True
        child = self._child
        if child is not None:
            child.end()

    def _import(self, child: ChildProcess) -> None:
        # Another thread may have called `stop` before there was a process to end.
        if self._is_stopped:
            raise not_loaded(self.key, self.function, "the task is closed")
        hello = {"function": self.function, "many": self.many, "sys_path": [*sys.path, os.getcwd()]}
        hello |= {} if self.settings is None else {"settings": dict(self.settings)}
        try:
            reply = child.ask(hello, IMPORT_SECONDS)
        except ChildLostError as lost:
            if lost.kind == "outside":
                raise
            raise not_loaded(self.key, self.function, str(lost)) from lost
        if "ready" not in reply:
            raise not_loaded(self.key, self.function, _told(reply))

    def _unanswered(self, lost: ChildLostError) -> RewardError:
        if lost.kind == "memory":
            return self._out_of_memory(str(lost))
        expected = "a function that returns, and leaves its process and its descriptors alone"
        remedy = "make the function return a reward for this row and response"
        if lost.kind == "late":
            expected = f"a reward within {self.timeout_seconds:g} s"
            remedy = f"make the function return in time, or raise {self._near('timeout_seconds')}"
        what = f"reward function {self.function} gave no answer"
        return RewardError(what, seen=str(lost), expected=expected, remedy=remedy)

    def _out_of_memory(self, seen: str) -> RewardError:
        return RewardError(
            f"reward function {self.function} ran out of memory",
            seen=seen,
            expected=f"at most {self.memory_bytes:,} bytes ({self._near('memory_bytes')})",
            remedy=f"make the function take less, or raise {self._near('memory_bytes')}",
        )

    def _near(self, name: str) -> str:
        """Returns the path of a neighbour of the function's key."""
        section = self.key.removesuffix(".function")
        return f"{self.key}_{name}" if section == self.key else f"{section}.{name}"


def _told(reply: Mapping[str, Any]) -> str:
    """Returns the worker's words for the error, and its place."""
    place = where([(str(file), int(line), str(name)) for file, line, name in reply["frames"]])
    return excerpt(str(reply.get("raised") or reply.get("returned")), 500) + (f", in {place}" if place else "")
