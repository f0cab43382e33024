"""`task=environment`: problems from data sets, played by a function of your own. Runs in the controller."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import Field

from moerl.contract.episodes import EpisodeTask, Session
from moerl.contract.ports import Prompt
from moerl.contract.requirements import is_number
from moerl.errors import ConfigError, EpisodeError
from moerl.sections import FunctionName, Positive
from moerl.tasks.data.problems import ProblemRows
from moerl.tasks.data.rows_section import RowsSection
from moerl.user_function import check_function, load_function


class EnvironmentTaskConfig(RowsSection):
    """Problems from data sets, played in one turn or several by a function of your own."""

    name: Literal["environment"] = Field(description="Task.")
    play: FunctionName = Field(
        description='Your environment, a coroutine function play(prompt, session), as "package.module:function".'
    )
    options: dict[str, Any] = Field(description="Further arguments of your function, by name.")
    turn_seconds: Positive = Field(
        description="Longest time that the environment may take between two requests of an episode."
    )
    repeatable: bool = Field(
        default=False,
        description="The environment does the same again for the same answers, so that a run that goes on need not"
        " sample finished turns of unfinished episodes again.",
    )

    @property
    def own_functions(self) -> tuple[str, ...]:
        return (self.play,)

    def open(self) -> EnvironmentTask:
        return EnvironmentTask(self)

    def check_files(self) -> None:
        super().check_files()
        check_function("task.play", self.play)


class EnvironmentTask(ProblemRows, EpisodeTask):
    """Rows, and the environment that plays them."""

    def __init__(self, config: EnvironmentTaskConfig) -> None:
        super().__init__(config.data_sets, config.cut, response_keys=config.response_keys)
        self.turn_seconds, self.repeatable, self._options = config.turn_seconds, config.repeatable, config.options
        self._play = load_function("task.play", config.play)
        if not inspect.iscoroutinefunction(self._play):
            raise ConfigError(
                f"task.play: {config.play} is no coroutine function",
                seen=repr(self._play),
                expected="async def play(prompt, session)",
                remedy="write async def; call what blocks through moerl.contract.episodes.in_thread",
            )

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns the rewards of the function: a mapping with `reward`, or one number for that; an empty mapping if
        each session has its own. `accuracy` is 1 if the reward is at least 1, else 0, unless the function gives it."""
        result: object = await self._play(prompt, session, **self._options)
        rewards = dict(cast("Mapping[str, float]", result)) if isinstance(result, Mapping) else {"reward": result}
        if not rewards:
            return {}
        reward = rewards.get("reward")
        if not is_number(reward):
            raise EpisodeError(
                "task.play: rewards of an episode",
                seen=repr(result)[:120],
                expected="a number, a mapping with reward, or {} if each session has its own",
            )
        return {"accuracy": float(cast("float", reward) >= 1.0), **cast("dict[str, float]", rewards)}
