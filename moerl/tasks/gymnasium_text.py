"""`task=gymnasium`: environments of Gymnasium that speak in texts.

Runs in the controller. In episodes an environment is made, reset and stepped in threads, and closed in the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field

from moerl.contract.episodes import Session, in_thread
from moerl.contract.ports import Prompt
from moerl.errors import ConfigError, EpisodeError, MoerlError, closing
from moerl.sections import Count
from moerl.tasks.games.seeds import SeedsSection, SeedsTask, require_package
from moerl.tasks.games.talk import Step
from moerl.user_function import load_function

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumTaskConfig(SeedsSection):
    """Environments of Gymnasium whose observations and actions are texts."""

    name: Literal["gymnasium"] = Field(description="Task.")
    environment: Annotated[str, Field(min_length=1)] = Field(
        description='Id that `gymnasium.make` takes, or your own function that makes one, as "package.module:function".'
    )
    options: dict[str, Any] = Field(description="Further arguments of the environment, by name.")
    instructions: str = Field(description="Text in front of the first observation.")
    actions: list[Annotated[str, Field(min_length=1)]] | None = Field(
        description="Words for the numbers of a discrete action, in their order; null = the action is a text."
    )
    max_turns: Count = Field(description="Most turns of an episode.")

    def open(self) -> GymnasiumTask:
        require_package("gymnasium", self.name)
        return GymnasiumTask(self)

    def check(self, *, sft_steps: int) -> None:
        words = self.actions or []
        if len(set(words)) != len(words) or any(word != word.strip() for word in words):
            raise ConfigError(
                "task.actions: not one word for each action",
                seen=words,
                expected="different words, without blanks around them",
                remedy="change task.actions",
            )


class GymnasiumTask(SeedsTask[GymnasiumTaskConfig]):
    """One episode of the environment for each seed."""

    def __init__(self, config: GymnasiumTaskConfig) -> None:
        super().__init__(config)
        words = config.actions
        self._no_action = "no such action" if words is None else f"no such action; one of: {', '.join(words)}"
        with closing(self._made()) as env:
            _check_actions(env.action_space, words)

    def openings(self, seeds: Sequence[int]) -> list[str]:
        with closing(self._made()) as env:
            try:
                return [self._opening(env, seed) for seed in seeds]
            except Exception as error:  # process boundary: code of the environment
                raise _unusable(self.config.environment, "does not begin", error) from error

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Returns `reward`, the sum of the rewards of all steps; `accuracy`, 1 from a reward of 1 on; `turns`; and
        `finished`, 1 if the environment came to its end.

        A turn that is no action of the environment uses up a turn and changes nothing else.
        """
        env = await in_thread(self._made)
        with closing(env):
            opening = await in_thread(lambda: self._opening(env, prompt.facts["seed"]))
            talk = self.talk(prompt, session, opening)
            return await talk.play(lambda text: self._act(env, text), self.config.max_turns)

    async def _act(self, env: Any, text: str) -> Step:
        words, word = self.config.actions, text.strip()
        is_action = word in words if words is not None else bool(env.action_space.contains(text))
        if not is_action:
            return self._no_action, None, False
        action = text if words is None else int(env.action_space.start) + words.index(word)
        return await in_thread(lambda: _step(env, action))

    def _made(self) -> Any:
        """Makes an environment. Raises `ConfigError` if that fails."""
        name = self.config.environment
        is_function = _FUNCTION.fullmatch(name) is not None
        make = load_function("task.environment", name) if is_function else import_module("gymnasium").make
        try:
            return make(**self.config.options) if is_function else make(name, **self.config.options)
        except Exception as error:  # process boundary: code of the environment
            raise _unusable(name, "cannot be made", error) from error

    def _opening(self, env: Any, seed: int) -> str:
        observation, _ = env.reset(seed=seed)
        return "\n\n".join(filter(None, (self.config.instructions, _text(env, observation))))


def _unusable(name: str, what: str, error: Exception) -> ConfigError:
    said = str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
    return ConfigError(
        f"task.environment: {name} {what}",
        seen=" ".join(said.split())[:400],
        expected="an id of Gymnasium's registry, module:id, or module:function",
        remedy="check the name and task.options",
    )


def _check_actions(space: Any, words: Sequence[str] | None) -> None:
    """Raises ConfigError if turns of a policy cannot be actions."""
    spaces = import_module("gymnasium.spaces")
    if words is None and not isinstance(space, spaces.Text):
        raise ConfigError(
            "task.environment: its actions are no texts",
            seen=space,
            expected="a space of the kind Text, or words",
            remedy="name the words of its actions with task.actions, or wrap it in a function of your own",
        )
    if words is not None and (not isinstance(space, spaces.Discrete) or space.n != len(words)):
        raise ConfigError(
            "task.actions: not the actions of the environment",
            seen=f"{len(words)} words, {space}",
            expected="a discrete space, and a word for each of its actions",
            remedy="change task.actions",
        )


def _text(env: Any, observation: object) -> str:
    """Returns an observation as text: as it is, or as the environment writes it. What stands out by its colour gets
    brackets.

    Raises:
        EpisodeError: neither is a text.
    """
    text: object = observation
    if not isinstance(text, str):
        with suppress(NotImplementedError):
            text = env.render()
    if not isinstance(text, str):
        raise EpisodeError(
            "task.environment: the observation is no text",
            seen=f"{type(observation).__name__}, rendered as {type(text).__name__}",
            expected="a text, or an environment that renders one",
            remedy="set task.options.render_mode=ansi, or wrap it in a function of your own",
        )
    return _COLOURED.sub(r"[\1]", text).strip()


def _step(env: Any, action: Any) -> Step:
    observation, reward, terminated, truncated, _ = env.step(action)
    return _text(env, observation), float(reward), bool(terminated or truncated)
