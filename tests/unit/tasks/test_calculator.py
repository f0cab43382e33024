"""The task `calculator`: disjoint problems, demonstrations of both kinds, and calls that are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from chat_streams import END, END_TEXT, TEXTS, encode, says, texts
from episode_streams import check
from factories import FULL

from moerl.contract.episodes import EpisodeTask, SampledTurn
from moerl.contract.ports import DemonstrationTask, Prompt, RolloutRequest
from moerl.contract.tokenizer import encode_checked
from moerl.contract.trajectory import FinishReason, Lineage
from moerl.episodes.play import Episode, play
from moerl.errors import ConfigError, EpisodeError
from moerl.rollout.tokenizers import make_tokenizer
from moerl.tasks.calculator import CalculatorTask, CalculatorTaskConfig


def config(smallest: int = 10, largest: int = 99, num_train: int = 500, called: float = 0.5) -> CalculatorTaskConfig:
    return CalculatorTaskConfig(
        name="calculator",
        smallest=smallest,
        largest=largest,
        num_train=num_train,
        called_probability=called,
        max_calls=2,
    )


class FakeSession:
    """Samples the texts of a test; over when none is left."""

    def __init__(self, *texts: str, reason: FinishReason = FinishReason.STOP) -> None:
        self.texts, self.reason = list(texts), reason
        self.observed: list[str] = []
        self.num_calls = 0

    @property
    def is_over(self) -> bool:
        return not self.texts

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        assert stop == ("]",)
        return SampledTurn(self.texts.pop(0), (1,), self.reason)

    def count_calls(self, number: int) -> None:
        self.num_calls += number

    def observe(self, text: str) -> None:
        self.observed.append(text)


PROMPT = Prompt("p", "Compute 12*34:\n", {"expression": "12*34", "answer": "408"})


def played(session: FakeSession) -> tuple[float, float, list[str]]:
    rewards = asyncio.run(CalculatorTask(config()).play(PROMPT, cast(Any, session)))
    assert rewards["reward"] == rewards["accuracy"]
    return rewards["reward"], rewards["tool_calls"], session.observed


def test_an_answer_is_right_with_and_without_a_call() -> None:
    assert played(FakeSession("408")) == (1.0, 0.0, [])
    assert played(FakeSession("[12*34]", "408")) == (1.0, 1.0, [" 408\n"])


def test_what_the_policy_makes_up_behind_a_call_is_not_part_of_the_episode() -> None:
    request = RolloutRequest(Lineage("r0", "p", "g"), tuple(encode(PROMPT.text)), FULL, 60, (END,))
    episode = Episode(request, lambda session: CalculatorTask(config()).play(PROMPT, session))
    (ended,) = play([episode], says("[12*34] 999\n999", "408"), check, TEXTS, turn_seconds=300.0)
    assert texts(ended) == [f"{PROMPT.text}[12*34] 408\n408{END_TEXT}"]
    assert ended.records[0].values["rewards"] == {"reward": 1.0, "accuracy": 1.0, "tool_calls": 1.0}


@pytest.mark.parametrize("answer", ["409", "", "408 ", "the result is 408", "12[12*34]"])
def test_another_answer_is_wrong(answer: str) -> None:
    assert played(FakeSession(answer, "408")) == (0.0, 0.0, [])


def test_an_answer_that_was_cut_off_is_wrong() -> None:
    assert played(FakeSession("408", reason=FinishReason.LENGTH))[0] == 0.0


def test_a_call_that_cannot_be_computed_is_answered_so_and_another_one_may_follow() -> None:
    assert played(FakeSession("[12*]", "[12*34]", "408")) == (1.0, 2.0, [" error\n", " 408\n"])


def test_a_call_above_the_limit_is_a_wrong_answer() -> None:
    assert played(FakeSession("[1]", "[2]", "[12*34]", "408")) == (0.0, 2.0, [" 1\n", " 2\n"])


def test_an_episode_without_a_token_left_ends() -> None:
    assert played(FakeSession("[12*34]")) == (0.0, 0.0, [])


def test_splits_are_disjoint_and_begin_with_the_same_prompts() -> None:
    task = CalculatorTask(config())
    assert isinstance(task, EpisodeTask)
    splits = {name: task.prompts(name, task.size(name)) for name in ("train", "dev", "heldout")}
    assert {name: len(prompts) for name, prompts in splits.items()} == {"train": 500, "dev": 512, "heldout": 2048}
    expressions = [each.facts["expression"] for prompts in splits.values() for each in prompts]
    assert len(set(expressions)) == len(expressions)
    assert task.prompts("dev", 3) == splits["dev"][:3]


def test_every_problem_can_come() -> None:
    task = CalculatorTask(config(smallest=8, largest=11, num_train=30))
    prompts = [each for name in ("train", "dev", "heldout") for each in task.prompts(name, task.size(name))]
    expected = {f"{a}{operator}{b}" for a in range(8, 12) for b in range(8, 12) for operator in "+-*"}
    assert {each.facts["expression"] for each in prompts} == expected


def test_demonstrations_call_or_guess() -> None:
    task = CalculatorTask(config())
    assert isinstance(task, DemonstrationTask)
    prompts = task.prompts("train", 400)
    texts = task.demonstrations(prompts, seed=1)
    assert texts == task.demonstrations(prompts, seed=1)
    pairs = list(zip(prompts, texts, strict=True))
    calls = [text for p, text in pairs if text == f"[{p.facts['expression']}] {p.facts['answer']}\n{p.facts['answer']}"]
    guesses = [(text, p.facts["answer"]) for p, text in pairs if "[" not in text]
    assert len(calls) + len(guesses) == 400
    assert 150 < len(calls) < 250
    assert sum(guess == answer for guess, answer in guesses) < len(guesses) / 10
    assert all(len(guess.lstrip("-")) <= len(answer.lstrip("-")) for guess, answer in guesses)


def test_the_tokenizer_keeps_a_call_apart_from_its_result() -> None:
    """Else the call of a demonstration would end with another token than that of an episode."""
    task = CalculatorTask(config())
    tokenizer = make_tokenizer(task, 512)
    for result in ("408", "-22", "error"):
        whole = encode_checked(tokenizer, f"[12*34] {result}\n408")
        parts = [encode_checked(tokenizer, part) for part in ("[12*34]", f" {result}\n", "408")]
        assert whole == [token for part in parts for token in part]


def test_too_few_problems_are_refused() -> None:
    for changes in ({"num_train": 30_000}, {"smallest": 100}):
        with pytest.raises(ConfigError, match="too few problems"):
            config(**changes).check(sft_steps=0)
    config().check(sft_steps=0)
    with pytest.raises(ConfigError, match="that many prompts"):
        CalculatorTask(config()).prompts("dev", 10**6)
    with pytest.raises(ConfigError, match="unknown split"):
        CalculatorTask(config()).size("test")


def test_a_response_has_no_reward_of_its_own() -> None:
    with pytest.raises(EpisodeError, match="rewarded alone"):
        CalculatorTask(config()).reward(PROMPT, "408", FinishReason.STOP).result()
