"""Prompts by how often their earlier groups were right."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from moerl.batching.curriculum import FORGET_EPOCHS, Curriculum, CurriculumRule


def made(choice: CurriculumRule, num_prompts: int = 10, block: int = 3, seed: int = 1) -> Curriculum:
    return Curriculum(choice, num_prompts, block, seed)


def taken(curriculum: Curriculum, rates: dict[int, float], count: int) -> list[int]:
    """The next prompts, each of whose groups has a known share of right responses."""
    found = []
    for _ in range(count):
        found.append(curriculum.next())
        curriculum.learn(found[-1], rates.get(found[-1], 0.5))
    return found


def test_an_epoch_has_every_prompt_once_while_nothing_is_known():
    curriculum = made(CurriculumRule(skip_above=0.9))
    assert sorted(curriculum.next() for _ in range(10)) == list(range(10))


def test_prompts_that_are_always_or_never_right_are_passed_over_until_they_are_forgotten():
    curriculum = made(CurriculumRule(skip_above=0.9, skip_below=0.1))
    rates = {0: 1.0, 1: 0.0}
    taken(curriculum, rates, 10)
    later = Counter(taken(curriculum, rates, 8 * (FORGET_EPOCHS - 1)))
    assert later.keys() == set(range(2, 10))
    assert {0, 1} <= set(taken(curriculum, rates, 8 * 3))
    assert curriculum.num_passed >= 2 * (FORGET_EPOCHS - 1)


def test_prompts_near_a_half_come_more_often_where_they_are_weighed():
    curriculum = made(CurriculumRule(by_variance=True))
    counts = Counter(taken(curriculum, {prompt: 0.98 if prompt < 5 else 0.5 for prompt in range(10)}, 2000))
    easy, hard = sum(counts[prompt] for prompt in range(5)), sum(counts[prompt] for prompt in range(5, 10))
    assert 0.05 < easy / hard < 0.3


def test_where_all_are_passed_over_one_is_taken_all_the_same():
    curriculum = made(CurriculumRule(skip_above=0.5))
    assert len(taken(curriculum, dict.fromkeys(range(10), 1.0), 35)) == 35


@pytest.mark.parametrize("num_prompts", [3, 4, 10])
def test_prompts_of_a_block_are_different_ones(num_prompts: int):
    found = taken(made(CurriculumRule(skip_above=0.4), num_prompts), {0: 0.1, 1: 0.1}, 60)
    assert all(len(set(found[i : i + 3])) == 3 for i in range(58))


def test_a_restored_curriculum_goes_on_as_the_other_would_have():
    rates = {prompt: prompt / 10 for prompt in range(10)}
    whole, first = (made(CurriculumRule(0.85, 0.15, by_variance=True)) for _ in range(2))
    wanted = taken(whole, rates, 60)
    begun = taken(first, rates, 25)
    second = made(CurriculumRule(0.85, 0.15, by_variance=True))
    second.restore(json.loads(json.dumps(first.snapshot())))
    assert begun + taken(second, rates, 35) == wanted
    assert second.num_passed == whole.num_passed
