"""The chain_sum task: disjoint splits, worked solutions, rewards."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hostile_responses import HOSTILE

from moerl.contract.ports import Prompt
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError
from moerl.tasks.chain_sum import ChainSumTask, ChainSumTaskConfig, final_answer, num_problems

WORKED = {4: 0.3, 5: 0.4, 6: 0.6, 7: 0.7}


def config(**changes: Any) -> ChainSumTaskConfig:
    values: dict[str, Any] = {
        "name": "chain_sum",
        "min_terms": 4,
        "max_terms": 7,
        "min_digits": 1,
        "max_digits": 1,
        "num_train": 8000,
        "worked_probability": WORKED,
    }
    return ChainSumTaskConfig(**{**values, **changes})


def problem(expression: str, answer: int) -> Prompt:
    num_terms = len(expression.split()) // 2 + 1
    return Prompt("p", "?", {"expression": expression, "answer": str(answer), "num_terms": num_terms})


@pytest.fixture(scope="module")
def task() -> ChainSumTask:
    return ChainSumTask(config())


def test_the_splits_share_no_sum(task: ChainSumTask):
    splits = [task.prompts("train", 8000), task.prompts("dev", 256), task.prompts("heldout", 1000)]
    expressions = [prompt.facts["expression"] for split in splits for prompt in split]
    assert len(expressions) == 9256
    assert len(set(expressions)) == 9256


def test_train_shares_no_sum_with_the_whole_reserved_pools(task: ChainSumTask):
    train = {prompt.text for prompt in task.prompts("train", 8000)}
    for split in ("dev", "heldout"):
        pool = {prompt.text for prompt in task.prompts(split, task.size(split))}
        assert len(pool) == task.size(split)
        assert not pool & train


def test_a_split_is_the_same_whatever_was_asked_of_the_others_before():
    first, second = ChainSumTask(config()), ChainSumTask(config())
    second.prompts("heldout", 700)
    second.prompts("train", 3)
    assert first.prompts("train", 50) == second.prompts("train", 50)
    assert first.prompts("dev", 50) == second.prompts("dev", 50)
    assert first.prompts("heldout", 50) == second.prompts("heldout", 50)


def test_few_prompts_are_the_start_of_many(task: ChainSumTask):
    assert task.prompts("train", 7) == ChainSumTask(config()).prompts("train", 100)[:7]


def test_the_sums_of_small_settings_can_be_used_up_and_are_counted_exactly():
    small = config(min_terms=2, max_terms=2, num_train=125, worked_probability={2: 0.5})
    assert num_problems(small) == 200
    task = ChainSumTask(small)
    assert (task.size("dev"), task.size("heldout"), task.size("train")) == (25, 50, 125)
    texts = [prompt.text for split in ("train", "dev", "heldout") for prompt in task.prompts(split, task.size(split))]
    assert len(set(texts)) == 200


def test_sums_are_counted_over_all_lengths_and_digits():
    assert num_problems(config(min_terms=2, max_terms=3, max_digits=2)) == 200 + 4000 + 90**2 * 2 + 90**3 * 4


def test_more_training_problems_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"num_train.*at most 125"):
        ChainSumTask(config(min_terms=2, max_terms=2, num_train=126, worked_probability={2: 0.5}))


@pytest.mark.parametrize(("split", "count"), [("train", 8001), ("dev", 513), ("heldout", 2049), ("dev", -1)])
def test_asking_for_more_prompts_than_a_split_has_is_refused(task: ChainSumTask, split: str, count: int):
    with pytest.raises(ConfigError, match=f"the {split} split"):
        task.prompts(split, count)


def test_an_unknown_split_is_refused(task: ChainSumTask):
    with pytest.raises(ConfigError, match="unknown split; seen: test"):
        task.prompts("test", 1)


def test_a_prompt_is_the_question_and_a_newline(task: ChainSumTask):
    prompt = task.prompts("train", 1)[0]
    expression = prompt.facts["expression"]
    assert prompt.text == f"State the final answer to the following arithmetic problem: {expression} =\n"


def test_the_worked_solution_goes_through_the_sum_from_the_left(task: ChainSumTask):
    assert task.worked_solution(problem("0 - 2 + 5 + 0", 3)) == "0-2=-2;-2+5=3;3+0=3\n#### 3"


def test_every_solution_of_the_task_earns_the_reward(task: ChainSumTask):
    for prompt in task.prompts("train", 300):
        for response in (task.worked_solution(prompt), task.bare_answer(prompt)):
            assert task.reward(prompt, response, FinishReason.STOP).result()["reward"] == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "#### 4",
        "3",
        "####3",
        "#### 03",
        "#### +3",
        "#### 3.0",
        "#### 3 ",
        "#### 3\n",
        "#### 3\n#### 4",
        "x#### 3",
        "#### \u0663",
        "",
    ],
)
def test_a_response_that_does_not_end_in_exactly_the_answer_earns_nothing(task: ChainSumTask, response: str):
    rewards = task.reward(problem("1 + 2", 3), response, FinishReason.STOP).result()
    assert (rewards["reward"], rewards["accuracy"]) == (0.0, 0.0)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_right_answer_that_did_not_stop_by_itself_earns_nothing(task: ChainSumTask, reason: FinishReason):
    assert task.reward(problem("1 + 2", 3), "#### 3", reason).result()["reward"] == 0.0


def test_the_last_of_several_answers_counts(task: ChainSumTask):
    assert task.reward(problem("1 + 2", 3), "#### 4\n#### 3", FinishReason.STOP).result()["reward"] == 1.0


def test_reasoning_gyms_verifier_has_the_last_word(task: ChainSumTask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task._dataset, "score_answer", lambda answer, entry: 0.0)
    assert task.reward(problem("1 + 2", 3), "#### 3", FinishReason.STOP).result()["reward"] == 0.0


def test_shown_work_is_reported_whether_right_or_wrong(task: ChainSumTask):
    prompt = problem("0 - 2 + 5", 3)
    assert task.reward(prompt, "0-2=-2;-2+5=3\n#### 3", FinishReason.STOP).result()["worked"] == 1.0
    assert task.reward(prompt, "0-2=7", FinishReason.LENGTH).result()["worked"] == 1.0
    assert task.reward(prompt, "#### 3", FinishReason.STOP).result()["worked"] == 0.0


def test_demonstrations_are_worked_as_often_as_configured(task: ChainSumTask):
    prompts = task.prompts("train", 8000)
    worked = [";" in text for text in task.demonstrations(prompts, seed=1)]
    for num_terms, probability in WORKED.items():
        chosen = [w for w, p in zip(worked, prompts, strict=True) if p.facts["num_terms"] == num_terms]
        assert len(chosen) > 1500
        assert abs(sum(chosen) / len(chosen) - probability) < 0.05


def test_a_demonstration_depends_on_seed_and_prompt_alone(task: ChainSumTask):
    prompts = task.prompts("train", 100)
    whole = task.demonstrations(prompts, seed=1)
    assert task.demonstrations(prompts[40:60], seed=1) == whole[40:60]
    assert task.demonstrations(prompts, seed=2) != whole


def test_the_work_prefix_starts_the_worked_solution_and_gives_no_result_away(task: ChainSumTask):
    assert task.work_prefix(problem("0 - 2 + 5", 3)) == "0-"
    for prompt in task.prompts("train", 100):
        prefix = task.work_prefix(prompt)
        assert task.worked_solution(prompt).startswith(prefix)
        assert re.fullmatch(r"[0-9]+[+-]", prefix)


def test_numbers_of_several_digits_are_worked_out():
    prompt = problem("48 + 71 - 123", -4)
    task = ChainSumTask(config(max_digits=3))
    assert task.worked_solution(prompt) == "48+71=119;119-123=-4\n#### -4"
    assert task.reward(prompt, "#### -4", FinishReason.STOP).result()["reward"] == 1.0


def test_a_response_without_a_final_line_has_no_answer():
    assert final_answer("1+2=3") is None


@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_response_is_a_wrong_one(task: ChainSumTask, response: str):
    for text in (response, f"{response}\n#### {response}"):
        rewards = task.reward(problem("1 + 1", 2), text, FinishReason.STOP).result()
        assert (rewards["reward"], rewards["accuracy"]) == (0.0, 0.0)
