"""The task `reasoning_gym`: several tries with feedback, judged by the set's own score."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from moerl.config.load import load_config
from moerl.contract.episodes import ExpertTask, SampledTurn
from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError
from moerl.tasks.reasoning_gym import NO_ANSWER, WRONG, ReasoningGymTask

KEYS = ("recipe=tiny", "task=reasoning_gym", "task.num_train=40", "task.num_dev=8", "task.num_heldout=8")
SUMS = ("task.dataset=chain_sum", "task.options={min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}")


def opened(*overrides: str) -> ReasoningGymTask:
    task = load_config([*KEYS, *(overrides or SUMS)], command="train").task.open()
    assert isinstance(task, ReasoningGymTask)
    return task


@pytest.fixture(scope="module")
def task() -> Iterator[ReasoningGymTask]:
    task = opened()
    yield task
    task.close()


@pytest.fixture(scope="module")
def chat_task() -> Iterator[ReasoningGymTask]:
    task = opened(*SUMS, "task.text_as=chat")
    task.write_prompts(lambda prompt: replace(prompt, text=written(prompt.chat.messages) if prompt.chat else ""))
    yield task
    task.close()


def written(messages: Sequence[Any], ask: bool = True) -> str:
    return "".join(f"<{m['role'][0]}>{m['content']}." for m in messages) + ("<a>" if ask else "")


class FakeSession:
    """Samples the texts of a test; over when none is left."""

    def __init__(self, *texts: str, reason: FinishReason = FinishReason.STOP) -> None:
        self.texts, self.reason = list(texts), reason
        self.observed: list[str] = []

    @property
    def num_left(self) -> int:
        return 1_000 - len(self.observed)

    @property
    def is_over(self) -> bool:
        return not self.texts

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> SampledTurn:
        return SampledTurn(self.texts.pop(0), (1,), self.reason)

    def observe(self, text: str) -> None:
        self.observed.append(text)

    async def render(self, messages: Sequence[Any], tools: Sequence[Any], ask: bool) -> str:
        return written(messages, ask)


def played(task: ReasoningGymTask, prompt: Prompt, session: FakeSession) -> dict[str, float]:
    return dict(asyncio.run(task.play(prompt, cast(Any, session))))


def test_a_wrong_answer_gets_feedback_and_another_try_for_less(task: ReasoningGymTask) -> None:
    prompt = task.prompts("train", 1)[0]
    session = FakeSession("x", prompt.facts["answer"], "never asked for")
    assert played(task, prompt, session) == {"reward": 0.8, "accuracy": 1.0, "tries": 2.0}
    assert session.observed == [f"\n{WRONG}\n"]


def test_an_episode_ends_with_its_tries_or_its_tokens(task: ReasoningGymTask) -> None:
    prompt = task.prompts("train", 1)[0]
    assert played(task, prompt, FakeSession(*"xxxx")) == {"reward": 0.0, "accuracy": 0.0, "tries": 3.0}
    assert played(task, prompt, FakeSession("x"))["tries"] == 1.0


def test_an_answer_that_was_cut_off_is_wrong(task: ReasoningGymTask) -> None:
    prompt = task.prompts("train", 1)[0]
    session = FakeSession(prompt.facts["answer"], reason=FinishReason.LENGTH)
    assert played(task, prompt, session)["reward"] == 0.0


def test_an_answer_of_a_conversation_stands_between_its_tags(chat_task: ReasoningGymTask) -> None:
    prompt = chat_task.prompts("train", 1)[0]
    answer = prompt.facts["answer"]
    session = FakeSession(answer, "<answer>x</answer>", f"<answer>1</answer> no: <answer> {answer} </answer>")
    assert played(chat_task, prompt, session)["tries"] == 3.0
    assert session.observed == [f".<u>{NO_ANSWER}.<a>", f".<u>{WRONG}.<a>"]
    assert "between <answer> and </answer>" in prompt.text


def test_a_set_that_scores_by_more_than_equality_is_asked_itself() -> None:
    task = opened("task.dataset=countdown", "task.try_discount=1.0")
    try:
        prompt = task.prompts("train", 1)[0]
        partial = played(task, prompt, FakeSession("1", "1", "1"))
        assert partial["accuracy"] == 0.0
        assert 0.0 < partial["reward"] < 1.0
        assert played(task, prompt, FakeSession(prompt.facts["answer"]))["reward"] == 1.0
    finally:
        task.close()


def test_splits_are_disjoint_and_the_first_prompts_are_the_same(task: ReasoningGymTask) -> None:
    splits = {name: task.prompts(name, task.size(name)) for name in ("train", "dev", "heldout")}
    questions = [p.facts["question"] for prompts in splits.values() for p in prompts]
    assert len(set(questions)) == len(questions) == 56
    assert len({p.prompt_id for prompts in splits.values() for p in prompts}) == 56
    assert task.prompts("dev", 3) == splits["dev"][:3]


def test_the_expert_knows_the_answer(task: ReasoningGymTask, chat_task: ReasoningGymTask) -> None:
    assert isinstance(task, ExpertTask)
    for each in (task, chat_task):
        prompt = each.prompts("train", 1)[0]
        assert played(each, prompt, FakeSession(each.expert(prompt, "", prompt.text, 0)))["reward"] == 1.0


def test_a_set_without_answers_is_no_cold_start() -> None:
    task = opened("task.dataset=rush_hour")
    task.check(num_demonstrations=0)
    with pytest.raises(ConfigError, match=r"no answer to learn from.*sft\.steps=0"):
        task.check(num_demonstrations=2)


def test_sets_and_settings_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such set"):
        opened("task.dataset=chain_sums")
    with pytest.raises(ConfigError, match=r"task\.options.*refuses them"):
        opened("task.dataset=chain_sum", "task.options={minimum: 3}")
    small = opened(SUMS[0], SUMS[1].replace("4", "2"), "task.num_train=400")
    with pytest.raises(ConfigError, match=r"task\.num_train.*too few problems"):
        small.prompts("train", 1)
    with pytest.raises(ConfigError, match="that many prompts"):
        opened().prompts("dev", 9)
    with pytest.raises(ConfigError, match="unknown split"):
        opened().size("test")


def test_a_score_is_tried_before_a_run(task: ReasoningGymTask) -> None:
    task.try_rewards()
    late = opened(*SUMS, "task.reward_timeout_seconds=1e-9")
    with pytest.raises(ConfigError, match="no answer"):
        late.try_rewards()
    late.close()
