"""Session over token ids: owns the tokens of one policy in an episode, and the checked answers they came with.

Runs in the event loop of the episodes (`moerl.episodes.play`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moerl.contract.episodes import AgentEndpoint, Message, SampledTurn, in_thread
from moerl.contract.ports import Prompt, RolloutRequest
from moerl.contract.requirements import is_finite, is_number, shown
from moerl.contract.routing import rollout_key
from moerl.contract.trajectory import TURN_REWARDS, FinishReason, Lineage, Trajectory
from moerl.episodes.join import TurnPiece, join
from moerl.episodes.limits import Meter
from moerl.errors import EpisodeError, SessionOverError


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokenizer of a run, as sessions use it. Any thread."""

    encode: Callable[[str], list[int]]
    """Returns the ids of a text, without special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of ids."""
    render: Callable[[Sequence[Message], Sequence[Message], bool], str]
    """Writes messages as `Session.render` does, and may take seconds."""


@dataclass(frozen=True, slots=True)
class Voice:
    """Way of a session to the engine and the tokenizer."""

    ask: Callable[[RolloutRequest], Awaitable[Trajectory]]
    """Samples one turn behind exactly the tokens that are sent; raises `ContractError` if its answer breaks the
    contract."""
    texts: Texts
    """Tokenizer of the run."""
    waiting: Callable[[], AbstractContextManager[None]]
    """Context in which the episode waits for the engine, not for its environment."""
    serve: Callable[[TokenSession, Prompt, Collection[str]], AbstractAsyncContextManager[AgentEndpoint]]
    """Opens a door to a session, as `Session.serve` does."""


