"""`task=openenv`: environments behind servers that speak OpenEnv's WebSocket protocol. Runs in the controller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import msgspec
from pydantic import Field

from moerl.contract.episodes import Session
from moerl.contract.ports import Prompt
from moerl.errors import ConfigError, EpisodeError, MoerlError
from moerl.http.client import NoAnswerError
from moerl.http.websocket import JsonSocket, open_socket
from moerl.sections import Count, HttpAddress
from moerl.tasks.games.seeds import SeedsSection, SeedsTask
from moerl.tasks.games.talk import Step

MAX_ANSWER_BYTES = 4 << 20
"""Longest message of a server."""
_SHOWN = 200


class OpenEnvTaskConfig(SeedsSection):
    """Environments behind servers of OpenEnv."""

    name: Literal["openenv"] = Field(description="Task.")
    url: HttpAddress = Field(description="Address of the server, without /ws.")
    action: str | None = Field(
        description="Field of the action that the text of a turn becomes; null = a turn is the JSON of a whole action."
    )
    observation: str | None = Field(
        description="Field of the observation that the policy reads; null = all but metadata, as JSON."
    )
    instructions: str = Field(description="Text in front of the first observation.")
    options: dict[str, Any] = Field(description="Further arguments of a reset, by name.")
    max_turns: Count = Field(description="Most turns of an episode.")

    def open(self) -> OpenEnvTask:
        return OpenEnvTask(self)


class EnvironmentStep(msgspec.Struct, frozen=True):
    """Answer to a reset or an action."""

    observation: dict[str, Any]
    """Fields of the observation."""
    reward: float | None = None
    """Reward of this step; None counts as 0."""
    done: bool = False
    """True if the episode has ended."""


class _Refusal(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = []


class ActionRefusedError(EpisodeError):
    """Action that is none of the environment's, by the server's schema."""


class Environment:
    """One session with a server: an environment of its own, as long as the connection lasts."""

    def __init__(self, socket: JsonSocket, seconds: float) -> None:
        self._socket, self._seconds = socket, seconds

    async def ask(self, kind: Literal["reset", "step"], data: Mapping[str, Any]) -> EnvironmentStep:
        """Begins an episode with options, or acts.

        Raises:
            ActionRefusedError: the action does not meet the schema of the environment.
            EpisodeError: the environment failed, or the server has no session left.
            NoAnswerError: the server does not answer.
        """
        answer = await self._socket.ask({"type": kind, "data": data}, self._seconds)
        fields = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        try:
            if fields.get("type") == "error":
                raise _refused(kind, msgspec.convert(fields.get("data"), _Refusal))
            if fields.get("type") != "observation":
                raise NoAnswerError("no answer of OpenEnv", seen=repr(answer)[:_SHOWN], expected="an observation")
            return msgspec.convert(fields.get("data"), EnvironmentStep)
        except msgspec.ValidationError as error:
            raise NoAnswerError(
                "no answer of OpenEnv", seen=str(error), expected="observation, reward and done"
            ) from error


@asynccontextmanager
async def connect(url: str, seconds: float) -> AsyncIterator[Environment]:
    """Opens a session with a server. seconds: limit of each answer. Raises `NoAnswerError` if nobody answers."""
    async with open_socket(f"{url.rstrip('/')}/ws", max_bytes=MAX_ANSWER_BYTES) as socket:
        yield Environment(socket, seconds)
        await socket.tell({"type": "close"}, seconds)


class OpenEnvTask(SeedsTask[OpenEnvTaskConfig]):
    """One episode of the environment for each seed."""

    def openings(self, seeds: Sequence[int]) -> list[str]:
        try:
            return asyncio.run(self._openings(seeds))
        except (NoAnswerError, EpisodeError) as error:
            raise ConfigError(
                "task.url: the environment does not begin",
                seen=str(error),
                expected="a server of OpenEnv",
                remedy="start the server, and check task.url, task.options and task.observation",
            ) from error

    async def _openings(self, seeds: Sequence[int]) -> list[str]:
        async with connect(self.config.url, self.turn_seconds) as environment:
            return [self._opening(await environment.ask("reset", self._reset(seed))) for seed in seeds]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns `reward`, the sum of the rewards of all steps; `accuracy`, 1 from a reward of 1 on; `turns`; and
        `finished`, 1 if the environment came to its end.

        A turn that is no action by the server's schema uses up a turn; the policy reads why.
        """
        async with connect(self.config.url, self.turn_seconds) as environment:
            step = await environment.ask("reset", self._reset(prompt.facts["seed"]))
            talk = self.talk(prompt, session, self._opening(step))

            async def act(text: str) -> Step:
                try:
                    step = await environment.ask("step", self._action(text))
                except ActionRefusedError as refused:
                    return str(refused.seen), None, False
                return self._text(step), step.reward or 0.0, step.done

            return await talk.play(act, self.config.max_turns, step.reward or 0.0, step.done)

    def _reset(self, seed: int) -> Mapping[str, Any]:
        return {**self.config.options, "seed": seed}

    def _action(self, text: str) -> Mapping[str, Any]:
        """Returns the action of a turn. Raises `ActionRefusedError` if it is none."""
        if self.config.action is not None:
            return {self.config.action: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise ActionRefusedError("task.action", seen="not the JSON of an action")
        return cast("dict[str, Any]", action)

    def _opening(self, step: EnvironmentStep) -> str:
        return "\n\n".join(filter(None, (self.config.instructions, self._text(step))))

    def _text(self, step: EnvironmentStep) -> str:
        """Returns what the policy reads. Raises `EpisodeError` if the observation has no such text."""
        name = self.config.observation
        if name is None:
            fields = {field: each for field, each in step.observation.items() if field != "metadata"}
            return json.dumps(fields, ensure_ascii=False)
        text = step.observation.get(name)
        if not isinstance(text, str):
            raise EpisodeError(
                "task.observation: no text in the observation",
                seen=f"{name} is {type(text).__name__}; fields {', '.join(sorted(step.observation))}"[:_SHOWN],
                expected="a field with a text",
                remedy="name another field with task.observation; null = all but metadata, as JSON",
            )
        return text.strip()


def _refused(kind: str, refusal: _Refusal) -> MoerlError:
    """Returns the error for what a server refuses."""
    why = "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}" for each in refusal.errors)
    if kind == "step" and refusal.code == "VALIDATION_ERROR":
        return ActionRefusedError("OpenEnv: no action", seen=f"no such action: {why or refusal.message}"[:_SHOWN])
    capacity = "let the server have as many sessions as episodes are played together (max_concurrent_envs)"
    return EpisodeError(
        f"OpenEnv: {kind} failed",
        seen=f"{refusal.code} {refusal.message}"[:_SHOWN],
        expected="an observation",
        remedy=capacity if refusal.code == "CAPACITY_REACHED" else "look at the server's log",
    )
