"""The task `guess`: disjoint problems, and an environment that answers every kind of turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import pytest

from moerl.contract.episodes import ExpertTask, SampledTurn
from moerl.contract.ports import Chat, Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError, EpisodeError
from moerl.tasks.guess import GuessTask, GuessTaskConfig


def config(largest: int = 99, span: int = 9, text_as: Literal["raw", "chat"] = "raw") -> GuessTaskConfig:
    return GuessTaskConfig(name="guess", largest=largest, span=span, max_guesses=4, text_as=text_as)


class FakeSession:
    """Samples the texts of a test; over when none is left."""

    def __init__(self, texts: Sequence[str], reason: FinishReason = FinishReason.STOP) -> None:
        self.texts, self.reason = list(texts), reason
        self.observed: list[str] = []
        self.credits: list[float] = []

    @property
    def num_left(self) -> int:
        return 1_000 - len(self.observed)

    @property
    def is_over(self) -> bool:
        return not self.texts

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        return SampledTurn(self.texts.pop(0), (1,), self.reason)

    def observe(self, text: str) -> None:
        self.observed.append(text.strip())

    def credit(self, reward: float, turn: int = -1) -> None:
        self.credits.append(reward)


PROMPT = Prompt("p", "A number from 10 to 19:\n", {"low": 10, "secret": 14})


def played(session: FakeSession, task: GuessTask | None = None) -> tuple[float, float, list[str]]:
    rewards = asyncio.run((task or GuessTask(config())).play(PROMPT, cast(Any, session)))
    assert sum(session.credits) == pytest.approx(rewards["reward"])
    assert (rewards["reward"] == 1.0) == (rewards["accuracy"] == 1.0)
    return rewards["accuracy"], rewards["guesses"], session.observed


def test_hints_lead_to_the_number() -> None:
    assert played(FakeSession(["12", "17", "14", "15"])) == (1.0, 3.0, ["higher", "lower"])


def test_a_turn_earns_the_bits_that_it_leaves_fewer() -> None:
    session = FakeSession(["16", "11", "16", "x"])
    played(session)
    bits = [math.log2(1 + n) for n in (10, 6, 4)]
    assert session.credits == pytest.approx([(bits[0] - bits[1]) / bits[0], (bits[1] - bits[2]) / bits[0], 0.0, 0.0])


def test_what_is_no_number_is_called_so_and_uses_up_a_guess() -> None:
    assert played(FakeSession(["x", "", "-14", "14 "])) == (0.0, 4.0, ["no number"] * 4)


def test_a_number_that_was_cut_off_is_none() -> None:
    assert played(FakeSession(["14", "14"], FinishReason.LENGTH)) == (0.0, 2.0, ["no number"] * 2)


def test_an_episode_ends_with_its_guesses_or_its_tokens() -> None:
    assert played(FakeSession(["11"] * 9))[1] == 4.0
    assert played(FakeSession(["11"]))[1] == 1.0


def test_splits_hold_every_problem_and_no_range_of_another_split() -> None:
    task = GuessTask(config())
    splits = {name: task.prompts(name, task.size(name)) for name in ("train", "dev", "heldout")}
    problems = [(p.facts["low"], p.facts["secret"]) for prompts in splits.values() for p in prompts]
    assert len(set(problems)) == len(problems) == 90 * 10
    ranges = {name: {p.facts["low"] for p in prompts} for name, prompts in splits.items()}
    assert sum(map(len, ranges.values())) == 90
    assert len({p.prompt_id for prompts in splits.values() for p in prompts}) == len(problems)
    assert task.prompts("dev", 3) == splits["dev"][:3]


def test_the_expert_listens_to_hints_in_some_turns_alone() -> None:
    task = GuessTask(config())
    assert isinstance(task, ExpertTask)
    text = "A number from 10 to 19:\n12<eos>\nhigher\n17<eos>\nlower\n"
    guesses = [int(task.expert(PROMPT, "", text, seed)) for seed in range(400)]
    assert guesses == [int(task.expert(PROMPT, "", text, seed)) for seed in range(400)]
    assert set(guesses) == set(range(10, 20))
    # Half of the turns listen, and of the others four in ten fall between the hints.
    assert 0.6 < sum(12 < guess < 17 for guess in guesses) / 400 < 0.8
    assert {int(task.expert(PROMPT, "", "A number from 10 to 19:\n", seed)) for seed in range(200)} == set(
        range(10, 20)
    )


def test_too_few_problems_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.largest"):
        config(largest=5, span=9).check(sft_steps=0)
    with pytest.raises(ConfigError, match="that many prompts"):
        GuessTask(config()).prompts("dev", 10**6)
    with pytest.raises(ConfigError, match="unknown split"):
        GuessTask(config()).size("test")


def test_prompts_of_messages_are_written_by_the_template_once_and_dropped_together() -> None:
    task = GuessTask(config(text_as="chat"))
    assert task.has_chats
    splits = ("train", "dev", "heldout")
    write = lambda p: replace(p, text=f"<u>{p.chat.messages[0]['content']}") if p.facts["low"] > 1 else None  # noqa: E731
    task.write_prompts(cast(Any, write))
    prompts = [prompt for split in splits for prompt in task.prompts(split, task.size(split))]
    assert len(prompts) == 89 * 10
    assert {p.text for p in prompts} == {f"<u>A number from {low} to {low + 9}:" for low in range(2, 91)}


def test_hints_of_a_conversation_are_messages() -> None:
    class ChatSession(FakeSession):
        async def render(self, messages: Sequence[Any], tools: Sequence[Any], ask: bool) -> str:
            return "".join(f"<{m['role'][0]}>{m['content']}." for m in messages) + ("<a>" if ask else "")

    task, session = GuessTask(config(text_as="chat")), ChatSession(["12", "14"])
    chat = Chat(({"role": "user", "content": "A number?"},))
    prompt = replace(PROMPT, chat=chat, text="<u>A number?.<a>")
    rewards = asyncio.run(task.play(prompt, cast(Any, session)))
    assert rewards["guesses"] == 2.0
    assert session.observed == [".<u>higher.<a>"]


def test_a_response_of_an_episode_has_no_reward_of_its_own() -> None:
    with pytest.raises(EpisodeError, match="rewarded alone"):
        GuessTask(config()).reward(PROMPT, "14", FinishReason.STOP).result()
