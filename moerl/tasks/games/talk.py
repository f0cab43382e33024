"""Talk of one policy with an environment, in plain lines or in messages. Belongs to the event loop of the episodes."""

from __future__ import annotations

from typing import Literal

from moerl.contract.conversation import Conversation
from moerl.contract.episodes import SampledTurn, Session
from moerl.contract.ports import Prompt
from moerl.tasks.games.seeds import chat_of


class Talk:
    """A session that has begun with the first text of an environment, and goes on in the same form.

    Attributes:
        session: tokens of the talk.
        num_turns: turns that were sampled.
    """

    def __init__(self, session: Session, conversation: Conversation | None) -> None:
        """Takes over a session; `conversation` is that of its messages, None if it has plain lines."""
        self.session, self._conversation, self.num_turns = session, conversation, 0

    @classmethod
    def of(cls, prompt: Prompt, session: Session) -> Talk:
        """Returns the talk of an episode's session."""
        return cls(session, None if prompt.chat is None else Conversation.of(prompt, session))

    @classmethod
    async def opened(cls, parent: Session, opening: str, agent_id: str, text_as: Literal["raw", "chat"]) -> Talk:
        """Opens a session in the episode of `parent`, which begins with a text.

        Raises:
            SessionOverError: the text leaves no room to sample.
        """
        if text_as == "raw":
            return cls(parent.open(f"{opening}\n", agent_id), None)
        conversation = await Conversation.opened(parent, chat_of(opening), agent_id)
        return cls(conversation.session, conversation)

    async def turn(self, heard: str) -> SampledTurn | None:
        """Returns the policy's next turn, None if nothing more can be sampled.

        heard: text of the environment behind the latest turn; nothing before the first one.
        """
        if self.session.is_over:
            return None
        if self.num_turns and self._conversation is not None:
            await self._conversation.observe({"role": "user", "content": heard})
        elif self.num_turns:
            self.session.observe(f"\n{heard}\n")
        if self.session.is_over:
            return None
        turn = await (self._conversation or self.session).sample()
        self.num_turns += 1
        return turn
