"""Talk of one policy with an environment, in plain lines or in messages. Belongs to the event loop of the episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import SampledTurn, Session
from moerl.contract.ports import Chat, Prompt

Step = tuple[str, float | None, bool]
"""Text that the policy reads behind a turn; reward of the turn, None if it was no action; and True at the end."""


def chat_of(opening: str) -> Chat:
    """Returns the messages with which a conversation about a game begins."""
    return Chat(({"role": "user", "content": opening},))


class Talk:
    """A session that has begun with the first text of an environment, and goes on in the same form.

    Attributes:
        session: tokens of the talk.
        num_turns: turns that were sampled.
    """

    def __init__(self, session: Session, conversation: Conversation | None, max_turn_tokens: int | None) -> None:
        """Takes over a session.

        Args:
            conversation: of the session's messages; None if it has plain lines.
            max_turn_tokens: most tokens of a turn; None = no limit.
        """
        self.session, self._conversation, self._max_turn_tokens = session, conversation, max_turn_tokens
        self.num_turns = 0

    @classmethod
    def of(cls, prompt: Prompt, session: Session, max_turn_tokens: int | None = None) -> Talk:
        """Returns the talk of an episode's session."""
        return cls(session, None if prompt.chat is None else Conversation.of(prompt, session), max_turn_tokens)

    async def join(self, opening: str, agent_id: str) -> Talk:
        """Opens a session in the same episode and form, which begins with a text.

        Raises:
            SessionOverError: the text leaves no room to sample.
        """
        if self._conversation is None:
            return Talk(self.session.open(f"{opening}\n", agent_id), None, self._max_turn_tokens)
        conversation = await Conversation.opened(self.session, chat_of(opening), agent_id)
        return Talk(conversation.session, conversation, self._max_turn_tokens)

    def rewards(self, reward: float) -> dict[str, float]:
        """Returns what all games report of a talk: `reward`, `accuracy`, 1 from a reward of 1 on, and `turns`."""
        return {"reward": reward, "accuracy": float(reward >= 1.0), "turns": float(self.num_turns)}

    async def play(
        self, act: Callable[[str], Awaitable[Step]], max_turns: int, reward: float = 0.0, is_over: bool = False
    ) -> dict[str, float]:
        """Has the policy act until the environment comes to its end, or nothing more can be sampled.

        Args:
            act: does what a turn says.
            reward, is_over: of the beginning.

        Returns:
            `rewards` for the sum of all rewards; and `finished`, 1 if the environment came to its end.
        """
        seen = ""
        while not is_over and self.num_turns < max_turns:
            turn = await self.turn(seen)
            if turn is None:
                break
            seen, earned, is_over = await act(turn.text)
            if earned is not None:
                self.session.credit(earned)
                reward += earned
        return {**self.rewards(reward), "finished": float(is_over)}

    async def turn(self, heard: str) -> SampledTurn | None:
        """Returns the policy's next turn, None if nothing more can be sampled.

        heard: text of the environment behind the latest turn; nothing before the first one.
        """
        if self.session.is_over:
            return None
        if self.num_turns:
            await self.hear(heard)
        return None if self.session.is_over else await self.sample()

    async def hear(self, text: str) -> None:
        """Appends a text of the environment behind a turn."""
        if self._conversation is not None:
            await self._conversation.observe({"role": "user", "content": text})
        else:
            self.session.observe(f"\n{text}\n")

    async def sample(self) -> SampledTurn:
        """Has the policy go on. Raises as `Session.sample` does."""
        turn = await (self._conversation or self.session).sample(self._max_turn_tokens)
        self.num_turns += 1
        return turn
