"""Episodes that an expert plays: what is learned of them, by token, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from episode_texts import TEXTS

from moerl.contract.episodes import ExpertTask, Session
from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.episodes.expert import ExpertSession, play_expert
from moerl.errors import ConfigError, EpisodeError

END = 1
Play = Callable[[Session], Coroutine[Any, Any, None]]


class OwnTask(ExpertTask):
    """Plays as a test says; the expert says `go`, and keeps what it was asked."""

    def __init__(self, own: Play, turn: str = "go") -> None:
        self.own, self.turn = own, turn
        self.asked: list[tuple[str, str]] = []

    def size(self, split: str) -> int:
        return 1

    def prompts(self, split: str, count: int) -> list[Prompt]:
        return [Prompt("p", "ab")]

    async def play(self, prompt: Prompt, session: Session) -> Mapping[str, float]:
        await self.own(session)
        return {"reward": 1.0}

    def expert(self, prompt: Prompt, agent_id: str, text: str, seed: int) -> str:
        self.asked.append((agent_id, text))
        return self.turn


def shown(play: Play, turn: str = "go") -> tuple[list[ExpertSession], list[tuple[str, str]]]:
    task = OwnTask(play, turn)
    sessions = play_expert(task, task.prompts("train", 1), TEXTS, END, max_new_tokens=12, seed=0)
    return sessions, task.asked


def ids(text: str) -> list[int]:
    return TEXTS.encode(text)


def test_turns_are_learned_with_their_ends_and_observations_are_not() -> None:
    async def play(session: Session) -> None:
        turn = await session.sample()
        assert (turn.text, turn.token_ids) == ("go", (*ids("go"), END))
        session.observe("x")
        await session.sample()
        session.observe("y")

    (session,), asked = shown(play)
    assert session.learned == (
        [*ids("ab"), *ids("go"), END, *ids("x"), *ids("go"), END],
        [False, False, True, True, True, False, True, True, True],
    )
    assert asked == [("", "ab"), ("", "abgo" + TEXTS.decode([END]) + "x")]


def test_each_session_is_learned_by_itself_and_the_expert_knows_the_agent() -> None:
    async def play(session: Session) -> None:
        await session.sample()
        await session.fork("again", 0).sample()
        await session.fork("on", 1).sample()
        await session.open("c", "other").sample()
        session.open("d", "silent")

    sessions, asked = shown(play)
    end = TEXTS.decode([END])
    assert asked == [("", "ab"), ("again", "ab"), ("on", f"abgo{end}"), ("other", "c")]
    assert [sum(session.learned[1]) for session in sessions] == [3, 3, 3, 3]
    assert [len(session.learned[0]) for session in sessions] == [5, 5, 8, 4]


def test_a_text_that_stops_a_turn_is_its_end() -> None:
    async def play(session: Session) -> None:
        turn = await session.sample(stop=["o"])
        assert (turn.text, turn.token_ids, turn.end_text) == ("go", tuple(ids("go")), "")

    (session,), _ = shown(play, "gone")
    assert session.learned[0] == [*ids("ab"), *ids("go")]


def test_a_turn_that_was_cut_off_is_not_learned() -> None:
    async def play(session: Session) -> None:
        await session.sample()
        session.observe("x")
        turn = await session.sample(2)
        assert (turn.token_ids, turn.finish_reason, turn.end_text) == (tuple(ids("go")), FinishReason.LENGTH, "")

    (session,), _ = shown(play)
    assert session.learned == ([*ids("ab"), *ids("go"), END], [False, False, True, True, True])


def test_an_expert_cannot_sample_in_a_session_that_is_over_either() -> None:
    async def play(session: Session) -> None:
        await session.sample()
        session.observe("x" * 20)
        assert session.is_over
        await session.sample()

    with pytest.raises(ConfigError, match=r"^p: .*a session that is over cannot sample"):
        shown(play)


def test_an_episode_without_a_whole_turn_is_refused_with_its_prompt() -> None:
    async def play(session: Session) -> None:
        await session.sample()
        assert session.is_over

    with pytest.raises(ConfigError, match=r"^p: .*no whole turn.*max_new_tokens"):
        shown(play, "o" * 12)


def test_sessions_have_no_more_room_than_those_of_rollouts() -> None:
    async def play(session: Session) -> None:
        assert session.num_left == 12
        session.observe("x" * 12)
        assert session.is_over
        session.open("y" * 14)

    with pytest.raises(ConfigError, match="leaves no room"):
        shown(play)


def test_an_expert_has_no_door() -> None:
    async def play(session: Session) -> None:
        with pytest.raises(EpisodeError, match="no door"):
            session.serve(Prompt("p", "ab"))

        await session.sample()

    assert len(shown(play)[0]) == 1


@pytest.mark.parametrize("number", [-1, 2])
def test_an_expert_forks_behind_turns_that_it_had(number: int) -> None:
    async def play(session: Session) -> None:
        await session.sample()
        with pytest.raises(EpisodeError, match=f"fork; seen: {number} turns; expected: 0 to 1"):
            session.fork("", number)

    assert len(shown(play)[0]) == 1
