"""Conversation over a session: messages in, and the tokens of earlier turns stay as they were sampled.

The chat template of a model writes texts of whole conversations. What the policy sampled is never encoded again: of two
such texts, only what is new behind the last answer becomes tokens. If the template writes the beginning differently
once something follows (it drops thinking, or trims an answer), no tokens can be what the policy saw and sampled, and
the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from moerl.contract.episodes import Message, SampledTurn, Session
from moerl.contract.ports import Chat, Prompt
from moerl.contract.spans import num_equal
from moerl.errors import EpisodeError

_SHOWN = 40


class Conversation:
    """A session that begins with messages. One call at a time.

    Attributes:
        messages: so far, with the policy's answers.
        session: tokens of the conversation.
        tools: schemas of the tools that the policy may call.
    """

    def __init__(self, session: Session, chat: Chat, text: str) -> None:
        """Takes over a session whose prompt is `text`, which the template wrote for `chat` with the start of an
        answer: that of a `Prompt` with messages."""
        self.session = session
        self.messages = [dict(each) for each in chat.messages]
        self.tools, self._text = chat.tools, text
        # Behind the prompt and behind each answer: messages, the text without that answer, and the text of its end.
        self._answered = [(len(self.messages), text, "")]

    @classmethod
    def of(cls, prompt: Prompt, session: Session) -> Conversation:
        """Returns the conversation of an episode's session, which begins with the messages of its prompt.

        Raises:
            EpisodeError: the prompt has no messages.
        """
        if prompt.chat is None:
            raise EpisodeError(
                "episode: the prompt has no messages",
                seen=f"the text of {prompt.prompt_id}",
                expected="messages, which a chat template has written",
                remedy="set task.text_as=user (of guess, reasoning_gym and games: chat)",
            )
        return cls(session, prompt.chat, prompt.text)

    @classmethod
    async def opened(cls, parent: Session, chat: Chat, agent_id: str = "") -> Conversation:
        """Opens a session in the episode of `parent`, with a prompt of these messages.

        Raises:
            ConfigError: the template fails on them.
        """
        text = await parent.render(chat.messages, chat.tools, True)
        return cls(parent.open(text, agent_id), chat, text)

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        """Has the policy answer; the answer becomes a message. Raises as `Session.sample` does."""
        if self.messages[-1]["role"] == "assistant":
            raise EpisodeError("episode: the conversation has an answer already", expected="another message first")
        turn = await self.session.sample(max_tokens, stop)
        self.messages.append({"role": "assistant", "content": turn.text})
        self._answered.append((len(self.messages), self._text, turn.end_text))
        return turn

    def retract(self) -> None:
        """Forgets the latest answer, which nobody has seen; its session has to forget it, too."""
        self.messages.pop()
        self._answered.pop()

    @property
    def num_turns(self) -> int:
        """Answers of the policy so far."""
        return len(self._answered) - 1

    def length(self, num_turns: int) -> int:
        """Returns the number of messages up to that many answers; of those before the first one if 0."""
        return self._answered[num_turns][0]

    def fork(self, num_turns: int, agent_id: str = "") -> Conversation:
        """Returns a conversation that goes on behind that many answers of this one, which may be sampling. Raises
        EpisodeError if there are fewer."""
        session = self.session.fork(agent_id, num_turns)
        length, text, ended_with = self._answered[num_turns]
        other = Conversation(session, Chat(tuple(self.messages[:length]), self.tools), text)
        other._answered = [(length, text, ended_with)]
        return other

    async def observe(self, *messages: Message) -> None:
        """Appends messages of others behind an answer.

        Raises:
            EpisodeError: there is no answer yet, one of them is an answer, or the template writes what was there
                differently once they follow.
            ConfigError: the template fails on them.
        """
        last = self.messages[-1]
        if last["role"] != "assistant" or not messages or any(each["role"] == "assistant" for each in messages):
            raise EpisodeError(
                "episode: messages do not go on from an answer",
                seen=", ".join(str(each["role"]) for each in (last, *messages)),
                expected="messages of other roles behind an answer of the policy",
            )
        num_left = self.session.num_left
        answered = await self.session.render(self.messages, self.tools, False)
        start = self._text + str(last["content"])
        if not answered.startswith(start):
            raise _unstable("an answer", answered, start)
        text = await self.session.render([*self.messages, *messages], self.tools, True)
        if not text.startswith(answered):
            raise _unstable("earlier turns", text, answered)
        if self.session.num_left != num_left:
            raise EpisodeError(
                "episode: a session was used without its conversation, while a template was rendered",
                seen=f"{num_left - self.session.num_left} tokens more",
                expected="one call at a time",
                remedy="leave the session to the conversation; more can be opened",
            )
        _, _, ended_with = self._answered[-1]
        self.session.observe(answered[len(start) :].removeprefix(ended_with) + text[len(answered) :])
        self._text = text
        self.messages += [dict(each) for each in messages]

    async def answer(self, messages: Sequence[Message], max_tokens: int | None = None) -> SampledTurn:
        """Has the policy answer a whole conversation, which begins with the messages that are there.

        Raises:
            EpisodeError: as `observe` and `sample`; or earlier messages are others.
        """
        num_known = len(self.messages)
        seen = [dict(each) for each in messages]
        if seen[:num_known] != self.messages:
            place = num_equal(seen, self.messages)
            raise EpisodeError(
                "episode: the conversation has other messages than before",
                seen=f"message {place} differs" if place < len(seen) else f"{len(seen)} messages",
                expected=f"the {num_known} messages so far, with the answers as they were sampled, and others behind",
                remedy="send the history unchanged, or open another session",
            )
        if len(seen) > num_known:
            await self.observe(*seen[num_known:])
        return await self.sample(max_tokens)


def _unstable(what: str, seen: str, expected: str) -> EpisodeError:
    place = num_equal(seen, expected)
    return EpisodeError(
        f"episode: the chat template writes {what} differently once something follows",
        seen=repr(seen[place : place + _SHOWN]),
        expected=repr(expected[place : place + _SHOWN]),
        remedy="take a model or an option of its template that keeps all of a conversation",
    )
