"""Prompts by how often their earlier groups were right."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from moerl.batching.curriculum import FORGET_EPOCHS, Curriculum
from moerl.config.load import load_config
from moerl.contract.ports import Prompt

WEIGHED = "rl.weigh_prompts=variance"


def made(*rules: str, num_prompts: int = 10) -> Curriculum:
    config = load_config(["recipe=tiny", "rl.prompts_per_step=3", *rules], command="train")
    found = Curriculum.of(config.rl, 1, [Prompt(str(number), "") for number in range(num_prompts)])
    assert found is not None
    return found


def taken(curriculum: Curriculum, rates: dict[int, float], count: int, first: int = 0) -> list[int]:
    """The prompts of the next groups, from number `first` on, each of which has a known share of right responses."""
    found = []
    for number in range(first, first + count):
        prompt = int(curriculum.prompt(number).prompt_id)
        found.append(prompt)
        curriculum.learn(str(prompt), rates.get(prompt, 0.5))
    return found


def num_passed(curriculum: Curriculum) -> float:
    return curriculum.metrics()["curriculum/passed"]


def test_without_a_rule_there_is_no_curriculum():
    assert Curriculum.of(load_config(["recipe=tiny"], command="train").rl, 1, [Prompt("0", "")]) is None


def test_an_epoch_has_every_prompt_once_while_nothing_is_known():
    curriculum = made("rl.skip_above=0.9")
    assert sorted(int(curriculum.prompt(number).prompt_id) for number in range(10)) == list(range(10))


def test_prompts_that_are_always_or_never_right_are_passed_over_until_they_are_forgotten():
    curriculum = made("rl.skip_above=0.9", "rl.skip_below=0.1")
    rates = {0: 1.0, 1: 0.0}
    taken(curriculum, rates, 10)
    later = Counter(taken(curriculum, rates, 8 * (FORGET_EPOCHS - 1), first=10))
    assert later.keys() == set(range(2, 10))
    assert {0, 1} <= set(taken(curriculum, rates, 8 * 3, first=100))
    assert num_passed(curriculum) >= 2 * (FORGET_EPOCHS - 1)


def test_prompts_near_a_half_come_more_often_where_they_are_weighed():
    curriculum = made(WEIGHED)
    counts = Counter(taken(curriculum, {prompt: 0.98 if prompt < 5 else 0.5 for prompt in range(10)}, 2000))
    easy, hard = sum(counts[prompt] for prompt in range(5)), sum(counts[prompt] for prompt in range(5, 10))
    assert 0.05 < easy / hard < 0.3


def test_where_all_are_passed_over_one_is_taken_all_the_same():
    curriculum = made("rl.skip_above=0.5")
    assert len(taken(curriculum, dict.fromkeys(range(10), 1.0), 35)) == 35


@pytest.mark.parametrize("num_prompts", [3, 4, 10])
def test_prompts_of_a_block_are_different_ones(num_prompts: int):
    found = taken(made("rl.skip_above=0.4", num_prompts=num_prompts), {0: 0.1, 1: 0.1}, 60)
    assert all(len(set(found[i : i + 3])) == 3 for i in range(58))


def test_a_restored_curriculum_goes_on_as_the_other_would_have():
    rates = {prompt: prompt / 10 for prompt in range(10)}
    rules = ("rl.skip_above=0.85", "rl.skip_below=0.15", WEIGHED)
    whole, first, second = (made(*rules) for _ in range(3))
    wanted = taken(whole, rates, 60)
    begun = taken(first, rates, 25)
    second.restore(json.loads(json.dumps(first.snapshot([24]))))
    assert int(second.prompt(24).prompt_id) == begun[24]
    assert begun + taken(second, rates, 35, first=25) == wanted
    assert num_passed(second) == num_passed(whole)