@dataclass(slots=True, eq=False)
class TokenSession:
    """A `Session`, and the record of what was sampled in it."""

    request: RolloutRequest
    """Request for its first turn; `max_new_tokens` limits all tokens behind the prompt."""
    voice: Voice
    """Way to the engine and the tokenizer."""
    meter: Meter
    """Use of the episode's limits, over all its sessions."""
    family: list[TokenSession]
    """All sessions of the episode, oldest first; the first is that of the episode's prompt."""
    prefix: str = ""
    """Text at the end of the prompt that counts as the start of the first turn."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards as in `Session`."""
    turns: list[TurnPiece] = field(default_factory=list[TurnPiece])
    """New parts of the answers so far."""
    turn_rewards: list[float | None] = field(default_factory=list[float | None])
    """Rewards of the turns so far; None for a turn without one."""
    token_ids: list[int] = field(init=False)
    """Ids so far, of the prompt, too; only the session changes them."""
    is_asking: bool = False
    """True while a turn is being sampled."""
    _num_asked: int = 0
    _was_limited: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.family.append(self)

    @property
    def rollout_id(self) -> str:
        """Id of the session's trajectory."""
        return self.request.lineage.rollout_id

    @property
    def ends(self) -> list[int]:
        """Number of tokens up to the end of the prompt, and of each sampled turn."""
        return [len(self.request.prompt_ids), *(turn.end for turn in self.turns)]

    @property
    def longest(self) -> int:
        """Most tokens of a session of the episode."""
        root = self.family[0].request
        return len(root.prompt_ids) + root.max_new_tokens

    @property
    def num_left(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_new_tokens - len(self.token_ids)

    @property
    def is_over(self) -> bool:
        if self.num_left <= 0 or (bool(self.turns) and self.turns[-1].finish_reason is FinishReason.ABORT):
            return True
        self._was_limited = self.meter.stops()
        return self._was_limited

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        self._require_quiet("sample")
        if self.is_over:
            reached = "rollout.max_new_tokens is reached" if self.num_left <= 0 else "sampling was aborted"
            raise SessionOverError(
                "episode: a session that is over cannot sample",
                seen=f"episode.{self.meter.stopped_by} is reached" if self._was_limited else reached,
                expected="a look at session.is_over first",
                remedy="end the episode, or raise the limit",
            )
        if max_tokens is not None and max_tokens < 1:
            raise EpisodeError("episode: max_tokens of a turn", seen=max_tokens, expected="at least 1")
        lineage, self._num_asked = self.request.lineage.of_turn(self._num_asked), self._num_asked + 1
        request = replace(
            self.request,
            lineage=lineage,
            prompt_ids=tuple(self.token_ids),
            max_new_tokens=min(self.num_left, max_tokens or self.num_left),
            known_rows=max(self._end - 1, 0),
        )
        self.is_asking = True
        self.meter.turns += 1
        try:
            with self.voice.waiting():
                turn = await self.voice.ask(request)
        finally:
            self.is_asking = False
        sampled = turn.token_ids[len(self.token_ids) :].tolist()
        has_end = sampled[-1] in request.stop_ids
        cut = self._first_stop(sampled[:-1] if has_end else sampled, stop)
        if cut is not None:
            sampled, has_end = sampled[:cut], False
        text = ("" if self.turns else self.prefix) + self.voice.texts.decode(sampled[:-1] if has_end else sampled)
        end_text = self.voice.texts.decode(sampled[-1:]) if has_end else ""
        start, end = len(self.token_ids), len(self.token_ids) + len(sampled)
        reason = turn.finish_reason if cut is None else FinishReason.STOP
        self.turns.append(TurnPiece.of(turn, self._end, end, reason))
        self.turn_rewards.append(None)
        self.token_ids += sampled
        self.meter.tokens += len(sampled)
        logprobs = tuple(turn.rollout_logprobs[start:end].tolist())
        return SampledTurn(text, tuple(sampled), reason, end_text, logprobs)

    def retract(self) -> None:
        """Forgets the latest turn: nobody has seen it. What was observed before it stays, to no effect."""
        self._require_quiet("retract")
        piece = self.turns.pop()
        self.turn_rewards.pop()
        del self.token_ids[piece.turns[-1].start :]

    def count_calls(self, number: int) -> None:
        self.meter.calls += number

    def credit(self, reward: float, turn: int = -1) -> None:
        if not -1 <= turn < len(self.turns) or not self.turns:
            raise EpisodeError("episode: a reward of a turn", seen=turn, expected=f"one of {len(self.turns)} turns")
        if not (is_number(reward) and is_finite(reward)):
            raise EpisodeError("episode: a reward of a turn", seen=shown(reward), expected="a finite number")
        self.turn_rewards[turn] = (self.turn_rewards[turn] or 0.0) + float(reward)

    def _first_stop(self, sampled: Sequence[int], stop: Sequence[str]) -> int | None:
        """Returns the fewest sampled tokens in which one of the texts is complete; None if none is."""

        def is_there(count: int) -> bool:
            text = self.voice.texts.decode(sampled[:count])
            return any(each in text for each in stop)

        if not stop or not is_there(len(sampled)):
            return None
        return bisect_left(range(len(sampled)), True, 1, key=is_there)

    def observe(self, text: str) -> None:
        self.extend(self._encode(text))

    def extend(self, ids: Sequence[int]) -> None:
        """Appends ids of the environment, as `observe` appends text."""
        self._require_quiet("observe")
        self.token_ids += ids

    async def render(self, messages: Sequence[Message], tools: Sequence[Message], ask: bool) -> str:
        return await in_thread(lambda: self.voice.texts.render(messages, tools, ask))

    def fork(self, agent_id: str = "", num_turns: int | None = None) -> TokenSession:
        if num_turns is None:
            self._require_quiet("fork")
            num_turns, ids = len(self.turns), self.token_ids
        elif 0 <= num_turns <= len(self.turns):
            ids = self.token_ids[: self.turns[num_turns - 1].end] if num_turns else self.request.prompt_ids
        else:
            raise EpisodeError("episode: fork", seen=f"{num_turns} turns", expected=f"0 to {len(self.turns)}")
        lineage = self.request.lineage
        # Without a sampled token there is no trajectory that the fork could name as its parent.
        own = (self.rollout_id, self.turns[num_turns - 1].end) if num_turns else None
        return self._open(ids, agent_id, own or (lineage.parent_rollout_id, lineage.fork_at))

    def open(self, text: str, agent_id: str = "") -> TokenSession:
        return self.begin(self._encode(text), agent_id)

    def begin(self, ids: Sequence[int], agent_id: str = "") -> TokenSession:
        """Opens a session with a prompt of these ids, as `open` does with a text."""
        require_room(len(ids), self.longest)
        return self._open(ids, agent_id, ("", -1))

    def serve(self, prompt: Prompt, ignored: Collection[str] = ()) -> AbstractAsyncContextManager[AgentEndpoint]:
        return self.voice.serve(self, prompt, ignored)

    def record(self) -> dict[str, Any]:
        """Returns the `Trajectory` fields of the session, which ends with its last sampled token.

        Raises:
            ContractError: its turns cannot be joined.
        """
        lineage, root = self.request.lineage, self.family[0]
        if self is not root or any(each.turns for each in self.family[1:]):
            lineage = replace(lineage, episode_id=root.rollout_id)
        values = join(self.turns, lineage)
        if any(reward is not None for reward in self.turn_rewards):
            rewards_S = np.zeros(self._end, np.float32)
            rewards_S[[turn.end - 1 for turn in self.turns]] = [reward or 0.0 for reward in self.turn_rewards]
            values["scores"] = {TURN_REWARDS: rewards_S}
        if values["finish_reason"] is not FinishReason.ABORT:
            # A limit of one turn is the environment's choice; an observation may use up what was left.
            was_cut = values["finish_reason"] is FinishReason.LENGTH or len(self.token_ids) > self._end
            is_cut = (was_cut and self.num_left <= 0) or self._was_limited
            values["finish_reason"] = FinishReason.LENGTH if is_cut else FinishReason.STOP
        return values

    @property
    def _end(self) -> int:
        """Tokens up to the last sampled one; 0 if none was."""
        return self.turns[-1].end if self.turns else 0

    def _open(self, ids: Sequence[int], agent_id: str, parent: tuple[str, int]) -> TokenSession:
        root = self.family[0].request
        rollout_id = f"{root.lineage.rollout_id}~{len(self.family)}"
        # Draws depend on seed and position: with the seed of its parent a fork would repeat the parent's draws.
        seed = rollout_key(f"{root.sampling.seed}/{rollout_id}") >> 1
        lineage = Lineage(rollout_id, root.lineage.prompt_id, root.lineage.group_id, "", agent_id, *parent)
        sampling = replace(root.sampling, seed=seed)
        num_left = max(self.longest - len(ids), 0)
        request = replace(root, lineage=lineage, prompt_ids=tuple(ids), sampling=sampling, max_new_tokens=num_left)
        return TokenSession(request, self.voice, self.meter, self.family)

    def _encode(self, text: str) -> list[int]:
        ids = self.voice.texts.encode(text)
        if not ids:
            raise EpisodeError("episode: a text of the environment has no token", seen=repr(text), expected="some text")
        return ids

    def _require_quiet(self, doing: str) -> None:
        if self.is_asking:
            raise EpisodeError(
                f"episode: {doing} in a session that samples",
                expected="one call at a time",
                remedy="await session.sample first, or fork the session",
            )


def require_room(num_tokens: int, longest: int) -> None:
    """Raises SessionOverError if a prompt of so many tokens leaves no room to sample in a session of at most
    `longest`."""
    if num_tokens >= longest:
        raise SessionOverError(
            "episode: a prompt leaves no room to sample",
            seen=f"{num_tokens} tokens",
            expected=f"fewer than {longest}, the longest sequence of the episode",
            remedy="shorten it, or raise rollout.max_new_tokens",
        )
