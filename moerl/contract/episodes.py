"""Port between a run and environments: an episode is a talk between policy and environment, in sessions.

A session holds the tokens of one policy: a prompt, turns that the policy samples, and observations, which the
environment writes between them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from moerl.contract.ports import Prompt, Task
from moerl.contract.trajectory import FinishReason
from moerl.errors import EpisodeError
from moerl.processes.loop_thread import in_thread as in_thread

Message = Mapping[str, Any]
"""Message of a conversation, or schema of a tool; plain JSON data."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One turn of a policy."""

    text: str
    """Sampled text, without the token that ended it."""
    token_ids: tuple[int, ...]
    """Sampled ids, with the one that ended the turn."""
    finish_reason: FinishReason
    """Reason for which sampling ended; `LENGTH` if the turn has as many tokens as it may have."""
    end_text: str = ""
    """Text of the token that ended the turn; empty if none did."""
    logprobs: tuple[float, ...] = ()
    """Log-prob of each sampled id under the distribution it was drawn from; natural logarithm."""


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Address at which an agent speaks with a policy."""

    url: str
    """Base address, with its `/v1`."""
    key: str = field(repr=False)
    """Key of the episode, for the header `Authorization: Bearer`."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables from which clients of OpenAI's and Anthropic's APIs read both."""
        anthropic = {"ANTHROPIC_BASE_URL": self.url.removesuffix("/v1"), "ANTHROPIC_API_KEY": self.key}
        return {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key, **anthropic}


class Session(Protocol):
    """Tokens of one policy in an episode. Only coroutines of its episode call it.

    Every token is trained as the policy sampled it: texts are encoded once, and never encoded again.
    """

    rewards: dict[str, float]
    """Named rewards of this session alone; they replace those of the episode that have the same name."""

    @property
    def num_left(self) -> int:
        """Number of tokens that the session may still get, sampled or observed."""
        ...

    @property
    def is_over(self) -> bool:
        """True if nothing more can be sampled: no token is left, sampling was aborted, or the episode has reached a
        limit (`episode.max_turns` and others). An episode that is told so counts as limited."""
        ...

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        """Has the policy go on behind the tokens that are there.

        Args:
            max_tokens: limit of this turn, at least 1; None = `num_left`.
            stop: texts; the turn ends with the token in which the first of them is complete. The engine samples on, and
                what it sampled behind that token never was.

        Raises:
            EpisodeError: the session is over, or samples already.
        """
        ...

    def count_calls(self, number: int) -> None:
        """Counts calls of tools in answers of this session, for `episode.max_calls`. Whoever reads calls out of an
        answer counts them, before tools are called."""

    def credit(self, reward: float, turn: int = -1) -> None:
        """Counts a part of the session's reward as earned by one of its turns, for `algorithm.credit=turn`. What no
        turn has earned counts as earned at the end.

        Args:
            reward: finite; several of one turn add up.
            turn: number of the sampled turn, from 0; -1 = the latest.

        Raises:
            EpisodeError: there is no such turn, or the reward is not finite.
        """

    def observe(self, text: str) -> None:
        """Appends text of the environment: encoded without special tokens, never trained on. It counts only if a turn
        is sampled behind it.

        Raises:
            EpisodeError: the text has no token, or the session samples.
        """

    async def render(self, messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        """Returns the text that the model's chat template writes for messages; with `ask`, and the start of an answer.
        `moerl.contract.conversation.Conversation` keeps a session and its messages together.

        Raises:
            ConfigError: the model has no template, or it fails on the messages.
        """
        ...

    def fork(self, agent_id: str = "", num_turns: int | None = None) -> Session:
        """Returns a session that goes on from the tokens of this one. They are trained in this session only.

        Args:
            agent_id: name of the agent that goes on; may be empty.
            num_turns: goes on behind the last token of that many sampled turns, or behind the prompt if 0; None =
                behind all tokens.

        Raises:
            EpisodeError: the session samples, and `num_turns` is None; or there are fewer turns.
        """
        ...

    def open(self, text: str, agent_id: str = "") -> Session:
        """Returns a session with a prompt of its own, for example of a sub-agent or an opponent. It may get as long as
        the session of the episode's prompt.

        Raises:
            EpisodeError: the text has no token, or leaves no room to sample.
        """
        ...

    def serve(self, prompt: Prompt, ignored: Collection[str] = ()) -> AbstractAsyncContextManager[AgentEndpoint]:
        """Lets agents that speak HTTP go on with this session, and open others in its episode,
        as long as the context lasts ([docs](docs/episodes.md#agents-that-speak-http)).

        Args:
            prompt: of the session; without messages only token ids are answered.
            ignored: fields of requests to leave aside that would be refused otherwise, such as `temperature`.

        Raises:
            EpisodeError: the session has sampled or observed.
        """
        ...


@runtime_checkable
class EpisodeTask(Task, Protocol):
    """A task whose prompts are played with an environment."""

    repeatable: bool = False
    """True if the environment does the same again for the same answers. Turns of episodes that have not ended then
    survive the process of the run: a run that goes on plays such an episode from its start with the answers that it
    had."""
    turn_seconds: float = 60.0
    """Seconds that the environment may take between two requests of an episode, and from the last one to its end."""

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        """Plays one episode, and returns its named rewards, as `reward` does. An episode that raises is refused.

        Episodes share one thread: code that blocks must be awaited (`in_thread`).

        session: starts with the tokens of the prompt.
        """
        ...

    def reward(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> Future[dict[str, float]]:
        """Returns a future that raises `EpisodeError`: an episode gets its rewards from `play`."""
        unused: Future[dict[str, float]] = Future()
        unused.set_exception(
            EpisodeError(
                "a response of an episode was to be rewarded alone", expected="the rewards that `play` returns"
            )
        )
        return unused


@runtime_checkable
class ExpertTask(EpisodeTask, Protocol):
    """A task with an expert that plays in the place of the policy. A supervised cold start learns its turns, in all
    sessions of an episode, and none of the environment's texts."""

    def expert(self, prompt: Prompt, agent_id: str, text: str, seed: int) -> str:
        """Returns the next turn of the expert, without the token that ends it; a pure function of the arguments.

        Args:
            agent_id: name of the agent whose turn it is.
            text: of its session so far, with the prompt, and with end tokens of earlier turns as text.
            seed: draws depend on it.
        """
        ...
