"""Episodes that an expert plays in the place of the policy: what a cold start learns from. No engine; one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from moerl.contract.episodes import AgentEndpoint, ExpertTask, Message, SampledTurn, in_thread
from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.episodes.session import Texts, require_room
from moerl.errors import ConfigError, EpisodeError, MoerlError, SessionOverError, as_config_error, closing


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """Means and limits of an expert."""

    turn: Callable[[str, str], str]
    """Returns the expert's next turn, from the name of an agent and the text of its session."""
    texts: Texts
    """Tokenizer of the model."""
    end: int
    """Token that ends a turn."""
    longest: int
    """Most tokens of a session."""


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """Place of a turn in its session."""

    start: int
    """Tokens before it."""
    end: int
    """Tokens up to its end."""
    is_whole: bool
    """False if it was cut off at its limit, as a turn of the policy would be; it is not learned then."""


@dataclass(slots=True, eq=False)
class ExpertSession:
    """A `Session` whose turns are an expert's."""

    rules: ExpertRules
    """Means and limits of the expert."""
    agent_id: str
    """Name of the agent; may be empty."""
    text: str
    """Text so far, with those of end tokens."""
    ids: list[int]
    """Tokens so far."""
    family: list[ExpertSession]
    """All sessions of the episode, oldest first."""
    turns: list[ExpertTurn] = field(default_factory=list[ExpertTurn])
    """Turns so far."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards as in `Session`; nobody reads them."""
    _behind: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Text and number of tokens up to the end of the prompt, and of each turn."""

    def __post_init__(self) -> None:
        self.family.append(self)
        self._behind.append((self.text, len(self.ids)))
        require_room(len(self.ids), self.rules.longest)

    @property
    def num_left(self) -> int:
        return self.rules.longest - len(self.ids)

    @property
    def is_over(self) -> bool:
        return self.num_left <= 0

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        if self.is_over:
            raise SessionOverError(
                "episode: a session that is over cannot sample", expected="a look at session.is_over"
            )
        texts, text = self.rules.texts, self.rules.turn(self.agent_id, self.text)
        ends = [text.find(each) + len(each) for each in stop if each in text]
        text = text[: min(ends)] if ends else text
        ids = [*texts.encode(text), *([] if ends else [self.rules.end])]
        limit = self.num_left if max_tokens is None else min(max_tokens, self.num_left)
        is_whole = len(ids) <= limit
        end_text = texts.decode([self.rules.end]) if is_whole and not ends else ""
        if not is_whole:
            ids = ids[:limit]
            text = texts.decode(ids)
        self.turns.append(ExpertTurn(len(self.ids), len(self.ids) + len(ids), is_whole))
        self.ids += ids
        self.text += text + end_text
        self._behind.append((self.text, len(self.ids)))
        return SampledTurn(text, tuple(ids), FinishReason.STOP if is_whole else FinishReason.LENGTH, end_text)

    def credit(self, reward: float, turn: int = -1) -> None:
        """Leaves a reward aside: an expert's turns are learned as they are."""

    def count_calls(self, number: int) -> None:
        """Leaves calls uncounted: limits of episodes (`episode.max_calls` and others) are those of the policy."""

    def observe(self, text: str) -> None:
        self.ids += self.rules.texts.encode(text)
        self.text += text

    async def render(self, messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        return await in_thread(lambda: self.rules.texts.render(messages, tools, ask))

    def fork(self, agent_id: str = "", num_turns: int | None = None) -> ExpertSession:
        if num_turns is not None and not 0 <= num_turns <= len(self.turns):
            raise EpisodeError("episode: fork", seen=f"{num_turns} turns", expected=f"0 to {len(self.turns)}")
        text, end = (self.text, len(self.ids)) if num_turns is None else self._behind[num_turns]
        return ExpertSession(self.rules, agent_id, text, self.ids[:end], self.family)

    def open(self, text: str, agent_id: str = "") -> ExpertSession:
        return ExpertSession(self.rules, agent_id, text, self.rules.texts.encode(text), self.family)

    def serve(self, prompt: Prompt, ignored: Collection[str] = ()) -> AbstractAsyncContextManager[AgentEndpoint]:
        raise EpisodeError("episode: an expert has no door", seen="session.serve", expected="session.sample")

    @property
    def learned(self) -> tuple[list[int], list[bool]]:
        """Tokens up to the end of the last whole turn; and of each, True if it is of a whole turn of this session."""
        whole = [turn for turn in self.turns if turn.is_whole]
        is_learned = [False] * (whole[-1].end if whole else 0)
        for turn in whole:
            is_learned[turn.start : turn.end] = [True] * (turn.end - turn.start)
        return self.ids[: len(is_learned)], is_learned


def play_expert(
    task: ExpertTask, prompts: Sequence[Prompt], texts: Texts, end: int, *, max_new_tokens: int, seed: int
) -> list[ExpertSession]:
    """Plays one episode for each prompt; returns the sessions that have whole turns, in order.

    Args:
        end: token that ends a turn.
        max_new_tokens: limits an episode as in a rollout.
        seed: the expert's draws depend on it.

    Raises:
        ConfigError: an episode raises a `MoerlError`, or none of its turns is whole; the error names the prompt.
    """

    async def played(prompt: Prompt) -> list[ExpertSession]:
        ids, family = texts.encode(prompt.text), list[ExpertSession]()
        rules = ExpertRules(
            lambda agent_id, text: task.expert(prompt, agent_id, text, seed), texts, end, len(ids) + max_new_tokens
        )
        try:
            await task.play(prompt, ExpertSession(rules, "", prompt.text, ids, family))
        except MoerlError as error:
            raise as_config_error(error, f"{task.place(prompt)}: {error.what}") from error
        learned = [session for session in family if any(turn.is_whole for turn in session.turns)]
        if not learned:
            raise ConfigError(
                f"{task.place(prompt)}: an episode of the expert has no whole turn",
                seen=f"{sum(len(session.turns) for session in family)} turns, cut off",
                expected="a turn that ends",
                remedy="raise rollout.max_new_tokens",
            )
        return learned

    with closing(asyncio.new_event_loop()) as loop:
        return [session for prompt in prompts for session in loop.run_until_complete(played(prompt))]
